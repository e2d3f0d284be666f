"""The collectives on jax.Arrays and on pytrees of them, also inside ``jit``, ``grad``, ``vmap``, ``scan`` and so on.

A pytree is reduced as one group: all of its arrays or none. On a pytree ``broadcast`` is one of every array. NumPy
arrays and numbers are taken for arrays. A jax.Array is never written: there are no functions that work in place.

Outside of a program the blocking functions run at once, on the calling thread, without a copy of arrays in host
memory. Inside a program that JAX compiles they are operations of XLA, whose memory they use; XLA's thread does not wait
for them. Shapes are then the same on all ranks. Blocking and asynchronous functions are as in `reigen.numpy_ops`
otherwise. See `reigen.jax.primitive` for gradients, and `reigen.jax.tracing` for names and order.

The element types are uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64, bool, the
floating-point types of 8 bits (which travel as float32), and, where nothing is calculated, uint32, uint64 and random
keys; another raises :class:`~reigen.errors.UnsupportedTypeError` (a ValueError).
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401 - these are the names in the functions' annotations
from typing import Any  # noqa: F401

from reigen.api.dialects import JAX
from reigen.api.functions import make_functions
from reigen.api.process_sets import ProcessSet  # noqa: F401
from reigen.engine.handle import Handle  # noqa: F401
from reigen.jax.adapter import JaxAdapter
from reigen.jax.collectives import JaxCollectives
from reigen.jax.compression import Compression, Compressor  # noqa: F401

_FUNCTIONS = make_functions(JaxCollectives(JaxAdapter()), JAX, globals(), compression=Compression.none)
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
