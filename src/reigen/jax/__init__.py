"""Reigen for JAX (0.6 or later): ``import reigen.jax as rj``."""

try:
    import jax as _jax  # noqa: F401  before anything that needs it: this says what to do where it is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"reigen.jax needs JAX: pip install jax ({error})", name=error.name) from None

from typing import TYPE_CHECKING

from reigen.api import common_names as _common_names
from reigen.api.collectives import poll, synchronize
from reigen.api.common_names import *
from reigen.api.functions import allgather_object, barrier, broadcast_object, join
from reigen.api.horovod_basics import make_lazy_getattr as _make_lazy_getattr
from reigen.errors import HorovodInternalError
from reigen.jax import ops as _ops
from reigen.jax.compression import Compression
from reigen.jax.native import collective_errors, shutdown
from reigen.jax.ops import *
from reigen.jax.training import broadcast_parameters, distributed, grad, value_and_grad

if TYPE_CHECKING:
    from reigen.jax import elastic

__all__ = [
    "Compression",
    "HorovodInternalError",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_parameters",
    "collective_errors",
    "distributed",
    "elastic",
    "grad",
    "join",
    "poll",
    "shutdown",
    "synchronize",
    "value_and_grad",
]
__all__ += _common_names.__all__
__all__ += _ops.__all__
__all__.sort()

#: its imports are a part of what all of this takes, and most programs are not elastic
__getattr__ = _make_lazy_getattr(__name__, {"elastic": "reigen.jax.elastic"})
