"""Dashboard of a job in a browser: `reigen run --dashboard`."""
