"""Base class of optimizers that get reduced gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from reigen import context as contexts
from reigen.engine.handle import Handle
from reigen.errors import CollectiveError
from reigen.torch.optimizers.gradient_sync import FinishedBy, GradientSynchronizer
from reigen.torch.optimizers.optimizer_wrapper import Closure, WrappedOptimizer

#: Key of a state dict: what gradient compression with error feedback has not sent yet, and of which rank that is.
RESIDUALS_KEY = "reigen.unsent"


class AllreduceOptimizer(WrappedOptimizer):
    """Base of :func:`DistributedOptimizer`, in front of an optimizer's own class."""

    _reducer: GradientSynchronizer
    #: within `skip_synchronize`
    _skips: bool = False

    @property
    def has_outstanding_gradients(self) -> bool:
        """Return whether complete gradients wait for a step, or are on their way."""
        return self._reducer.outstanding

    def _before_unscaling(self) -> None:
        if self._reducer.finished is FinishedBy.NONE:
            self._finish(FinishedBy.READER)

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Handle[torch.Tensor], None]:
        """Begin to reduce ``p.grad`` in place by itself, as in Horovod, for programs that extend its optimizer.

        Returns:
            What ``synchronize()`` takes, and nothing that ``decompress()`` would need.
        """
        return self._reducer.reduce_alone(p), None

    def complete_sums_by(self, complete: Callable[[CollectiveError], bool] | None) -> None:
        """Call this where sums have failed; True: they are complete where the gradients lie, and the step goes on."""
        self._reducer.complete = complete

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` is the reduced gradient. Follow it with ``skip_synchronize()`` around ``step()``.

        Raises:
            CollectiveError: a reduction failed; gradients are undefined then.
        """
        if self._reducer.finished is FinishedBy.BACKWARD:
            self._reducer.confirm()
        else:
            self._finish(FinishedBy.USER)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` takes the gradients as they are, because ``synchronize()`` has been called."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Reduce the gradients, and scale them so that the norm of all together is at most ``max_norm``.

        `torch.nn.utils.clip_grad_norm_`, for which neither `synchronize` nor `skip_synchronize` is needed.

        Args:
            max_norm: of all gradients together.
            norm_type: which p-norm; may be infinite.
            error_if_nonfinite: raise a RuntimeError if the norm is NaN or infinite.

        Returns:
            The norm before, the same on all ranks.

        Raises:
            CollectiveError: a reduction failed.
        """
        if self._reducer.finished is FinishedBy.NONE:
            self._finish(FinishedBy.READER)
        parameters = [parameter for parameter in self._parameters() if parameter.numel()]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

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
        reducer = self._reducer
        self._reduce_for_step(wanted=closure is None or reducer.outstanding, stacklevel=3)
        try:
            with self.update_context:
                loss = super().step() if closure is None else super().step(self._reduced(closure))
        finally:
            reducer.stepped()
        reducer.updated(self._parameters())
        contexts.mark("STEP")
        return loss

    # torch wraps every class's step() once with profiling and the user's step hooks; the base class's has them already.
    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict; with error feedback, and what compression has not sent of this rank's.

        That stands under a key of its own, `RESIDUALS_KEY`, which every optimizer of torch passes over when it loads.
        """
        state = super().state_dict()
        if unsent := self._reducer.unsent(self._parameters()):
            state[RESIDUALS_KEY] = unsent
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; reductions on their way are completed first.

        What compression had not sent goes back to the rank that it is of. Other ranks, and all where the state dict
        tells of none, begin with nothing left to send.

        Raises:
            ArgumentError: what had not been sent is of another model.
        """
        if self._reducer.is_job_over:
            self.abandon()
        elif self._reducer.outstanding:
            self._finish(FinishedBy.NONE)
        super().load_state_dict(state_dict)
        self._reducer.restore_residuals(state_dict.get(RESIDUALS_KEY), self._parameters())

    def _finish(self, by: FinishedBy) -> None:
        self._reducer.finish(self._parameters(), by)

    def _reduce_for_step(self, *, wanted: bool, stacklevel: int) -> None:
        """Reduce the gradients that a step begins with, if that is ``wanted`` and not done."""
        reducer = self._reducer
        if self._skips:
            reducer.check_not_outstanding("optimizer.step() within skip_synchronize()")
        elif reducer.finished is FinishedBy.USER:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "The gradients are not reduced a second time.",
                stacklevel=stacklevel,
            )
        elif reducer.finished is FinishedBy.NONE and wanted:
            self._finish(FinishedBy.READER)

    def _reduced(self, closure: Closure) -> Closure:
        """The closure, followed by the reduction of the gradients that it computed."""

        def call() -> Any:
            loss = closure()
            if self._reducer.finished is FinishedBy.NONE:
                self._finish(FinishedBy.READER)
            if isinstance(self, torch.optim.LBFGS):
                self._reducer.stepped()
                return self._reducer.average(torch.as_tensor(loss).detach())
            return loss

        return call
