"""Output of ranks: prefixes, files, and writers that never block."""
