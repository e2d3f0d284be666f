"""Names of ``horovod.common.basics``: queries of the job as methods of one object."""

from reigen.api.horovod_basics import HorovodBasics

__all__ = ["HorovodBasics"]
