"""The blocking collectives that return new tensors, and their backward.

Each backward is itself a collective, so every rank must run backward through it; it takes place in the process set of
forward, and can be differentiated again. The rules are Horovod's, so that gradients of existing models stay the same:
backward of allgather and broadcast *averages* over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reigen import context
from reigen.errors import ArgumentError
from reigen.frontends.collectives import Collectives, Reducing
from reigen.frontends.process_sets import ProcessSet
from reigen.torch.adapter import TorchAdapter
from reigen.types import ReduceOp

COLLECTIVES = Collectives(TorchAdapter(), context.current)

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)
_MEAN = Reducing(ReduceOp.AVERAGE, 1.0, 1.0)


def allreduce(tensor: torch.Tensor, how: Reducing, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """Reduce over the ranks of the set."""
    if _needs_graph(tensor):
        result: torch.Tensor = _apply(Allreduce, tensor, how, name, process_set)
        return result
    return COLLECTIVES.allreduce(tensor, how, name, process_set, blocking=True).take()


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], how: Reducing, name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Reduce several tensors, all or none."""
    if _needs_graph(*tensors):
        return list(_apply(GroupedAllreduce, how, name, process_set, *tensors))
    return COLLECTIVES.grouped_allreduce(tensors, how, name, process_set, blocking=True).take()


def allgather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """Concatenate along dimension 0."""
    if _needs_graph(tensor):
        result: torch.Tensor = _apply(Allgather, tensor, name, process_set)
        return result
    return COLLECTIVES.allgather(tensor, name, process_set, blocking=True).take()


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    """Concatenate several tensors, all or none."""
    if _needs_graph(*tensors):
        return list(_apply(GroupedAllgather, name, process_set, *tensors))
    return COLLECTIVES.grouped_allgather(tensors, name, process_set, blocking=True).take()


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """The root's tensor."""
    if _needs_graph(tensor):
        result: torch.Tensor = _apply(Broadcast, tensor, root_rank, name, process_set)
        return result
    return COLLECTIVES.broadcast(tensor, root_rank, name, process_set, blocking=True).take()


def alltoall(
    tensor: torch.Tensor, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """What came from all ranks, and how many rows from each: int32."""
    if _needs_graph(tensor):
        result: tuple[torch.Tensor, torch.Tensor] = _apply(Alltoall, tensor, splits, name, process_set)
        return result
    return with_counts(COLLECTIVES.alltoall(tensor, splits, name, process_set, blocking=True).take())


def reducescatter(tensor: torch.Tensor, how: Reducing, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """Reduce, and keep this rank's rows."""
    if _needs_graph(tensor):
        result: torch.Tensor = _apply(Reducescatter, tensor, how, name, process_set)
        return result
    return COLLECTIVES.reducescatter(tensor, how, name, process_set, blocking=True).take()


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], how: Reducing, name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Reduce several tensors, all or none, and keep this rank's rows of each."""
    if _needs_graph(*tensors):
        return list(_apply(GroupedReducescatter, how, name, process_set, *tensors))
    return COLLECTIVES.grouped_reducescatter(tensors, how, name, process_set, blocking=True).take()


def with_counts(result: tuple[torch.Tensor, tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of an alltoall with its row counts as an int32 tensor."""
    output, received = result
    return output, torch.tensor(received, dtype=torch.int32)


# -- their backward ---------------------------------------------------------------------------------------------------


class Allreduce(torch.autograd.Function):
    """Backward: allreduce of the gradients with the same operator and scales."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, how: Reducing, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Allreduce ``tensor``."""
        ctx.args = (how, _of_grad(name), process_set)
        return COLLECTIVES.allreduce(tensor, how, name, process_set, blocking=True).take()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raises ArgumentError for operators that have no such rule."""
        _check_linear("allreduce", ctx.args[0])
        return allreduce(grads[0], *ctx.args), None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """Backward: grouped allreduce of the gradients with the same operator and scales."""

    @staticmethod
    def forward(
        ctx: Any, how: Reducing, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Allreduce all ``tensors``."""
        ctx.args = (how, _of_grad(name), process_set)
        results = COLLECTIVES.grouped_allreduce(tensors, how, name, process_set, blocking=True).take()
        return _outputs(ctx, results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raises ArgumentError for operators that have no such rule."""
        _check_linear("grouped_allreduce", ctx.args[0])
        wanted = [grads[index] for index in ctx.floating]
        return None, None, None, *_spread(ctx, grouped_allreduce(wanted, *ctx.args))


class Allgather(torch.autograd.Function):
    """Backward: the average of the gradients over the ranks, and of it the rows that came from this rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """Allgather ``tensor``."""
        ctx.shape, ctx.name, ctx.process_set = tensor.shape, _of_grad(name), process_set
        return COLLECTIVES.allgather(tensor, name, process_set, blocking=True).take()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """One allreduce, and one small allgather: this rank cannot know where its rows begin."""
        averaged = allreduce(grads[0], _MEAN, ctx.name, ctx.process_set)
        (own,) = _own_rows([averaged], [ctx.shape], ctx.name, ctx.process_set)
        return own, None, None


class GroupedAllgather(torch.autograd.Function):
    """Backward: for each tensor the average of the gradients, and of it the rows that came from this rank."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Allgather all ``tensors``."""
        ctx.name, ctx.process_set = _of_grad(name), process_set
        results = COLLECTIVES.grouped_allgather(tensors, name, process_set, blocking=True).take()
        outputs = _outputs(ctx, results)
        ctx.shapes = [tensors[index].shape for index in ctx.floating]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """One grouped allreduce and one small allgather."""
        wanted = [grads[index] for index in ctx.floating]
        averaged = grouped_allreduce(wanted, _MEAN, ctx.name, ctx.process_set)
        return None, None, *_spread(ctx, _own_rows(averaged, ctx.shapes, ctx.name, ctx.process_set))


class Broadcast(torch.autograd.Function):
    """Backward: the average of the gradients on the root, zeros elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Broadcast ``tensor``."""
        ctx.root_rank, ctx.args = root_rank, (_MEAN, _of_grad(name), process_set)
        return COLLECTIVES.broadcast(tensor, root_rank, name, process_set, blocking=True).take()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """One allreduce."""
        averaged = allreduce(grads[0], *ctx.args)
        is_root = context.current().rank == ctx.root_rank
        return averaged if is_root else torch.zeros_like(averaged), None, None, None


class Alltoall(torch.autograd.Function):
    """Backward: the gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Alltoall of ``tensor``; the second result is int32: the rows that came from each rank."""
        output, received = COLLECTIVES.alltoall(tensor, splits, name, process_set, blocking=True).take()
        ctx.shape, ctx.args = tensor.shape, (received, _of_grad(name), process_set)
        _, counts = with_counts((output, received))
        ctx.mark_non_differentiable(counts)
        return output, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Rows that were not sent get zeros."""
        returned, _ = alltoall(grads[0], *ctx.args)
        gradient = returned.new_zeros(ctx.shape)
        gradient[: returned.shape[0]] = returned
        return gradient, None, None, None


class Reducescatter(torch.autograd.Function):
    """Backward: allgather of the gradients, times the number of ranks for Sum, and times the scales."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, how: Reducing, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Reducescatter ``tensor``."""
        ctx.how, ctx.args = how, (_of_grad(name), process_set)
        return COLLECTIVES.reducescatter(tensor, how, name, process_set, blocking=True).take()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raises ArgumentError for operators that have no such rule."""
        _check_linear("reducescatter", ctx.how)
        gathered = allgather(grads[0], *ctx.args)
        return _scaled(gathered, ctx.how, ctx.args[1]), None, None, None


class GroupedReducescatter(torch.autograd.Function):
    """Backward: grouped allgather of the gradients, times the number of ranks for Sum, and times the scales."""

    @staticmethod
    def forward(
        ctx: Any, how: Reducing, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Reducescatter all ``tensors``."""
        ctx.how, ctx.args = how, (_of_grad(name), process_set)
        results = COLLECTIVES.grouped_reducescatter(tensors, how, name, process_set, blocking=True).take()
        return _outputs(ctx, results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raises ArgumentError for operators that have no such rule."""
        _check_linear("grouped_reducescatter", ctx.how)
        wanted = [grads[index] for index in ctx.floating]
        gathered = grouped_allgather(wanted, *ctx.args)
        scaled = [_scaled(gradient, ctx.how, ctx.args[1]) for gradient in gathered]
        return None, None, None, *_spread(ctx, scaled)


def _needs_graph(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    apply: Callable[..., Any] = function.apply
    return apply(*args)


def _of_grad(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def _check_linear(function: str, how: Reducing) -> None:
    if how.op not in _LINEAR:
        raise ArgumentError(f"{function} with op={how.op.name.title()} has no gradient; detach() its input")


def _scaled(gradient: torch.Tensor, how: Reducing, process_set: ProcessSet) -> torch.Tensor:
    """The gradient of a reducescatter, times what its scales and a sum make of it."""
    scale = how.prescale * how.postscale * (process_set.size() or 1 if how.op is ReduceOp.SUM else 1)
    return gradient if scale == 1 else gradient * scale


def _own_rows(
    gathered: Sequence[torch.Tensor], shapes: Sequence[torch.Size], name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Of each gathered tensor the rows that this rank contributed, in the shape that they had here."""
    rows = torch.tensor([[shape[0] if shape else 1 for shape in shapes]])
    rows_name = None if name is None else f"{name}.rows"
    everybodys = COLLECTIVES.allgather(rows, rows_name, process_set, blocking=True).take()
    begins = everybodys[: process_set.rank()].sum(0).tolist()
    return [
        tensor.narrow(0, begin, count).reshape(shape)
        for tensor, begin, count, shape in zip(gathered, begins, rows[0].tolist(), shapes, strict=True)
    ]


def _outputs(ctx: Any, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A group's results; only those of floating point take part in backward."""
    ctx.num_members = len(results)
    ctx.floating = [index for index, result in enumerate(results) if result.is_floating_point()]
    ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
    return tuple(results)


def _spread(ctx: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients in the places of a group's members; None for the others."""
    spread: list[torch.Tensor | None] = [None] * ctx.num_members
    for index, gradient in zip(ctx.floating, gradients, strict=True):
        spread[index] = gradient
    return spread
