"""DistributedOptimizer: any torch optimizer, fed with gradients that all ranks agree on."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from reigen import context as contexts
from reigen.compression import Codec
from reigen.frontends.collectives import Average
from reigen.frontends.process_sets import ProcessSet, global_process_set
from reigen.torch.adasum_optimizer import AdasumOptimizer, DeltaExchange, check_adasum_options
from reigen.torch.arguments import (
    choose_compression,
    choose_compressor,
    choose_groups,
    choose_reduction,
    name_parameters,
)
from reigen.torch.averager import Finished, GradientAverager, release
from reigen.torch.compression import Compression, Compressor
from reigen.torch.reducer import ReduceOptions, check_finished
from reigen.torch.wrapping import Closure, WrappedOptimizer, check_plain, wrap
from reigen.types import ReduceOp


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's, and what it returns is an optimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | Codec | Mapping[str, Any] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that ``step()`` uses gradients reduced over all ranks.

    The result is an instance of a subclass of the optimizer's class, which shares its parameter groups and state:
    learning rate schedulers, ``state_dict`` and ``isinstance`` work. Gradients lie in shared memory and are reduced,
    bucket by bucket, while backward still runs. The buckets' memory is registered in the first ``step()`` or
    ``synchronize()``, and given back when the optimizer is garbage-collected.

    Parameters without a gradient contribute zeros, so models may run partly, and differently on different ranks.
    Parameters that are added or become trainable later are found at the next step, which must be the same on all ranks.
    After an exception in backward, ``step()`` goes on with the gradients that came; ``synchronize()`` and then
    ``zero_grad()`` drop them, if all ranks do that. Where ranks have different numbers of batches: ``uneven_data()``.
    In a job of one rank this is the plain optimizer.

    Args:
        optimizer: any optimizer of torch.optim, or another subclass of its ``Optimizer``. For LBFGS the closure's loss
            is averaged too, so that its line search decides the same on all ranks.
        named_parameters: what ``model.named_parameters()`` gives; the names are used in messages.
        compression: the element type in which gradients travel; or, as a dict such as ``{"type": "2bit"}`` or a codec
            of :mod:`reigen.compression`, the codes. Those are gathered and added up, so they need op=Average or Sum,
            and pay with few ranks or few bits (docs/compression.md).
        backward_passes_per_step: gradients that are summed up locally before they are reduced. They are not averaged:
            divide the loss by their number for that.
        op: Average, Sum, Min, Max or Product. With Adasum, and several ranks, each rank's optimizer steps on its own
            gradients, and what that did to each parameter is combined over the ranks, 2, 4, 8, ... of them, when
            ``step()`` is called; ``synchronize()`` does nothing then and ``skip_synchronize()`` is an AssertionError.
            ``groups`` mean nothing. Sparse gradients are left to the optimizer, unless ``sparse_as_dense``.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        num_groups: deprecated; use ``groups``.
        groups: which gradients are reduced together: lists of parameters, each reduced when all its members have their
            gradients, the parameters in no list as usual; or a number of groups, into which the parameters are divided
            in the order in which rank 0's gradients arrive. The same on every rank. Without it buckets are filled up.
        sparse_as_dense: make sparse gradients dense. Otherwise their indices and values are gathered, for parameters
            whose gradient is sparse in the first step on any rank.
        process_set: the ranks that average among themselves. A rank outside it has a plain optimizer of its own.

    Returns:
        The optimizer, with ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step()`` added.

    Raises:
        ArgumentError: an argument makes no sense; the names do not cover the parameters, or are not unique.
        UnsupportedTypeError: a parameter's dtype cannot be communicated.
        UnsupportedError: Adasum with a process set, or another number of ranks (a NotImplementedError, too).
        NotInitializedError: ``init()`` has not been called.

    Example:
        Clip gradients after they have been averaged::

            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
    """
    check_plain(optimizer)
    named = name_parameters(optimizer, named_parameters)
    if op == ReduceOp.ADASUM:
        check_adasum_options(gradient_predivide_factor, process_set)
        if contexts.current().size > 1:
            exchange = DeltaExchange(named, choose_compressor(compression), backward_passes_per_step, sparse_as_dense)
            combining = wrap(optimizer, AdasumOptimizer)
            combining.attach(exchange)
            return combining
        op = Average  # of one rank
    how = choose_reduction(op, gradient_predivide_factor)
    options = ReduceOptions(
        how=how,
        compression=choose_compression(compression, how.op),
        sparse_as_dense=sparse_as_dense,
        groups=choose_groups(groups, num_groups),
        process_set=process_set,
    )
    averager = GradientAverager(named, options, backward_passes_per_step)
    wrapped = wrap(optimizer, AveragingOptimizer)
    wrapped.attach(averager)
    return wrapped


class AveragingOptimizer(WrappedOptimizer):
    """What :func:`DistributedOptimizer` puts in front of an optimizer's own class."""

    _averager: GradientAverager
    _skips: bool

    def attach(self, averager: GradientAverager) -> None:
        """Use this averager from now on, and free its memory with this object."""
        self._averager = averager
        self._skips = False
        weakref.finalize(self, release, averager.reducers).atexit = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        GradScaler reads the gradients through this list before it calls ``step()``. They must be the averaged ones by
        then: it changes them in place, and all ranks must come to the same answer about infinities.
        """
        if sys._getframe(1).f_code.co_name == "_unscale_grads_" and self._averager.finished is Finished.NOBODY:
            self._finish(Finished.READER)
        return cast("list[dict[str, Any]]", self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def backward_passes_per_step(self) -> int:
        """Gradients that are summed up locally before they are communicated."""
        return self._averager.backward_passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many gradients are summed up locally; not between ``backward()`` and ``step()``."""
        self._averager.set_backward_passes_per_step(passes)

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` is the reduced gradient. Follow it with ``skip_synchronize()`` around ``step()``.

        Raises:
            CollectiveError: a reduction failed; gradients are undefined then.
        """
        self._finish(Finished.USER)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` takes the gradients as they are, because ``synchronize()`` has been called."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Closure | None = None) -> Any:
        """Reduce the gradients if that has not been done, then let the wrapped class update the parameters.

        Args:
            closure: computes the loss anew, with its gradients; they are reduced after each call.

        Raises:
            StepOrderError: within ``skip_synchronize()`` although gradients are on their way; or gradients have been
                changed (clipped) since backward, without ``synchronize()``.
            CollectiveError: a reduction failed; no parameter has been changed.
            ReplicaError: REIGEN_CHECK_REPLICAS is set, and the ranks hold different parameters after this step.
        """
        averager = self._averager
        if self._skips:
            check_finished(averager.reducers, "optimizer.step() within skip_synchronize()")
        elif averager.finished is Finished.USER:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "The gradients are not reduced a second time.",
                stacklevel=2,
            )
        elif averager.finished is Finished.NOBODY and (closure is None or averager.outstanding):
            self._finish(Finished.READER)
        try:
            loss = super().step() if closure is None else super().step(self._reduced(closure))
        finally:
            averager.stepped()
        averager.updated(self._parameters())
        contexts.mark("STEP")
        return loss

    # torch wraps every class's step() once with profiling and the user's step hooks; the base class's has them already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            StepOrderError: complete gradients are on their way (an AssertionError, as in Horovod).
        """
        self._averager.discard()
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their gradients are reduced from the next step on. All ranks must do it at the same step."""
        super().add_param_group(param_group)
        self._averager.adopt(param_group["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; what is on its way is completed first."""
        if self._averager.outstanding:
            self._finish(Finished.NOBODY)
        super().load_state_dict(state_dict)

    def _finish(self, by: Finished) -> None:
        self._averager.finish(self._parameters(), by)

    def _reduced(self, closure: Closure) -> Closure:
        """The closure, followed by the reduction of the gradients that it computed."""

        def call() -> Any:
            loss = closure()
            if self._averager.finished is Finished.NOBODY:
                self._finish(Finished.READER)
            if isinstance(self, torch.optim.LBFGS):
                self._averager.stepped()
                return self._averager.average(torch.as_tensor(loss).detach())
            return loss

        return call
