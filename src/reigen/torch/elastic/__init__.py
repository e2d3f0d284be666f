"""Elastic training with PyTorch: ``hvd.elastic`` in scripts."""

from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave, run
from reigen.elastic.cursor import Cursor
from reigen.torch.elastic.job import Job
from reigen.torch.elastic.loader import StepLoader
from reigen.torch.elastic.sampler import ElasticSampler
from reigen.torch.elastic.state import TorchState

__all__ = [
    "Cursor",
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Job",
    "ObjectState",
    "State",
    "StepLoader",
    "TorchState",
    "history",
    "leave",
    "run",
]
