"""Metrics of a job at its launcher: for Prometheus, as JSON lines, and as a table on the terminal."""
