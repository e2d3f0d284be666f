"""Running a function in several processes."""

from reigen import run

__all__ = ["run"]
