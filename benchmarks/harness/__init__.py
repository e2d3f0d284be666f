"""Reigen and its peers, measured alternately in one run. `reigen bench` is its command."""
