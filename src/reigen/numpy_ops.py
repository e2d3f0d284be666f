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

from reigen.api.adapter import Array  # noqa: F401
from reigen.api.build_info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from reigen.api.collectives import Collectives, poll, synchronize
from reigen.api.dialects import NUMPY
from reigen.api.functions import allgather_object, barrier, broadcast_object, join, make_functions
from reigen.api.job import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from reigen.api.numpy_adapter import NumpyAdapter
from reigen.api.operations import Adasum, Average, Max, Min, Product, Sum
from reigen.api.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from reigen.engine.handle import Handle  # noqa: F401

_FUNCTIONS = make_functions(Collectives(NumpyAdapter()), NUMPY, globals())
globals().update(_FUNCTIONS)

# The one list of names in `import reigen`, but for __version__.
__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
__all__ += list(_FUNCTIONS)
__all__.sort()
