"""Collectives of values, which give NumPy arrays, and of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from reigen import context
from reigen.api.collectives import Collectives, resolve_reduction
from reigen.api.gradients.gradient_agreement import agree_on_gradients
from reigen.api.numpy_adapter import NumpyAdapter
from reigen.api.operations import ALLGATHER, ALLREDUCE, BROADCAST, REDUCESCATTER, Average, as_root, check_root
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.errors import ArgumentError
from reigen.keras.backend import load_backend
from reigen.keras.compression import Compression, choose_compressor
from reigen.types import DTYPES

_COLLECTIVES = Collectives(NumpyAdapter())
Value = NDArray[Any]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Value:
    """Return ``postscale * op(prescale * value)`` over all ranks.

    Args:
        value: a tensor, a variable, an array or a number; of the same shape and dtype on every rank.
        name: matches the ranks' calls.
        average: deprecated; use ``op``.
        prescale_factor: the value is multiplied by it before.
        postscale_factor: the result is multiplied by it.
        op: Average (also if None), Sum, Min, Max, Product or Adasum.
        compression: the element type in which it travels.

    Returns:
        An array of the value's shape and dtype.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: see `reigen.errors` for its kinds.
    """
    compressor = choose_compressor(compression)
    array = _as_array(value)
    tensor, ctx = compressor.compress(array)
    reduction = resolve_reduction(average, op, float(prescale_factor), float(postscale_factor))
    result = _run(ALLREDUCE, _as_array(tensor), reduction, name)
    return _as_array(compressor.decompress(result, ctx)) if ctx is not None else result


def allgather(value: Any, name: str | None = None) -> Value:
    """Return all ranks' values, concatenated along dimension 0 in rank order.

    Args:
        value: see `allreduce`; dimension 0 may differ between ranks.
        name: matches the ranks' calls.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: see `reigen.errors` for its kinds.
    """
    return _run(ALLGATHER, _as_array(value), None, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Value:
    """Return the root's value, on every rank.

    Args:
        value: see `allreduce`.
        root_rank: whose value all get.
        name: matches the ranks' calls.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: see `reigen.errors` for its kinds.
    """
    return _run(BROADCAST, _as_array(value), as_root(root_rank), name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Value:
    """Reduce over all ranks and return this rank's rows: the first ``rows % size`` ranks get one more.

    Args:
        value: see `allreduce`; no scalar.
        name: matches the ranks' calls.
        op: Average or Sum.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: see `reigen.errors` for its kinds.
    """
    return _run(REDUCESCATTER, _as_array(value), resolve_reduction(None, op, 1.0, 1.0), name)


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite variables with those of the root.

    Args:
        variables: of Keras, or of its backend; as many, of the same shapes and dtypes, on every rank of the set.
        root_rank: whose values all get.
        process_set: whose ranks take part; a rank outside of it does nothing.

    Raises:
        ArgumentError: the root is no rank of the set.
        MismatchError: the ranks' variables differ in number, shape or dtype; nothing was sent.
        CollectiveError: see `reigen.errors` for its kinds.
    """
    job, number = context.current(), process_set_number(process_set)
    ranks = job.process_sets[number]
    check_root(root_rank, job.size)
    if job.rank not in ranks or len(ranks) == 1:
        return
    arrays = list(map(_as_array, variables))
    lines = [f"variable {place}: {array.dtype.name} {array.shape}" for place, array in enumerate(arrays)]
    agree_on_gradients(job, lines, [], "keras.variables", number)
    pending = []
    for place, (variable, array) in enumerate(zip(variables, arrays, strict=True)):
        dtype = DTYPES.get(array.dtype.name, DTYPES["uint8"])  # a type that is not known travels as its bytes
        source = array.view(dtype.storage) if array.ndim else array.reshape(1).view(dtype.storage)
        target = np.empty_like(source)
        name = f"keras.variables.{place}"
        handle = job.broadcast(source, target, dtype, root_rank=root_rank, name=name, process_set=number)
        pending.append((variable, target.view(array.dtype).reshape(array.shape), handle))
    for variable, value, handle in pending:
        handle.wait()
        variable.assign(value)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise ArgumentError: Keras 3 keeps no list of all variables.

    Use ``broadcast_variables(model.weights, root_rank)``, or `callbacks.BroadcastGlobalVariablesCallback`.
    """
    raise ArgumentError(
        f"Keras 3 keeps no list of all variables: use broadcast_variables(model.weights, {root_rank}), or "
        f"callbacks.BroadcastGlobalVariablesCallback({root_rank}) in fit()"
    )


def shutdown() -> None:
    """Leave the job, when what Keras's backend has begun is complete. ``init()`` may be called again."""
    load_backend().shutdown()


def _run(collective: Any, array: Value, argument: Any, name: str | None) -> Value:
    result: Value = _COLLECTIVES.start(collective, array, argument, name, blocking=True).wait()
    return result


def _as_array(value: Any) -> Value:
    if isinstance(value, np.ndarray | np.generic | int | float | bool | list | tuple):
        array = np.asarray(value)
    else:
        array = ops.convert_to_numpy(value)
    return np.ascontiguousarray(array).reshape(array.shape)
