"""DistributedOptimizer with op=Adasum: each rank's optimizer steps on its own gradients, and the steps are combined.

What an optimizer makes of a gradient (momentum, adaptive scaling) is not linear, so Adasum combines what it did to the
parameters: p becomes start + Adasum over ranks of (p after the local step - start). The optimizers' own state stays
each rank's, as in Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from reigen import context as contexts
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.gradients.replica_check import check_first_step, check_replicas
from reigen.api.gradients.tracker import GradientTracker
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.backends.adasum import check_adasum
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError, StepOrderError, UnsupportedError
from reigen.torch.adapter import bytes_to_compare, tensor_bytes
from reigen.torch.compression import Compressor
from reigen.torch.dtypes import dtype_of
from reigen.torch.ops import grouped_allreduce_
from reigen.torch.optimizers.optimizer_wrapper import Closure, OptimizerReducer, WrappedOptimizer
from reigen.torch.reducer.reducer import set_grad_hook
from reigen.types import ReduceOp


def check_adasum_options(predivide: float, process_set: ProcessSet) -> None:
    """Accept the arguments of DistributedOptimizer that go with op=Adasum.

    Raises:
        ArgumentError: there is a ``gradient_predivide_factor``.
        UnsupportedError: the process set is not that of all ranks.
    """
    if predivide != 1.0:
        raise ArgumentError("gradient_predivide_factor is supported only with op=Average")
    if process_set_number(process_set):
        raise UnsupportedError(f"op=Adasum works on all ranks only, not in {process_set!r}")


class DeltaReducer(OptimizerReducer):
    """Reducer of the ranks' updates of their parameters.

    Every parameter takes part from when it is first found trainable, with whatever it has done: a rank that did not
    change it contributes zeros, which are neutral. Deltas travel in the element type of ``compression``.

    Raises:
        UnsupportedTypeError: a parameter's dtype is none of Adasum's.
        UnsupportedError: the number of ranks is not a power of two.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], compression: Compressor, passes: int, sparse_as_dense: bool
    ) -> None:
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._trackers: list[GradientTracker] = []
        self._hooks: list[RemovableHandle] = []
        super().__init__(named, passes)

    @property
    def trackers(self) -> Sequence[GradientTracker]:
        """One for each lot of parameters."""
        return self._trackers

    def check_dtype(self, parameter: torch.Tensor) -> None:
        """Raise UnsupportedTypeError unless Adasum can combine the dtype."""
        check_adasum(dtype_of(parameter.dtype), self._context.size)

    def watch(self, parameters: list[torch.Tensor]) -> None:
        """Count their gradients in a tracker of their own."""
        tracker = GradientTracker(len(parameters), self.backward_passes_per_step)
        self._trackers.append(tracker)
        self._hooks += [set_grad_hook(p, _count_passes(tracker, number)) for number, p in enumerate(parameters)]

    def check_not_outstanding(self, action: str) -> None:
        """Raise StepOrderError if complete gradients wait for a step: ``action`` came too early."""
        if self.outstanding:
            raise StepOrderError(
                f"{action} was called after loss.backward() but before optimizer.step(), which would lose gradients; "
                "call that first"
            )

    def begin(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """A step begins: copies of the parameters that take part, of which ``parameters`` may add some."""
        self._join()
        self._follow_context()
        self.adopt(parameters)
        if self._is_first_step():
            whole = self._context.config.check_replicas > 0
            data = [bytes_to_compare(parameter, whole=whole) for parameter in self._parameters]
            check_first_step(self._reduce_group, data, self._parameter_names())
        self.take_gradients()
        return [p.detach().clone(memory_format=torch.preserve_format) for p in self._parameters]

    def take_gradients(self) -> None:
        """The gradients are about to be used."""
        self._reset()
        if self._sparse_as_dense:
            for parameter in self._parameters:
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    parameter.grad = parameter.grad.to_dense()

    @torch.no_grad()
    def combine(self, starts: Sequence[torch.Tensor]) -> None:
        """Collective: make start + Adasum(p - start) of every parameter p.

        Raises:
            CollectiveError: it failed; the parameters are what they were before the step.
        """
        if self._context.size == 1 or not starts:
            return
        # The parameters' own memory holds the deltas meanwhile.
        deltas = [parameter.detach().sub_(start) for parameter, start in zip(self._parameters, starts, strict=True)]
        try:
            self._adasum(deltas)
        except BaseException:
            for delta, start in zip(deltas, starts, strict=True):
                delta.copy_(start)
            raise
        for delta, start in zip(deltas, starts, strict=True):
            delta.add_(start)
        if self._is_check_due():
            data = [tensor_bytes(parameter) for parameter in self._parameters]
            check_replicas(self._reduce_group, data, self._parameter_names())

    def share_overflow(self) -> None:
        """Collective: where a rank has a gradient with infinity or NaN, every rank gets one.

        GradScaler leaves out the steps of such gradients, each rank for itself; all must come to the same answer.
        """
        self._follow_context()
        if self._context.size == 1:
            return
        gradients = [p.grad.detach() for p in self._parameters if p.grad is not None]
        values = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in gradients]
        overflows = not all(bool(value.isfinite().all()) for value in values)
        if not self._reduce_group.where(overflows, "overflow"):
            return
        self._reset()  # without step(): zero_grad() is what follows
        if not overflows:
            for gradient in gradients:
                gradient.mul_(torch.inf)

    def release(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._trackers.clear()

    def _follow_context(self) -> None:
        """After shutdown() and init(), belong to the new job."""
        if contexts.current() is not self._context:
            self._begin_job()

    def _begin_job(self) -> None:
        super()._begin_job()
        self._reduce_group = ReduceGroup(self._context, global_process_set, ReductionSpec(ReduceOp.ADASUM, 1.0, 1.0))

    def _reset(self) -> None:
        for tracker in self._trackers:
            tracker.reset()

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """Those that take part, in the order in which they were found trainable."""
        return [*self._known.values()]

    def _adasum(self, deltas: Sequence[torch.Tensor]) -> None:
        """In place, over all ranks."""
        sent = [self._compression.compress(delta)[0] for delta in deltas]
        grouped_allreduce_(sent, name=self._reduce_group.name, op=ReduceOp.ADASUM)
        for delta, tensor in zip(deltas, sent, strict=True):
            if tensor is not delta:
                delta.copy_(tensor)

    def _parameter_names(self) -> list[str]:
        return [name for name, _ in self.named(self._parameters)]


class AdasumOptimizer(WrappedOptimizer):
    """Base of ``DistributedOptimizer(..., op=Adasum)``, in front of an optimizer's own class."""

    _reducer: DeltaReducer

    def _before_unscaling(self) -> None:
        self._reducer.share_overflow()

    def synchronize(self) -> None:
        """Do nothing: gradients are this rank's own, ready to be clipped; ``step()`` communicates."""

    def skip_synchronize(self) -> NoReturn:
        """Not for this optimizer.

        Raises:
            StepOrderError: always (an AssertionError, as in Horovod).
        """
        raise StepOrderError("skip_synchronize() is not supported with op=Adasum: it is step() that communicates")

    def step(self, closure: Closure | None = None) -> Any:
        """Let the wrapped class update the parameters by this rank's gradients, then combine all ranks' updates.

        Args:
            closure: computes the loss anew, with its gradients; these and the loss are this rank's own.

        Raises:
            CollectiveError: a rank was lost; the parameters are what they were, the optimizer's state is not.
            ReplicaError: REIGEN_CHECK_REPLICAS is set, and the ranks hold different parameters after this step.
        """
        starts = self._reducer.begin(self._parameters())
        loss = super().step() if closure is None else super().step(self._taking(closure))
        self._reducer.combine(starts)
        return loss

    # torch wraps every class's step() once with profiling and the user's step hooks; the base class's has them already.
    step.hooked = True  # type: ignore[attr-defined]

    def _taking(self, closure: Closure) -> Closure:
        """The closure; the optimizer uses its gradients at once, so it may be called again."""

        def call() -> Any:
            loss = closure()
            self._reducer.take_gradients()
            return loss

        return call


def _count_passes(tracker: GradientTracker, number: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        tracker.gradient(number)

    return on_gradient
