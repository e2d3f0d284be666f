"""Backends: what moves and reduces the bytes of a group of ranks."""
