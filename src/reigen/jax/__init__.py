"""Reigen for JAX (0.6 or later): ``import reigen.jax as rj``."""

try:
    import jax as _jax  # noqa: F401  before anything that needs it: this says what to do where it is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"reigen.jax needs JAX: pip install jax ({error})", name=error.name) from None

import typing as _typing

from reigen.api import common_names as _common_names
from reigen.api.collectives import poll, synchronize
from reigen.api.common_names import *
from reigen.api.functions import allgather_object, barrier, broadcast_object, join
from reigen.api.lazy_names import make_lazy_names as _make_lazy_names
from reigen.errors import HorovodInternalError
from reigen.jax import ops as _ops
from reigen.jax.compression import Compression
from reigen.jax.native import collective_errors, shutdown
from reigen.jax.ops import *
from reigen.jax.training import broadcast_parameters, distributed, grad, value_and_grad

if _typing.TYPE_CHECKING:
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

# Its imports are a part of what all of this takes, and most programs are not elastic.
# Type checkers take the imports above: with a `__getattr__` every name would be right for them.
if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _make_lazy_names(__name__, {"elastic": "reigen.jax.elastic"})
