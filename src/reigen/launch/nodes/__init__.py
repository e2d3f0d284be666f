"""Self-start: all nodes run the same `reigen run --nodes-from-env`, and find each other by their engine's variables."""
