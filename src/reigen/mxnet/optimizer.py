"""DistributedOptimizer: an optimizer of MXNet whose gradients are averages over all ranks."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from reigen import context
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.errors import ArgumentError
from reigen.mxnet.compression import Compression
from reigen.mxnet.errors import raises_mxnet_errors
from reigen.mxnet.gradient_buckets import GradientBuckets, StepBuckets
from reigen.mxnet.gradient_reducer import GradientReducer

_OWN = {"_optimizer", "_gradients", "_buckets"}


def _delegated(name: str) -> Any:
    """Return a method that is the optimizer's own, where MXNet's base class would answer in its place."""

    def call(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, name)(*args, **kwargs)

    return call


class DistributedOptimizer(mx.optimizer.Optimizer):
    """Wrapper of an optimizer: before a weight is updated, its gradient is averaged over all ranks.

    For ``gluon.Trainer(params, opt, kvstore=None)`` and for ``Module``. With gluon the first update of a step starts
    the reductions of all gradients, which lie in buckets, as those of a :class:`~reigen.mxnet.DistributedTrainer` do.
    All attributes are those of the optimizer, read and written; the factor of the average is put to its
    ``rescale_grad`` where only it sees it.

    A pickle of it, as ``save_states(dump_optimizer=True)`` makes one, is a DistributedOptimizer again in a job, and the
    plain optimizer outside one.

    Args:
        optimizer: any of MXNet's.
        gradient_predivide_factor: gradients are divided by it before they are added, and multiplied after.
        num_groups: reduce the gradients in so many groups; 0: in buckets of the usual size.
        process_set: the ranks that average; others update with their own gradients.

    Raises:
        ArgumentError: it is no optimizer, or one of these already; or a factor or number that makes no sense.
        NotInitializedError: ``init()`` has not been called.
    """

    @raises_mxnet_errors
    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ArgumentError(f"an optimizer of MXNet is needed, not distributed yet, got {optimizer!r}")
        gradients = GradientReducer(gradient_predivide_factor, num_groups, process_set)
        self.__dict__.update(_optimizer=optimizer, _gradients=gradients, _buckets=_make_buckets(gradients))
        optimizer.rescale_grad *= gradients.factor

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet, while it is being made
            raise AttributeError(name)
        if name == "rescale_grad":
            self._follow_job()
            return self._optimizer.rescale_grad / self._gradients.factor
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "rescale_grad":
            setattr(self._optimizer, name, value)
            return
        self._follow_job()
        if self._buckets is not None:  # gluon's Trainer does it once in every step
            self._buckets.begin()
        self._optimizer.rescale_grad = value * self._gradients.factor

    def __reduce__(self) -> Any:
        gradients = self._gradients
        parts = (self._optimizer, gradients.factor, gradients.predivide, gradients.num_groups, gradients.process_set)
        return _restored, parts

    def unwrapped(self) -> mx.optimizer.Optimizer:
        """Return the optimizer as it was before; this object is of no use any more."""
        self._optimizer.rescale_grad /= self._gradients.factor
        return self._optimizer

    create_state = _delegated("create_state")
    create_state_multi_precision = _delegated("create_state_multi_precision")
    set_learning_rate = _delegated("set_learning_rate")
    set_lr_mult = _delegated("set_lr_mult")
    set_wd_mult = _delegated("set_wd_mult")

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradient, or gradients, and update. Does not wait."""
        self._optimizer.update(index, weight, self._reduced(index, grad), state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradient, or gradients, and update. Does not wait."""
        self._optimizer.update_multi_precision(index, weight, self._reduced(index, grad), state)

    def _follow_job(self) -> None:
        """Have the ranks of the present job reduce, if members have changed."""
        factor = self._gradients.factor
        if self._gradients.follow_job():
            self._optimizer.rescale_grad *= self._gradients.factor / factor
            self.__dict__["_buckets"] = _make_buckets(self._gradients)

    @raises_mxnet_errors
    def _reduced(self, index: Any, grad: Any) -> Any:
        """Return the gradient, or gradients, whose reduction is in MXNet's engine."""
        self._follow_job()
        if self._buckets is None:
            return grad
        is_list = isinstance(index, (list, tuple))
        numbers, arrays = (list(index), list(grad)) if is_list else ([index], [grad])
        reduced = self._buckets.take(self._optimizer.param_dict, numbers)
        if reduced is None:
            self._gradients.reduce([(n, _priority(n), array) for n, array in zip(numbers, arrays, strict=True)])
            reduced = arrays
        return reduced if is_list else reduced[0]


def _make_buckets(gradients: GradientReducer) -> StepBuckets | None:
    group = gradients.reduce_group
    return StepBuckets(GradientBuckets(group, gradients.num_groups, Compression.none)) if group else None


def _priority(index: Any) -> int:
    """Return the priority: gradients that the next forward pass needs first come first."""
    return -index if isinstance(index, int) else 0


def _restored(optimizer: Any, factor: float, predivide: float, num_groups: int, process_set: ProcessSet) -> Any:
    optimizer.rescale_grad /= factor
    if not context.is_initialized():
        return optimizer
    return DistributedOptimizer(optimizer, predivide, num_groups, process_set)
