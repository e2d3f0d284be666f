"""The collectives on torch tensors.

Wherever a tensor is taken, it may be a scalar, empty, non-contiguous, or on a device (staged through the host then).
The element types are uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64 and bool; another
raises :class:`~reigen.errors.UnsupportedTypeError` (a ValueError). A wrong argument raises
:class:`~reigen.errors.ArgumentError` (a ValueError) on this rank alone. A collective that fails raises
:class:`~reigen.errors.CollectiveError` (also named ``HorovodInternalError``, a RuntimeError) from ``synchronize``.

Collectives match between ranks by ``name``; those without one match in the order in which they are submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reigen.errors import ArgumentError
from reigen.frontends.collectives import Average, Pending, check_op, check_process_set, choose_op
from reigen.torch.compression import Compression, Compressor
from reigen.torch.differentiable import COLLECTIVES, Allgather, Allreduce, Alltoall, Broadcast, Reducescatter
from reigen.types import GLOBAL_PROCESS_SET, ProcessSet

#: All ranks of the job.
global_process_set = GLOBAL_PROCESS_SET

#: What the asynchronous collectives return; :func:`poll` and :func:`synchronize` take it.
Handle = Pending[Any]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``postscale * op(prescale * tensor)`` over all ranks, as a new tensor like ``tensor``. Differentiable.

    Args:
        tensor: the same shape and dtype on every rank.
        average: deprecated; use ``op``.
        name: matches the ranks' calls.
        compression: in which type the tensor travels.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplied in before the reduction.
        postscale_factor: multiplied in after it.
        process_set: only ``global_process_set``.
    """
    check_process_set(process_set)
    chosen = choose_op(average, op)
    compressed, ctx = compression.compress(tensor)
    if _needs_graph(compressed):
        args = (chosen, name, float(prescale_factor), float(postscale_factor))
        result = _apply(Allreduce, compressed, *args)
    else:
        result = COLLECTIVES.allreduce(
            compressed, chosen, name, prescale_factor, postscale_factor, blocking=True
        ).take()
    return compression.decompress(result, ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin :func:`allreduce`; ``synchronize`` gives a new tensor, which is not differentiable."""
    check_process_set(process_set)
    return COLLECTIVES.allreduce(tensor, choose_op(average, op), name, prescale_factor, postscale_factor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """:func:`allreduce` in place: the result is written into ``tensor``, which is returned."""
    check_process_set(process_set)
    chosen = choose_op(average, op)
    return COLLECTIVES.allreduce(
        tensor, chosen, name, prescale_factor, postscale_factor, in_place=True, blocking=True
    ).take()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin :func:`allreduce_`. The tensor must not be touched before ``synchronize``, which completes it."""
    check_process_set(process_set)
    chosen = choose_op(average, op)
    return COLLECTIVES.allreduce(tensor, chosen, name, prescale_factor, postscale_factor, in_place=True)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, concatenated along dimension 0 in rank order. Differentiable.

    Args:
        tensor: dimension 0 may differ between ranks, the others not. Scalars give a vector of ``size()`` elements.
        name: matches the ranks' calls.
        process_set: only ``global_process_set``.
    """
    check_process_set(process_set)
    if _needs_graph(tensor):
        gathered: torch.Tensor = _apply(Allgather, tensor, name)
        return gathered
    return COLLECTIVES.allgather(tensor, name, blocking=True).take()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin :func:`allgather`; the result is not differentiable."""
    check_process_set(process_set)
    return COLLECTIVES.allgather(tensor, name)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, as a new tensor on every rank. Differentiable.

    Args:
        tensor: the same shape and dtype on every rank.
        root_rank: whose contents all get.
        name: matches the ranks' calls.
        process_set: only ``global_process_set``.
    """
    check_process_set(process_set)
    if _needs_graph(tensor):
        received: torch.Tensor = _apply(Broadcast, tensor, root_rank, name)
        return received
    return COLLECTIVES.broadcast(tensor, root_rank, name, blocking=True).take()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin :func:`broadcast`; the result is not differentiable."""
    check_process_set(process_set)
    return COLLECTIVES.broadcast(tensor, root_rank, name)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """:func:`broadcast` in place: the root's contents are written into ``tensor``, which is returned."""
    check_process_set(process_set)
    return COLLECTIVES.broadcast(tensor, root_rank, name, in_place=True, blocking=True).take()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin :func:`broadcast_`. The tensor must not be touched before ``synchronize``, which completes it."""
    check_process_set(process_set)
    return COLLECTIVES.broadcast(tensor, root_rank, name, in_place=True)


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Row block i of every rank's tensor goes to rank i. Differentiable.

    Args:
        tensor: all dimensions but the first are the same on every rank.
        splits: rows for each rank, a list or an int32 vector; None for equal parts, which must come out even.
        name: matches the ranks' calls.
        process_set: only ``global_process_set``.

    Returns:
        What was received, in rank order; if ``splits`` were given, a pair of it and the rows received from each rank
        (an int32 vector of ``size()`` elements).
    """
    check_process_set(process_set)
    rows = _rows(splits)
    output, received = _apply(Alltoall, tensor, rows, name)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin :func:`alltoall`; ``synchronize`` always gives the pair. The result is not differentiable."""
    check_process_set(process_set)
    return COLLECTIVES.alltoall(tensor, _rows(splits), name).then(_with_counts)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over all ranks and keep this rank's rows: the first ``rows % size()`` ranks get one more. Differentiable.

    The arguments are those of :func:`allreduce`; a scalar is refused.
    """
    check_process_set(process_set)
    chosen = check_op(op)
    compressed, ctx = compression.compress(tensor)
    if _needs_graph(compressed):
        args = (chosen, name, float(prescale_factor), float(postscale_factor))
        result = _apply(Reducescatter, compressed, *args)
    else:
        result = COLLECTIVES.reducescatter(
            compressed, chosen, name, prescale_factor, postscale_factor, blocking=True
        ).take()
    return compression.decompress(result, ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin :func:`reducescatter`; the result is not differentiable."""
    check_process_set(process_set)
    return COLLECTIVES.reducescatter(tensor, check_op(op), name, prescale_factor, postscale_factor)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has come here."""
    check_process_set(process_set)
    COLLECTIVES.barrier()


def _needs_graph(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and bool(getattr(tensor, "requires_grad", False))


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    apply: Callable[..., Any] = function.apply
    return apply(*args)


def _rows(splits: Sequence[int] | torch.Tensor | None) -> tuple[int, ...] | None:
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32 or splits.dim() != 1:
            raise ArgumentError(f"splits must be a 1-D int32 tensor, got {splits.dim()}-D {splits.dtype}")
        return tuple(splits.tolist())
    return tuple(int(split) for split in splits)


def _with_counts(result: tuple[torch.Tensor, tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    output, received = result
    return output, torch.tensor(received, dtype=torch.int32)
