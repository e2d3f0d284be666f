"""The collectives on NDArrays.

Wherever an array is taken, it may be one of ``mx.nd`` or of ``mx.np``, of any shape, dense, of the element types uint8,
int8, int32, int64, float16, float32, float64, bool or bfloat16; others raise
:class:`~reigen.errors.UnsupportedTypeError` (a ValueError). A wrong argument raises
:class:`~reigen.errors.ArgumentError` (a ValueError). Those raised here are all ``MXNetError``, too.

The functions whose results have a shape that is known beforehand (``allreduce``, ``broadcast`` and their kin) return at
once: the collective is an operation of MXNet's engine, which begins it when the array has been computed, and goes on
with what waits for its result when it is complete. If it fails, that is raised by whatever waits for the result
(``wait_to_read()``, ``asnumpy()``): a :class:`~reigen.errors.CollectiveError` (HorovodInternalError) that is also an
``MXNetError``. The others (``allgather``, ``alltoall``, ``reducescatter``) wait, and raise it themselves; and so do all
of them for arrays on a GPU, which are staged through the host.

Collectives match between ranks by ``name``; those without one match in the order of the calls. With a ``process_set``
its ranks take part and no others: "all ranks" below are the ranks of the set. ``priority``: among arrays that are ready
at the same time, the largest is begun first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

from reigen import context
from reigen.errors import ArgumentError
from reigen.frontends.collectives import Average, Collectives, Pending, Reducing, as_group, check_root, reducing
from reigen.frontends.process_sets import ProcessSet, global_process_set, number_of
from reigen.mxnet import arrays
from reigen.mxnet.adapter import InEngine, MXNetAdapter, empty_like
from reigen.mxnet.engine import queue
from reigen.mxnet.errors import raises_mxnet_errors

NDArray = Any

_ADAPTER = MXNetAdapter()
_WAITING: Collectives[NDArray] = Collectives(_ADAPTER, context.current)
_IN_ENGINE: Collectives[NDArray] = Collectives(InEngine(), context.current)

#: What submits a collective: given the collectives to use, its name, and whether it is waited for.
_Submit = Callable[[Collectives[NDArray], str, bool], Pending[Any]]


@raises_mxnet_errors
def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """``postscale * op(prescale * tensor)`` over all ranks, as a new array like ``tensor``. Does not wait.

    Integers are averaged and scaled in float64 and truncated toward zero; float16 is scaled in float32 and rounded
    before it is added.

    Args:
        tensor: the same shape and dtype on every rank.
        average: deprecated; use ``op``.
        name: matches the ranks' calls.
        priority: see the module.
        prescale_factor: multiplied in before the reduction.
        postscale_factor: multiplied in after it.
        process_set: whose ranks take part.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
    """
    how = reducing(average, op, prescale_factor, postscale_factor)
    out = empty_like(_ADAPTER.given(tensor))

    def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Pending[Any]:
        return use.allreduce(tensor, how, named, process_set, out=out, blocking=blocking)

    _run("allreduce", submit, [tensor], [out], name, priority, process_set)
    return out


@raises_mxnet_errors
def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """:func:`allreduce` in place: the result is written into ``tensor``, which is returned. Does not wait."""
    how = reducing(average, op, prescale_factor, postscale_factor)

    def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Pending[Any]:
        return use.allreduce(tensor, how, named, process_set, in_place=True, blocking=blocking)

    _run("allreduce", submit, [], [tensor], name, priority, process_set)
    return tensor


@raises_mxnet_errors
def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """:func:`allreduce` of several arrays, all or none of them; a list of new ones. Does not wait.

    The arguments are those of :func:`allreduce`; the arrays may differ in shape and dtype, but are on one kind of
    device. They are reduced when all of them have been computed.
    """
    how = reducing(average, op, prescale_factor, postscale_factor)
    group = as_group(tensors)
    outs = [empty_like(_ADAPTER.given(tensor)) for tensor in group]

    def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Pending[Any]:
        return use.grouped_allreduce(group, how, named, process_set, outs=outs, blocking=blocking)

    _run("grouped_allreduce", submit, group, outs, name, priority, process_set)
    return outs


@raises_mxnet_errors
def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """:func:`grouped_allreduce` in place: the results are written into ``tensors``, which are returned as a list."""
    how = reducing(average, op, prescale_factor, postscale_factor)
    group = as_group(tensors)

    def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Pending[Any]:
        return use.grouped_allreduce(group, how, named, process_set, in_place=True, blocking=blocking)

    _run("grouped_allreduce", submit, [], group, name, priority, process_set)
    return group


@raises_mxnet_errors
def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """The root's array, as a new one on every rank. Does not wait.

    Args:
        tensor: the same shape and dtype on every rank.
        root_rank: whose contents all get; its rank in the job, also where a process set takes part.
        name: matches the ranks' calls.
        priority: see the module.
        process_set: whose ranks take part.
    """
    check_root(root_rank, context.current().size)
    out = empty_like(_ADAPTER.given(tensor))

    def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Pending[Any]:
        return use.broadcast(tensor, root_rank, named, process_set, out=out, blocking=blocking)

    _run("broadcast", submit, [tensor], [out], name, priority, process_set)
    return out


@raises_mxnet_errors
def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """:func:`broadcast` in place: the root's contents are written into ``tensor``, which is returned. Does not wait."""
    check_root(root_rank, context.current().size)

    def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Pending[Any]:
        return use.broadcast(tensor, root_rank, named, process_set, in_place=True, blocking=blocking)

    _run("broadcast", submit, [], [tensor], name, priority, process_set)
    return tensor


@raises_mxnet_errors
def allgather(
    tensor: NDArray, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> NDArray:
    """All ranks' arrays, concatenated along dimension 0 in rank order. Waits.

    Args:
        tensor: dimension 0 may differ between ranks, the others not. Scalars give a vector of one element a rank.
        name: matches the ranks' calls.
        priority: accepted for Horovod's sake.
        process_set: whose ranks take part.
    """
    return _WAITING.allgather(tensor, name, process_set, blocking=True).take()


@raises_mxnet_errors
def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray]:
    """:func:`allgather` of several arrays, all or none of them. Waits."""
    return _WAITING.grouped_allgather(tensors, name, process_set, blocking=True).take()


@raises_mxnet_errors
def alltoall(
    tensor: NDArray,
    splits: Sequence[int] | NDArray | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Row block i of every rank's array goes to the i-th rank. Waits.

    Args:
        tensor: all dimensions but the first are the same on every rank.
        splits: rows for each rank, a list or an int32 vector; None for equal parts, which must come out even.
        name: matches the ranks' calls.
        priority: accepted for Horovod's sake.
        process_set: whose ranks take part.

    Returns:
        What was received, in rank order; if ``splits`` were given, a pair of it and the rows received from each rank
        (an int32 vector).
    """
    output, received = _WAITING.alltoall(tensor, _rows(splits), name, process_set, blocking=True).take()
    return output if splits is None else (output, mx.nd.array(received, dtype="int32"))


@raises_mxnet_errors
def reducescatter(
    tensor: NDArray,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray:
    """Reduce over all ranks and keep this rank's rows: the first ``rows % size`` ranks get one more. Waits.

    The arguments are those of :func:`allreduce`; a scalar is refused, and so is Adasum.
    """
    how = reducing(None, op, prescale_factor, postscale_factor)
    return _WAITING.reducescatter(tensor, how, name, process_set, blocking=True).take()


@raises_mxnet_errors
def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[NDArray]:
    """:func:`reducescatter` of several arrays, all or none of them. Waits."""
    how = reducing(None, op, prescale_factor, postscale_factor)
    return _WAITING.grouped_reducescatter(tensors, how, name, process_set, blocking=True).take()


def reduce_in_place(group: Sequence[NDArray], how: Reducing, name: str, priority: int, process_set: ProcessSet) -> None:
    """Put the reduction of gradients into MXNet's engine: one array by itself, several as a group.

    Gradients lie in the ordinary layout; whoever cannot be sure of that calls :func:`grouped_allreduce_`.
    """

    def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Pending[Any]:
        if len(group) == 1:
            return use.allreduce(group[0], how, named, process_set, in_place=True, blocking=blocking)
        return use.grouped_allreduce(group, how, named, process_set, in_place=True, blocking=blocking)

    if all(map(arrays.on_host, group)):
        queue().push(lambda: submit(_IN_ENGINE, name, False), [], group, priority, name)
    else:
        submit(_WAITING, name, True).take()


def _run(
    kind: str,
    submit: _Submit,
    reads: Sequence[NDArray],
    writes: Sequence[NDArray],
    name: str | None,
    priority: int,
    process_set: ProcessSet,
) -> None:
    """Put a collective into MXNet's engine or, for what is not in host memory, run it now.

    What would be wrong about it everywhere is said here, before it takes a number of the unnamed ones.
    """
    job, members = context.current(), number_of(process_set)
    if process_set.included() is False:
        raise ArgumentError(f"rank {job.rank} is not one of the ranks of {process_set}")
    for array in reads:
        _ADAPTER.dtype(_ADAPTER.given(array))
    for array in writes:
        _ADAPTER.dtype(_ADAPTER.given(array, writable=True))
    named = job.next_name(kind, members) if name is None else str(name)
    if not all(map(arrays.on_host, (*reads, *writes))):
        submit(_WAITING, named, True).take()
        return
    for array in reads or writes:  # what is only written is new
        arrays.reorder(array)
    queue().push(lambda: submit(_IN_ENGINE, named, False), reads, writes, priority, named)


def _rows(splits: Sequence[int] | NDArray | None) -> tuple[int, ...] | None:
    if splits is None:
        return None
    if not arrays.is_ndarray(splits):
        return tuple(int(split) for split in splits)
    array: NDArray = splits
    dtype = arrays.dtype_of(array)
    if dtype.name != "int32" or len(array.shape) != 1:
        raise ArgumentError(f"splits must be a 1-D int32 array, got {len(array.shape)}-D {dtype.name}")
    return tuple(array.asnumpy().tolist())
