"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from reigen import context as contexts
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.context import Context
from reigen.errors import ArgumentError
from reigen.torch.ops import allreduce_
from reigen.types import ReduceOp


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics are those of all ranks' batches taken together.

    While training in a job of several ranks, the mean, the variance, the running statistics and the gradient of the
    input are those of one batch norm over the concatenated batch. Ranks may have batches of different sizes, empty ones
    too. The gradients of weight and bias are this rank's share, as those of all other parameters. In evaluation, and in
    a job of one rank, this is ``torch.nn.BatchNorm1d``, ``2d`` or ``3d``.

    Forward and backward each are one small collective: every rank must run them, in the same order as its other layers
    of this kind. Layers are told apart by numbers that they get in the order of their first use. A rank that has joined
    counts as one with an empty batch.

    Args:
        num_features: C of the input, which is of shape (N, C) or (N, C, ...), float16, bfloat16, float32 or float64, on
            any device.
        eps: added to the variance.
        momentum: weight of the new value in the running statistics; None for their plain average over all batches.
        affine: learn a weight and a bias per channel.
        track_running_stats: keep running statistics, for evaluation.
        process_set: the ranks whose batches belong together.
        device: where parameters and buffers lie.
        dtype: their element type.
    """

    #: the job and the process set in which this layer has a number, and that number
    _place: tuple[Context, int, int] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._process_set = process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise.

        Args:
            input: (N, C) or (N, C, ...); N may be 0.

        Returns:
            The same shape, dtype and memory format.

        Raises:
            ArgumentError: wrong number of dimensions or channels; this rank is not in the process set.
            CollectiveError: another rank was lost, or did something else.
        """
        self._check_input_dim(input)
        if not self.training or len(self._ranks()) == 1:
            return super().forward(input)
        moments = self._gather(_Moments.of(input.detach()))
        if moments.count == 0:
            return input.clone()
        if moments.count == 1:
            raise ArgumentError("Expected more than 1 value per channel in all ranks together when training")
        self._track(moments)
        apply: Callable[..., torch.Tensor] = _Normalize.apply
        return apply(input, self.weight, self.bias, moments, self.eps, self._sum)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: ProcessSet = global_process_set) -> nn.Module:
        """``module`` with every batch norm in it replaced by a `SyncBatchNorm` of the same parameters and buffers.

        Parameters stay the same objects, so an optimizer that was made before goes on working. A module that is a batch
        norm itself is returned as a new one.

        Raises:
            ArgumentError: a lazy batch norm has not seen its first input.
        """
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                raise ArgumentError("a lazy batch norm has no parameters yet; run the model once, then convert it")
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set,
            )
            # The very same tensors, whatever their dtype and device.
            converted._parameters = dict(module._parameters)
            converted._buffers = dict(module._buffers)
            converted.training = module.training
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return converted

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles belong to no job yet."""
        return {key: value for key, value in self.__dict__.items() if key != "_place"}

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ArgumentError(
                f"SyncBatchNorm({self.num_features}) needs an input of shape (N, {self.num_features}, ...), "
                f"got {tuple(input.shape)}"
            )

    def _gather(self, own: _Moments) -> _Moments:
        """The moments of all ranks' values.

        Each rank writes its own into its row of a table of zeros; the sum of the tables is the list of all. Zeros are
        what a rank that has joined contributes, and mean an empty batch.
        """
        ranks = self._ranks()
        table = torch.zeros(len(ranks), 2 * self.num_features + 1, dtype=torch.float64)
        table[ranks.index(contexts.current().rank)] = own.row()
        return _Moments.combined(self._sum(table, ""), own.mean)

    def _track(self, moments: _Moments) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = moments.squares / (moments.count - 1)
        self.running_mean.mul_(1.0 - weight).add_(weight * moments.mean.to(self.running_mean.dtype))
        self.running_var.mul_(1.0 - weight).add_(weight * unbiased.to(self.running_var.dtype))

    def _ranks(self) -> tuple[int, ...]:
        """Those whose batches belong together, this one among them."""
        context, number = contexts.current(), process_set_number(self._process_set)
        ranks = context.process_sets[number]
        if context.rank not in ranks:
            raise ArgumentError(f"rank {context.rank} is not in process set {number}, whose ranks are {list(ranks)}")
        return ranks

    def _sum(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Sum over all ranks, in place."""
        context, number = contexts.current(), process_set_number(self._process_set)
        if self._place is None or self._place[:2] != (context, number):
            self._place = context, number, next(context.layer_numbers[number])
        name = f"sync_batch_norm.{self._place[2]}{what}"
        return allreduce_(tensor, name=name, op=ReduceOp.SUM, process_set=self._process_set)


@dataclass(frozen=True)
class _Moments:
    """Moments of each channel's values, (C,) in float32 or float64; ``count`` is how many values a channel has.

    ``squares`` are sums of squared deviations from the mean.
    """

    count: int
    mean: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> _Moments:
        """Of a batch: (N, C, ...)."""
        values = _wide(values)
        dims = _all_but_channels(values)
        count = values.numel() // values.shape[1] if values.shape[1] else 0
        mean = values.sum(dims) / max(1, count)
        return cls(count, mean, (values - _per_channel(mean, values)).square_().sum(dims))

    def row(self) -> torch.Tensor:
        """Return it as one vector: (2C + 1,)."""
        count = torch.tensor([self.count], dtype=torch.float64)
        return torch.cat([self.mean.cpu().double(), self.squares.cpu().double(), count])

    @classmethod
    def combined(cls, rows: torch.Tensor, like: torch.Tensor) -> _Moments:
        """Of several batches together; dtype and device are those of ``like``.

        The squared deviations from the common mean are those from a batch's own mean, and count times the square of
        that mean's deviation (Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
        sample variances"): nothing large is subtracted from anything large.
        """
        channels = like.numel()
        means, squares, counts = rows[:, :channels], rows[:, channels : 2 * channels], rows[:, 2 * channels :]
        total = float(counts.sum())
        mean = (counts * means).sum(0) / max(1.0, total)
        deviations = squares + counts * (means - mean).square()
        return cls(int(total), mean.to(like), deviations.sum(0).to(like))


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, where mean and variance depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: _Moments,
        eps: float,
        add_up: Callable[[torch.Tensor, str], torch.Tensor],
    ) -> torch.Tensor:
        """Normalise with the given moments; ``add_up(tensor, name)`` sums over all ranks, for backward."""
        variance = moments.squares / moments.count
        ctx.save_for_backward(x, weight, moments.mean, (variance + eps).rsqrt())
        ctx.count, ctx.add_up = moments.count, add_up
        if not x.numel():
            return x.clone()
        weight, bias = (None if p is None else p.to(variance.dtype) for p in (weight, bias))
        return torch.nn.functional.batch_norm(x, moments.mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Two sums over all ranks, for the gradient of x; those of weight and bias are this rank's own."""
        x, weight, mean, scale = ctx.saved_tensors
        dy, dims = _wide(grads[0]), _all_but_channels(x)
        deviations = _wide(x) - _per_channel(mean, x)
        sum_dy, sum_product = dy.sum(dims), (dy * deviations).sum(dims)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dweight = dbias = None
        if needs_weight:
            dweight = (sum_product * scale).to(weight.dtype)
        if needs_bias:
            dbias = sum_dy.to(weight.dtype)
        if needs_x:
            own = torch.stack([sum_dy, sum_product]).cpu().double()
            mean_dy, mean_product = (ctx.add_up(own, ".grad") / ctx.count).to(mean)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            dx = deviations.mul_(_per_channel(-scale.square() * mean_product, x))
            dx = dx.add_(dy).sub_(_per_channel(mean_dy, x)).mul_(_per_channel(factor, x)).to(x.dtype)
        return dx, dweight, dbias, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 or float64."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _per_channel(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) as (1, C, 1, ...), to be combined with ``like``."""
    return vector.view(1, -1, *[1] * (like.dim() - 2))
