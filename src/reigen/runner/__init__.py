"""`reigen.run`: a function, instead of a command, in several processes."""

from reigen.runner.call import run

__all__ = ["run"]
