"""Reigen for MXNet 1.9: ``import reigen.mxnet as hvd`` in a script written for Horovod."""

try:
    import mxnet  # noqa: F401  first and whole: under --as-mxnet its import needs modules of this package
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"reigen.mxnet needs MXNet: pip install mxnet==1.9.1 numpy==1.23.5 ({error})", name=error.name
    ) from None

import typing as _typing

from reigen.api import common_names as _common_names
from reigen.api.common_names import *
from reigen.api.lazy_names import make_lazy_names as _make_lazy_names
from reigen.errors import HorovodInternalError
from reigen.mxnet import ops as _ops
from reigen.mxnet.compression import Compression
from reigen.mxnet.engine import shutdown
from reigen.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from reigen.mxnet.ops import *
from reigen.mxnet.optimizer import DistributedOptimizer
from reigen.mxnet.trainer import DistributedTrainer

if _typing.TYPE_CHECKING:
    from reigen.mxnet import elastic

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "elastic",
    "shutdown",
]
__all__ += _common_names.__all__
__all__ += _ops.__all__
__all__.sort()

# Its imports are a part of what all of this takes, and most programs are not elastic.
# Type checkers take the imports above: with a `__getattr__` every name would be right for them.
if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _make_lazy_names(__name__, {"elastic": "reigen.mxnet.elastic"})
