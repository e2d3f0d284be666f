"""Collectives on NumPy arrays: the names in `import reigen`.

Arrays may be of any shape and layout; scalars and other arguments of ``numpy.asarray`` are accepted too, except by the
in-place forms. Element types: uint8, int8, uint16, int16, int32, int64, float16, float32, float64 and bool. The rules
and errors are those of `reigen.torch`; nothing here is differentiable.

Example, in a job of one rank:
    >>> import numpy as np
    >>> import reigen
    >>> reigen.init()
    >>> reigen.allreduce(np.array([1.0, 2.0]), op=reigen.Sum)
    array([1., 2.])
    >>> reigen.shutdown()
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401 - these are the names in the functions' annotations

from numpy.typing import ArrayLike  # noqa: F401

from reigen.api import common_names as _common_names
from reigen.api.adapter import Array  # noqa: F401
from reigen.api.collectives import Collectives, poll, synchronize
from reigen.api.common_names import *
from reigen.api.dialects import NUMPY
from reigen.api.functions import allgather_object, barrier, broadcast_object, join, make_functions
from reigen.api.job import shutdown
from reigen.api.numpy_adapter import NumpyAdapter
from reigen.engine.handle import Handle  # noqa: F401

_FUNCTIONS = make_functions(Collectives(NumpyAdapter()), NUMPY, globals())
globals().update(_FUNCTIONS)

# The one list of names in `import reigen`, but for __version__.
__all__ = ["allgather_object", "barrier", "broadcast_object", "join", "poll", "shutdown", "synchronize"]
__all__ += _common_names.__all__
__all__ += list(_FUNCTIONS)
__all__.sort()
