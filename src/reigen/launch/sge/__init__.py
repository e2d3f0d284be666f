"""Launching in jobs of Grid Engine (SGE and its successors), and their submission."""
