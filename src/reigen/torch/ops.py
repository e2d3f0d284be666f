"""The collectives on torch tensors.

Wherever a tensor is taken, it may be a scalar, empty, non-contiguous, or on a device. CUDA tensors are reduced on the
GPUs where there is an NCCL, and nobody waits for that: results are complete for whatever the calling thread's current
stream does next. On other devices, and without NCCL, tensors are staged through the host.
The element types are uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64 and bool; another
raises :class:`~reigen.errors.UnsupportedTypeError` (a ValueError). A wrong argument raises
:class:`~reigen.errors.ArgumentError` (a ValueError) on this rank alone. A collective that fails raises
:class:`~reigen.errors.CollectiveError` (also named ``HorovodInternalError``, a RuntimeError) from ``synchronize``.

Collectives match between ranks by ``name``; those without one match in the order in which they are submitted. With a
``process_set`` its ranks take part and no others: "all ranks" below are the ranks of the set. The blocking functions
that return new tensors are differentiable; the asynchronous and the in-place ones are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reigen.errors import ArgumentError
from reigen.frontends.collectives import Average, as_group, reducing
from reigen.frontends.compression import as_compressor
from reigen.frontends.functions import Handle, SharedFunctions
from reigen.frontends.process_sets import ProcessSet, global_process_set
from reigen.torch import differentiable
from reigen.torch.compression import NAMES, Compression, Compressor
from reigen.torch.differentiable import COLLECTIVES, with_counts

_SHARED: SharedFunctions[torch.Tensor, torch.Tensor] = SharedFunctions(COLLECTIVES)

allgather_async = _SHARED.allgather_async
allreduce_ = _SHARED.allreduce_
allreduce_async = _SHARED.allreduce_async
allreduce_async_ = _SHARED.allreduce_async_
broadcast_ = _SHARED.broadcast_
broadcast_async = _SHARED.broadcast_async
broadcast_async_ = _SHARED.broadcast_async_
grouped_allgather_async = _SHARED.grouped_allgather_async
grouped_allreduce_ = _SHARED.grouped_allreduce_
grouped_allreduce_async = _SHARED.grouped_allreduce_async
grouped_allreduce_async_ = _SHARED.grouped_allreduce_async_
grouped_reducescatter_async = _SHARED.grouped_reducescatter_async
reducescatter_async = _SHARED.reducescatter_async


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

    Integers are averaged and scaled in float64 and truncated toward zero; float16 and bfloat16 are scaled in float32
    and rounded before they are added.

    Args:
        tensor: the same shape and dtype on every rank.
        average: deprecated; use ``op``.
        name: matches the ranks' calls.
        compression: in which type the tensor travels.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplied in before the reduction.
        postscale_factor: multiplied in after it.
        process_set: whose ranks take part.
    """
    how = reducing(average, op, prescale_factor, postscale_factor)
    compressed, ctx = as_compressor(compression, NAMES).compress(tensor)
    return compression.decompress(differentiable.allreduce(compressed, how, name, process_set), ctx)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors, all or none of them. Differentiable.

    The arguments are those of :func:`allreduce`; the tensors may differ in shape and dtype, but are on one kind of
    device.
    """
    how = reducing(average, op, prescale_factor, postscale_factor)
    compressed = list(map(as_compressor(compression, NAMES).compress, as_group(tensors)))
    results = differentiable.grouped_allreduce([tensor for tensor, _ in compressed], how, name, process_set)
    return _decompressed(compression, results, compressed)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, concatenated along dimension 0 in rank order. Differentiable.

    Args:
        tensor: dimension 0 may differ between ranks, the others not. Scalars give a vector of one element a rank.
        name: matches the ranks' calls.
        process_set: whose ranks take part.
    """
    return differentiable.allgather(tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors, all or none of them. Differentiable."""
    return differentiable.grouped_allgather(as_group(tensors), name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, as a new tensor on every rank. Differentiable.

    Args:
        tensor: the same shape and dtype on every rank.
        root_rank: whose contents all get; its rank in the job, also where a process set takes part.
        name: matches the ranks' calls.
        process_set: whose ranks take part.
    """
    return differentiable.broadcast(tensor, root_rank, name, process_set)


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Row block i of every rank's tensor goes to the i-th rank. Differentiable.

    Args:
        tensor: all dimensions but the first are the same on every rank.
        splits: rows for each rank, a list or an int32 vector; None for equal parts, which must come out even.
        name: matches the ranks' calls.
        process_set: whose ranks take part.

    Returns:
        What was received, in rank order; if ``splits`` were given, a pair of it and the rows received from each rank
        (an int32 vector).
    """
    output, received = differentiable.alltoall(tensor, _rows(splits), name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin :func:`alltoall`; ``synchronize`` always gives the pair. The result is not differentiable."""
    return COLLECTIVES.alltoall(tensor, _rows(splits), name, process_set).then(with_counts)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over all ranks and keep this rank's rows: the first ``rows % size`` ranks get one more. Differentiable.

    The arguments are those of :func:`allreduce`; a scalar is refused, and so is Adasum.
    """
    how = reducing(None, op, prescale_factor, postscale_factor)
    compressed, ctx = as_compressor(compression, NAMES).compress(tensor)
    return compression.decompress(differentiable.reducescatter(compressed, how, name, process_set), ctx)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors, all or none of them. Differentiable."""
    how = reducing(None, op, prescale_factor, postscale_factor)
    compressed = list(map(as_compressor(compression, NAMES).compress, as_group(tensors)))
    results = differentiable.grouped_reducescatter([tensor for tensor, _ in compressed], how, name, process_set)
    return _decompressed(compression, results, compressed)


def _decompressed(
    compression: Compressor,
    results: Sequence[torch.Tensor],
    compressed: Sequence[tuple[torch.Tensor, torch.dtype | None]],
) -> list[torch.Tensor]:
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed, strict=True)]


def _rows(splits: Sequence[int] | torch.Tensor | None) -> tuple[int, ...] | None:
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32 or splits.dim() != 1:
            raise ArgumentError(f"splits must be a 1-D int32 tensor, got {splits.dim()}-D {splits.dtype}")
        return tuple(splits.tolist())
    return tuple(int(split) for split in splits)
