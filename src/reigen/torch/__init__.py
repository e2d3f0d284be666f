"""Reigen for PyTorch (2.4 or later): ``import reigen.torch as hvd`` in a script written for Horovod."""

try:
    import torch as _torch  # noqa: F401  before anything that needs it: this says what to do where it is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"reigen.torch needs PyTorch: pip install torch ({error})", name=error.name) from None

import typing as _typing

from reigen.api import common_names as _common_names
from reigen.api.collectives import poll, synchronize
from reigen.api.common_names import *
from reigen.api.functions import allgather_object, barrier, broadcast_object, join
from reigen.api.job import shutdown
from reigen.api.lazy_names import make_lazy_names as _make_lazy_names
from reigen.errors import HorovodInternalError
from reigen.torch import ops as _ops
from reigen.torch.clipping import clip_global_norm
from reigen.torch.compression import Compression
from reigen.torch.distributed_optimizer import DistributedOptimizer
from reigen.torch.ops import *
from reigen.torch.sparse import sparse_allreduce_async
from reigen.torch.state import broadcast_optimizer_state, broadcast_parameters
from reigen.torch.sync_batch_norm import SyncBatchNorm
from reigen.torch.uneven_inputs import uneven_data

if _typing.TYPE_CHECKING:
    from reigen.torch import elastic
    from reigen.torch.kvstore.trainer import Trainer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "Trainer",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_global_norm",
    "elastic",
    "join",
    "poll",
    "shutdown",
    "sparse_allreduce_async",
    "synchronize",
    "uneven_data",
]
__all__ += _common_names.__all__
__all__ += _ops.__all__
__all__.sort()

# Their imports are a part of what all of this takes, and most programs use neither.
# Type checkers take the imports above: with a `__getattr__` every name would be right for them.
if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _make_lazy_names(
        __name__, {"elastic": "reigen.torch.elastic", "Trainer": "reigen.torch.kvstore.trainer"}
    )
