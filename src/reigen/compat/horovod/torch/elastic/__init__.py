"""Elastic jobs: only their errors exist so far. Using more of it says what is missing."""

from reigen.errors import HorovodInternalError, HostsUpdatedInterrupt
from reigen.frontends.horovod import missing_from

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

__getattr__ = missing_from(
    "horovod.torch.elastic", "elastic jobs", ("ElasticSampler", "ObjectState", "State", "TorchState", "run")
)
