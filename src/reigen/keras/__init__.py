"""Reigen for Keras 3 (3.5 or later), on any of its backends: ``import reigen.keras as hvd``."""

try:
    import keras.ops as _ops  # noqa: F401  before anything that needs it: this says what to do where it is missing
except ModuleNotFoundError as error:  # Keras 2 has no such module
    raise ModuleNotFoundError(f"reigen.keras needs Keras 3: pip install 'keras>=3.5' ({error})", name="keras") from None

import typing as _typing

from reigen.api import common_names as _common_names
from reigen.api.common_names import *
from reigen.api.functions import allgather_object, barrier, broadcast_object, join
from reigen.api.lazy_names import make_lazy_names as _make_lazy_names
from reigen.errors import HorovodInternalError
from reigen.keras import callbacks
from reigen.keras.compression import Compression
from reigen.keras.data import ShardedDataset, shard
from reigen.keras.distributed_optimizer import DistributedOptimizer, PartialDistributedOptimizer
from reigen.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
    shutdown,
)
from reigen.keras.saving import load_model

if _typing.TYPE_CHECKING:
    from reigen.keras import elastic

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "ShardedDataset",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
    "shard",
    "shutdown",
]
__all__ += _common_names.__all__
__all__.sort()

# Its imports are a part of what all of this takes, and most programs are not elastic.
# Type checkers take the imports above: with a `__getattr__` every name would be right for them.
if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _make_lazy_names(__name__, {"elastic": "reigen.keras.elastic"})
