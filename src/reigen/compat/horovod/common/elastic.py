"""Elastic jobs: only their errors exist so far. Using more of it says what is missing."""

from reigen.errors import HorovodInternalError, HostsUpdatedInterrupt
from reigen.frontends.horovod import missing_from

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

__getattr__ = missing_from(
    "horovod.common.elastic", "elastic jobs", ("ObjectState", "State", "notification_manager", "run_fn")
)
