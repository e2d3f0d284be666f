"""The collectives on NDArrays.

Wherever an array is taken, it may be one of ``mx.nd`` or of ``mx.np``, of any shape, dense, of the element types uint8,
int8, int32, int64, float16, float32, float64, bool or bfloat16; others raise
:class:`~reigen.errors.UnsupportedTypeError` (a ValueError). A wrong argument raises
:class:`~reigen.errors.ArgumentError` (a ValueError). Those raised here are all ``MXNetError``, too.

The functions whose results have a shape that is known beforehand (``allreduce``, ``broadcast`` and their kin) return at
once: the collective is an operation of MXNet's engine, which begins it when the array has been computed, and goes on
with operations that wait for its result when it is complete. If it fails, waiting for the result (``wait_to_read()``,
``asnumpy()``) raises a :class:`~reigen.errors.CollectiveError` (HorovodInternalError) that is also an ``MXNetError``.
The others wait, and raise it themselves; and so do all of them for arrays on a GPU, which are staged through the host.

Collectives match between ranks by ``name``; those without one match in the order of the calls. With a ``process_set``
its ranks take part and no others: "all ranks" below are the ranks of the set. ``priority``: among arrays that are ready
at the same time, the largest is begun first.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401 - these are the names in the functions' annotations
from typing import Any

from reigen.api.dialects import MXNET
from reigen.api.functions import make_functions
from reigen.api.process_sets import ProcessSet  # noqa: F401
from reigen.mxnet.collectives import COLLECTIVES
from reigen.mxnet.errors import raises_mxnet_errors

NDArray = Any

_FUNCTIONS = make_functions(COLLECTIVES, MXNET, globals())
globals().update({name: raises_mxnet_errors(function) for name, function in _FUNCTIONS.items()})
__all__ = list(_FUNCTIONS)
