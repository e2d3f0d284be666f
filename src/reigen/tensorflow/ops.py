"""The collectives on tensors of TensorFlow.

Wherever a tensor is taken, it may be eager or of a graph, a variable, or what TensorFlow makes a tensor of; a scalar,
or empty. The element types are uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64 and bool;
another raises :class:`~reigen.errors.UnsupportedTypeError` (a ValueError). A wrong argument raises
:class:`~reigen.errors.ArgumentError` (a ValueError) on this rank alone; both are ``tf.errors.InvalidArgumentError``,
too. A collective that fails raises a :class:`~reigen.errors.CollectiveError` (HorovodInternalError) that is also a
``tf.errors.FailedPreconditionError``, if the ranks disagree, and else a ``tf.errors.UnknownError``. In a graph it is an
operation that fails with these errors of TensorFlow's when it runs.

Collectives match between ranks by ``name``; those without one match in the order of the calls, and in a graph by their
place in it. With a ``process_set`` its ranks take part and no others: "all ranks" below are the ranks of the set.

Reductions take ``tf.IndexedSlices``, too: indices and values of all ranks are gathered; an average divides the values.
Other operators, and factors, raise NotImplementedError for them.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401 - these are the names in the functions' annotations
from typing import Any

import tensorflow as tf  # noqa: F401

from reigen.api.dialects import TENSORFLOW
from reigen.api.functions import make_functions
from reigen.api.process_sets import ProcessSet  # noqa: F401
from reigen.tensorflow.collectives import COLLECTIVES
from reigen.tensorflow.compression import Compression, Compressor  # noqa: F401
from reigen.tensorflow.errors import raises_tensorflow_errors

TensorLike = Any

_FUNCTIONS = make_functions(COLLECTIVES, TENSORFLOW, globals(), compression=Compression.none)
globals().update({name: raises_tensorflow_errors(function) for name, function in _FUNCTIONS.items()})
__all__ = list(_FUNCTIONS)
