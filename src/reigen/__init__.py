"""Reigen: data-parallel training of one model on many processes."""

from reigen._version import __version__

__all__ = ["__version__"]
