"""Elastic training with PyTorch: ``hvd.elastic`` in scripts."""

from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, leave, run
from reigen.torch.elastic.sampler import ElasticSampler
from reigen.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "leave",
    "run",
]
