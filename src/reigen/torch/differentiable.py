"""Backward of the collectives. Each is itself a collective, so every rank must run backward through it.

The rules are Horovod's, so that gradients of existing models stay the same: backward of allgather and broadcast
*averages* over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from reigen import context
from reigen.errors import ArgumentError
from reigen.frontends.collectives import Collectives
from reigen.torch.adapter import TorchAdapter
from reigen.types import ReduceOp

COLLECTIVES = Collectives(TorchAdapter(), context.current)

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)


def _done(pending: Any) -> Any:
    return pending.wait()


class Allreduce(torch.autograd.Function):
    """Backward: allreduce of the gradients with the same operator and scales."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> torch.Tensor:
        """Allreduce ``tensor``."""
        ctx.args = (op, None if name is None else f"{name}.grad", prescale, postscale)
        result: torch.Tensor = _done(COLLECTIVES.allreduce(tensor, op, name, prescale, postscale, blocking=True))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raises ArgumentError for Min, Max and Product, which have no such rule."""
        if ctx.args[0] not in _LINEAR:
            raise ArgumentError(f"allreduce with op={ctx.args[0].name.title()} has no gradient; detach() its input")
        return _done(COLLECTIVES.allreduce(grads[0], *ctx.args, blocking=True)), None, None, None, None


class Allgather(torch.autograd.Function):
    """Backward: the average of the gradients over the ranks, and of it the rows that came from this rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        """Allgather ``tensor``."""
        ctx.shape, ctx.name = tensor.shape, name
        result: torch.Tensor = _done(COLLECTIVES.allgather(tensor, name, blocking=True))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """One allreduce, and one small allgather: this rank cannot know where its rows begin."""
        name = None if ctx.name is None else f"{ctx.name}.grad"
        averaged = _done(COLLECTIVES.allreduce(grads[0], ReduceOp.AVERAGE, name, 1.0, 1.0, blocking=True))
        own = ctx.shape[0] if ctx.shape else 1
        rows = _done(
            COLLECTIVES.allgather(torch.tensor([own]), None if name is None else f"{name}.rows", blocking=True)
        ).tolist()
        rank = context.current().rank
        return averaged.narrow(0, sum(rows[:rank]), own).reshape(ctx.shape), None


class Broadcast(torch.autograd.Function):
    """Backward: the average of the gradients on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        """Broadcast ``tensor``."""
        ctx.root_rank, ctx.name = root_rank, name
        result: torch.Tensor = _done(COLLECTIVES.broadcast(tensor, root_rank, name, blocking=True))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """One allreduce."""
        name = None if ctx.name is None else f"{ctx.name}.grad"
        averaged = _done(COLLECTIVES.allreduce(grads[0], ReduceOp.AVERAGE, name, 1.0, 1.0, blocking=True))
        return averaged if context.current().rank == ctx.root_rank else torch.zeros_like(averaged), None, None


class Alltoall(torch.autograd.Function):
    """Backward: the gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: tuple[int, ...] | None, name: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Alltoall of ``tensor``; the second result is int32: the rows that came from each rank."""
        output, received = _done(COLLECTIVES.alltoall(tensor, splits, name, blocking=True))
        ctx.received, ctx.shape, ctx.name = received, tensor.shape, name
        counts = torch.tensor(received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return output, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Rows that were not sent get zeros."""
        name = None if ctx.name is None else f"{ctx.name}.grad"
        returned, _ = _done(COLLECTIVES.alltoall(grads[0], ctx.received, name, blocking=True))
        gradient = returned.new_zeros(ctx.shape)
        gradient[: returned.shape[0]] = returned
        return gradient, None, None


class Reducescatter(torch.autograd.Function):
    """Backward: allgather of the gradients, times the number of ranks for Sum, and times the scales."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> torch.Tensor:
        """Reducescatter ``tensor``."""
        ctx.op, ctx.name, ctx.scale = op, name, prescale * postscale
        result: torch.Tensor = _done(COLLECTIVES.reducescatter(tensor, op, name, prescale, postscale, blocking=True))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raises ArgumentError for Min, Max and Product, which have no such rule."""
        if ctx.op not in _LINEAR:
            raise ArgumentError(f"reducescatter with op={ctx.op.name.title()} has no gradient; detach() its input")
        gathered = _done(
            COLLECTIVES.allgather(grads[0], None if ctx.name is None else f"{ctx.name}.grad", blocking=True)
        )
        scale = ctx.scale * (context.current().size if ctx.op is ReduceOp.SUM else 1)
        return gathered if scale == 1 else gathered * scale, None, None, None, None
