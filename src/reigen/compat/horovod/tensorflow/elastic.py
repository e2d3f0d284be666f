"""Elastic jobs: only their errors exist so far. The use of anything else names it."""

from reigen.api.horovod_basics import make_missing_getattr
from reigen.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

__getattr__ = make_missing_getattr(
    "horovod.tensorflow.elastic", "elastic jobs", ("ObjectState", "TensorFlowKerasState", "TensorFlowState", "run")
)
