"""Names of ``horovod.common.exceptions``: its errors, which are Reigen's."""

from reigen.errors import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
