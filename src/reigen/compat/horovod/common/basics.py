"""The functions about the job, as methods of one object."""

from reigen.frontends.horovod import HorovodBasics

__all__ = ["HorovodBasics"]
