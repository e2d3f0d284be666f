"""Launching on other hosts by ssh."""
