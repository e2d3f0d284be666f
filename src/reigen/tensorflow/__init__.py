"""Reigen for TensorFlow (2.16 or later): ``import reigen.tensorflow as hvd`` in a script written for Horovod."""

try:
    import tensorflow as _tf  # noqa: F401, ICN001  before anything that needs it: this says what to do without it
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"reigen.tensorflow needs TensorFlow: pip install tensorflow ({error})", name=error.name
    ) from None

from typing import TYPE_CHECKING

from reigen.api import common_names as _common_names
from reigen.api.common_names import *
from reigen.api.horovod_basics import check_num_rank_power_of_2, gpu_available
from reigen.api.horovod_basics import make_lazy_getattr as _make_lazy_getattr
from reigen.api.job import shutdown
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

if TYPE_CHECKING:
    from reigen.tensorflow import elastic

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

#: most programs are not elastic, and SyncBatchNormalization needs Keras: to import that takes longer than all else here
__getattr__ = _make_lazy_getattr(
    __name__,
    {"elastic": "reigen.tensorflow.elastic", "SyncBatchNormalization": "reigen.tensorflow.sync_batch_norm"},
)
