"""Elastic jobs: only their errors exist so far; other names raise an error."""

from reigen.api.horovod_basics import make_missing_getattr
from reigen.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

__getattr__ = make_missing_getattr(
    "horovod.common.elastic", "elastic jobs", ("ObjectState", "State", "notification_manager", "run_fn")
)
