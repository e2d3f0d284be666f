"""All gradients of one optimizer, and where in the step it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from reigen import context as contexts
from reigen.api.gradients.replica_check import check_first_step, check_replicas
from reigen.api.gradients.tracker import GradientTracker
from reigen.api.process_sets import process_set_number
from reigen.elastic import membership
from reigen.engine.handle import Handle
from reigen.errors import ArgumentError, CollectiveError, StepOrderError
from reigen.torch.adapter import bytes_to_compare, tensor_bytes
from reigen.torch.dtypes import dtype_of
from reigen.torch.ops import allreduce_async, allreduce_async_
from reigen.torch.optimizers.optimizer_wrapper import OptimizerReducer
from reigen.torch.parallel_wrappers import is_in_ddp
from reigen.torch.reducer.reducer import ReduceOptions, Reducer


class FinishedBy(Enum):
    """Caller that asked for the gradients that are ready now."""

    NONE = "nobody: step() has to"
    USER = "the user called synchronize()"
    READER = "somebody who reads the gradients, such as GradScaler"
    BACKWARD = "backward() itself: synchronize_in_backward"


class GradientSynchronizer(OptimizerReducer):
    """Reducers for the parameters known at construction, and one more for each lot that is found trainable later.

    There are none where nothing is to be reduced, with one rank in the process set or this one outside it: nothing is
    hooked, nothing is communicated. With ``in_backward`` gradients are reduced when backward() returns.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        options: ReduceOptions,
        passes: int,
        *,
        in_backward: bool = False,
    ) -> None:
        process_set_number(options.process_set)  # one that is not registered is a mistake also on ranks outside it
        self._options, self.process_set = options, options.process_set
        self._in_backward = in_backward
        #: the backward() that is asked to call back when it is over
        self._graph_task = -1
        self._finished = FinishedBy.NONE
        #: the last reduction has failed: gradients are undefined
        self._has_failed = False
        #: passes that were finished
        self.num_passes = 0
        #: see `AllreduceOptimizer.complete_sums_by`
        self.complete: Callable[[CollectiveError], bool] | None = None
        self.reducers: list[Reducer] = []
        super().__init__(named, passes)
        #: the job for which it was looked whether this rank takes part
        self._checked = self._context

    @property
    def trackers(self) -> Sequence[GradientTracker]:
        """One for each reducer."""
        return [reducer.tracker for reducer in self.reducers]

    @property
    def finished(self) -> FinishedBy:
        """Caller that finished this pass; NONE again as soon as a new gradient has come."""
        if any(reducer.tracker.num_arrived for reducer in self.reducers):
            return FinishedBy.NONE
        return self._finished

    @property
    def is_unfinished(self) -> bool:
        """Return whether gradients have come, or sums been made of them, that no step has used."""
        return self._has_failed or self._finished is not FinishedBy.NONE or super().is_unfinished

    @property
    def is_job_over(self) -> bool:
        """Return whether the job to which the gradients belong can do nothing more."""
        jobs = [reducer.reduce_group.context for reducer in self.reducers] or [self._context]
        return not any(job.is_operational for job in jobs)

    def abandon(self) -> None:
        """Implement `OptimizerReducer.abandon`."""
        super().abandon()
        for reducer in self.reducers:
            reducer.abandon()
        self._finished, self._has_failed, self._graph_task = FinishedBy.NONE, False, -1

    def renew(self, parameters: Iterable[torch.Tensor]) -> None:
        """Implement `OptimizerReducer.renew`; what compression has not sent is kept."""
        process_set_number(self.process_set)  # that it is registered in this job, too
        residuals = {one: left for reducer in self.reducers for one, left in reducer.residuals().items()}
        super().renew(parameters)
        for reducer in self.reducers:
            reducer.restore(residuals)

    def check_dtype(self, parameter: torch.Tensor) -> None:
        """Implement `OptimizerReducer.check_dtype`."""
        dtype_of(parameter.dtype)

    def watch(self, parameters: list[torch.Tensor]) -> None:
        """Make a reducer for them, if there are other ranks, or may come to be."""
        if self._has_others or (self.process_set.included() and membership.may_change()):
            reducer = Reducer(self._context, self.named(parameters), self._options, self.backward_passes_per_step)
            reducer.after_change_of_job = self._follow_job
            if self._in_backward:
                reducer.after_gradient = self._finish_after_backward
            self.reducers.append(reducer)

    def finish(self, parameters: Iterable[torch.Tensor], by: FinishedBy) -> None:
        """Collective: all gradients become those that all ranks agree on.

        Args:
            parameters: every parameter of the optimizer now; those that have become trainable are adopted.
            by: on whose behalf.

        Raises:
            CollectiveError: an operation failed; the pass is over.
            StepOrderError: a gradient has been changed while it was on its way, and not by ``synchronize()``'s caller.
        """
        self._check_context()
        self.adopt(parameters)
        if by is FinishedBy.READER:
            self._check_unchanged()
        failure: Exception | None = None
        self._has_failed = True
        for act in (Reducer.start, Reducer.wait):
            for reducer in self.reducers:
                try:
                    act(reducer)
                except Exception as error:  # noqa: BLE001 - raised below, when the others are through
                    failure = failure or error
        is_completed = failure is not None and self._completes(failure)
        try:
            if failure is not None and not is_completed:
                raise failure
        finally:
            del failure  # it holds this frame
        self._finished, self._has_failed = by, False
        self.num_passes += 1
        # shared parameters are compared where they come to exist once; the first step of a view is never completed
        if not is_completed and self.reducers and not self._options.owned and self._is_first_step():
            watched = [parameter for reducer in self.reducers for parameter in reducer.parameters]
            whole = self._context.config.check_replicas > 0
            data = [bytes_to_compare(parameter, whole=whole) for parameter in watched]
            check_first_step(self.reducers[0].reduce_group, data, [name for name, _ in self.named(watched)])

    def _completes(self, failure: Exception) -> bool:
        """Complete sums that have failed, together with those who are left; returns whether that was done.

        The failure is not raised here: it would hold this frame, and this frame the failure.
        """
        may = self.complete is not None and all(reducer.is_recoverable for reducer in self.reducers)
        if not may or not isinstance(failure, CollectiveError) or self.complete is None or not self.complete(failure):
            return False
        for reducer in self.reducers:
            reducer.recovered()
        return True

    def confirm(self) -> None:
        """The user, too, has called for the gradients that backward() has reduced."""
        self._finished = FinishedBy.USER

    def unsent(self, parameters: Sequence[torch.Tensor]) -> dict[str, Any] | None:
        """Return error feedback's residuals for a state dict: the rank, and residuals by parameters' positions."""
        residuals = {one: left for reducer in self.reducers for one, left in reducer.residuals().items()}
        if not residuals:
            return None
        positions = {place: residuals[one] for place, one in enumerate(parameters) if one in residuals}
        return {"rank": self._context.rank, "size": self._context.size, "residuals": positions}

    def restore_residuals(self, unsent: Mapping[str, Any] | None, parameters: Sequence[torch.Tensor]) -> None:
        """Restore the residuals that `unsent` returned on this rank; clear them after another rank's, or None.

        Raises:
            ArgumentError: it is none of these parameters.
        """
        is_own = unsent is not None and unsent["rank"] == self._context.rank
        residuals: dict[torch.Tensor, torch.Tensor] = {}
        for place, left in unsent["residuals"].items() if unsent is not None and is_own else ():
            if not 0 <= place < len(parameters) or parameters[place].shape != left.shape:
                raise ArgumentError(
                    f"the state dict has a residual of shape {tuple(left.shape)} for parameter {place}, and there is "
                    "none of that shape: it belongs to another model"
                )
            residuals[parameters[place]] = left
        for reducer in self.reducers:
            reducer.restore(residuals)

    def stepped(self) -> None:
        """The gradients have been used or dropped: the next step needs new ones."""
        self._finished = FinishedBy.NONE

    def reduce_alone(self, parameter: torch.Tensor) -> Handle[torch.Tensor]:
        """Begin to reduce one parameter's gradient in place, under its name; raises ArgumentError if it has none."""
        name, gradient = self.names[parameter], parameter.grad
        if gradient is None:
            raise ArgumentError(f"{name} has no gradient to reduce")
        op, prescale, postscale = self._options.reduction
        handle: Handle[torch.Tensor] = allreduce_async_(
            gradient.detach(),
            name=f"allreduce.{name}",
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=self._options.process_set,
        )
        return handle

    def average(self, loss: torch.Tensor) -> torch.Tensor:
        """Collective: the mean of every rank's ``loss``."""
        if not self.reducers:
            return loss
        reduce_group = self.reducers[0].reduce_group
        return allreduce_async(loss, name=f"{reduce_group.name}.loss", process_set=reduce_group.process_set).wait()

    def updated(self, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer has changed its parameters; every so many times (REIGEN_CHECK_REPLICAS) they are compared.

        Raises:
            ReplicaError: they are not the same on all ranks.
        """
        if self._is_check_due() and self.reducers and not self.is_job_over:
            names = [name for name, _ in self.named(parameters)]
            check_replicas(self.reducers[0].reduce_group, [tensor_bytes(p) for p in parameters], names)

    def discard(self) -> None:
        """The gradients are about to be cleared; raises StepOrderError if complete ones are on their way."""
        super().discard()
        self._finished = FinishedBy.NONE

    def check_not_outstanding(self, action: str) -> None:
        """Raise StepOrderError if complete gradients are on their way: ``action`` came too early."""
        if self.outstanding:
            raise StepOrderError(
                f"{action} was called after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
                "while gradients are on their way to the other ranks; call one of those first. If a loss of another "
                "model left gradients here that nobody wants, use requires_grad_(False) while it is computed"
            )

    def release(self) -> None:
        """Take the hooks off and free the buckets: when the optimizer is gone."""
        for reducer in self.reducers:
            reducer.release()
        self.reducers.clear()

    @property
    def _has_others(self) -> bool:
        """Return whether there are ranks with which this one reduces."""
        return bool(self.process_set.included()) and (self.process_set.size() or 1) > 1

    def _finish_after_backward(self) -> None:
        task: int = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)

    def _backward_is_over(self) -> None:
        if self.outstanding:
            self.finish(self.names, FinishedBy.BACKWARD)

    def _check_unchanged(self) -> None:
        changed = [name for reducer in self.reducers for name in reducer.changed()]
        if changed and is_in_ddp(parameter for reducer in self.reducers for parameter in reducer.parameters):
            raise StepOrderError(
                "the model is wrapped in torch's DistributedDataParallel, which averages the gradients, too, and has "
                "changed them while they were on their way to the other ranks: leave it away, for DistributedOptimizer "
                "does its work, and DistributedSampler's rank and size are hvd.rank() and hvd.size()"
            )
        if changed:
            raise StepOrderError(
                f"gradients were changed between backward() and step(), while they were on their way to the other "
                f"ranks: {', '.join(changed[:5])}{' ...' if len(changed) > 5 else ''}. Call optimizer.synchronize() "
                "before clipping or scaling, and step() within optimizer.skip_synchronize(); or clip by "
                "optimizer.clip_grad_norm_(max_norm), which does all of that. Where the code that clips is not yours "
                "(transformers.Trainer, open_clip): DistributedOptimizer(..., synchronize_in_backward=True)"
            )

    def _check_context(self) -> None:
        """After shutdown() and init(), belong to the new job, in which this rank may have others for the first time."""
        self._join()
        self._follow_job()
        if self._checked is self._context:
            return
        process_set_number(self.process_set)  # that it is registered in this job, too
        self._checked = self._context
        if not self.process_set.included():
            self.release()
        elif self._known and not self.reducers:
            self.watch([*self._known.values()])

    def _follow_job(self) -> None:
        if contexts.current() is not self._context:
            self._begin_job()
