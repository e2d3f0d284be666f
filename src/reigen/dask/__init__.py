"""Jobs in Dask: functions on the workers of a ``distributed.Client``.

Nothing of Dask is imported before it is used.
"""

from reigen.dask.call import run

__all__ = ["run"]
