"""Horovod's package, as unmodified scripts import it: re-exports of Reigen, no logic.

The version is that of the last Horovod whose interface this is, and says that it is not that Horovod.
"""

from reigen import run

__version__ = "0.28.1+reigen"

__all__ = ["__version__", "run"]
