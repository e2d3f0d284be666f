"""Reigen for ``tf.keras``: ``import reigen.tensorflow.keras as hvd``.

Where ``tf.keras`` is Keras 3, this is `reigen.keras`; where it is the legacy one (TF_USE_LEGACY_KERAS=1 and tf_keras),
the same names for that.
"""

import typing as _typing

from reigen.api import common_names as _common_names
from reigen.api.common_names import *
from reigen.api.functions import allgather_object, broadcast_object, join
from reigen.api.job import shutdown
from reigen.api.lazy_names import make_lazy_names as _make_lazy_names
from reigen.errors import HorovodInternalError
from reigen.tensorflow.keras import callbacks
from reigen.tensorflow.keras.choice import IS_LEGACY

if _typing.TYPE_CHECKING:
    from reigen.tensorflow.keras import elastic

if IS_LEGACY:
    from reigen.tensorflow.compression import Compression
    from reigen.tensorflow.functions import broadcast_variables
    from reigen.tensorflow.keras.functions import (
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        reducescatter,
    )
    from reigen.tensorflow.keras.legacy_optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
else:
    from reigen.keras import (  # type: ignore[assignment]  # the same, for another Keras
        Compression,
        DistributedOptimizer,
        PartialDistributedOptimizer,
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        broadcast_variables,
        load_model,
        reducescatter,
    )

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
    "shutdown",
]
__all__ += _common_names.__all__
__all__.sort()

# Its imports are a part of what all of this takes, and most programs are not elastic.
# Type checkers take the imports above: with a `__getattr__` every name would be right for them.
if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _make_lazy_names(__name__, {"elastic": "reigen.tensorflow.keras.elastic"})
