"""Reigen for TensorFlow (2.16 or later): ``import reigen.tensorflow as hvd`` in a script written for Horovod."""

try:
    import tensorflow as _tf  # noqa: F401, ICN001  before anything that needs it: this says what to do without it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"reigen.tensorflow needs TensorFlow: pip install tensorflow ({error})", name=error.name
    ) from None

import typing as _typing

from reigen.api import common_names as _common_names
from reigen.api.common_names import *
from reigen.api.horovod_basics import check_num_rank_power_of_2, gpu_available
from reigen.api.job import shutdown
from reigen.api.lazy_names import make_lazy_names as _make_lazy_names
from reigen.errors import HorovodInternalError
from reigen.tensorflow import functions as _functions
from reigen.tensorflow import ops as _ops
from reigen.tensorflow.compression import Compression
from reigen.tensorflow.distributed_optimizer import DistributedOptimizer
from reigen.tensorflow.errors import collective_errors
from reigen.tensorflow.functions import *
from reigen.tensorflow.functions import init  # noqa: F401  in place of the one above
from reigen.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from reigen.tensorflow.ops import *

if _typing.TYPE_CHECKING:
    from reigen.tensorflow import elastic
    from reigen.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedGradientTape",
    "check_num_rank_power_of_2",
    "collective_errors",
    "elastic",
    "gpu_available",
    "shutdown",
]
__all__ += _common_names.__all__
__all__ += _functions.__all__
__all__ += _ops.__all__
__all__.sort()

# Most programs are not elastic, and SyncBatchNormalization needs Keras, whose import takes longer than all else here.
# Type checkers take the imports above: with a `__getattr__` every name would be right for them.
if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _make_lazy_names(
        __name__,
        {"elastic": "reigen.tensorflow.elastic", "SyncBatchNormalization": "reigen.tensorflow.sync_batch_norm"},
    )
