"""All gradients of one optimizer, and where in the step it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from reigen import context as contexts
from reigen.api.gradients.replica_check import ReplicaCheckSchedule
from reigen.api.gradients.tracker import check_passes
from reigen.api.process_sets import ProcessSet, process_set_number
from reigen.engine.handle import Handle
from reigen.errors import ArgumentError, StepOrderError
from reigen.torch.adapter import bytes_to_compare, tensor_bytes
from reigen.torch.dtypes import dtype_of
from reigen.torch.ops import allreduce_async, allreduce_async_
from reigen.torch.parallel_wrappers import is_in_ddp
from reigen.torch.reducer.reducer import ReduceOptions, Reducer, check_no_pending_gradient


class FinishedBy(Enum):
    """Caller that asked for the gradients that are ready now."""

    NONE = "nobody: step() has to"
    USER = "the user called synchronize()"
    READER = "somebody who reads the gradients, such as GradScaler"
    BACKWARD = "backward() itself: synchronize_in_backward"


class GradientSynchronizer:
    """Reducers for the parameters known at construction, and one more for each lot that is found trainable later.

    There are none where nothing is to be reduced, with one rank in the process set or this one outside it: nothing is
    hooked, nothing is communicated.

    Args:
        named: names and parameters, in the same order on every rank.
        options: how to reduce.
        passes: gradients that are summed up locally before they are communicated.
        in_backward: whether gradients are reduced when backward() returns.
    """

    #: Whether the ranks' parameters were compared in this job, and how often this rank had joined before.
    _is_compared: bool
    _num_joins: int

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        options: ReduceOptions,
        passes: int,
        *,
        in_backward: bool = False,
    ) -> None:
        self._context = contexts.current()
        process_set_number(
            options.process_set
        )  # a set that is not registered is a mistake on every rank, also outside it
        self._options = options
        self._passes = check_passes(passes)
        self._in_backward = in_backward
        #: the backward() that is asked to call back when it is over
        self._graph_task = -1
        self.names = {parameter: name for name, parameter in named}
        #: by id, which is faster to look up than a tensor; holding the tensor keeps its id its own
        self._known: dict[int, torch.Tensor] = {}
        self._finished = FinishedBy.NONE
        #: passes that were finished
        self.num_passes = 0
        self._begin_comparisons()
        self.reducers: list[Reducer] = []
        self.adopt([parameter for _, parameter in named])

    @property
    def backward_passes_per_step(self) -> int:
        """Gradients that are summed up locally before they are communicated."""
        return self._passes

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce together."""
        return self._options.process_set

    def named(self, parameters: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """The parameters with their names."""
        return [(self.names.get(p, f"parameter {index}"), p) for index, p in enumerate(parameters)]

    @property
    def outstanding(self) -> bool:
        """Return whether complete gradients are on their way."""
        return any(reducer.tracker.outstanding for reducer in self.reducers)

    @property
    def finished(self) -> FinishedBy:
        """Caller that finished this pass; NONE again as soon as a new gradient has come."""
        if any(reducer.tracker.num_arrived for reducer in self.reducers):
            return FinishedBy.NONE
        return self._finished

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reduce these parameters' gradients too, from now on, unless they are known or need none.

        Raises:
            UnsupportedTypeError: the dtype of one cannot be communicated.
        """
        new = []
        for parameter in parameters:
            if id(parameter) not in self._known and parameter.requires_grad:
                dtype_of(parameter.dtype)
                self.names.setdefault(parameter, f"parameter.{len(self._known)}")
                self._known[id(parameter)] = parameter
                new.append(parameter)
        if new and self._others:
            named = [(self.names[parameter], parameter) for parameter in new]
            self.reducers.append(Reducer(self._context, named, self._options, self._passes))
            if self._in_backward:
                self.reducers[-1].after_gradient = self._finish_after_backward

    def finish(self, parameters: Iterable[torch.Tensor], by: FinishedBy) -> None:
        """Collective: all gradients become those that all ranks agree on.

        Args:
            parameters: every parameter of the optimizer now; those that have become trainable are adopted.
            by: on whose behalf.

        Raises:
            CollectiveError: an operation failed; the pass is over.
            StepOrderError: a gradient has been changed while it was on its way, and not by ``synchronize()``'s caller.
            ArgumentError: the optimizer was made for a job of one rank and there are more now.
        """
        self._check_context()
        self.adopt(parameters)
        if by is FinishedBy.READER:
            self._check_unchanged()
        failure: Exception | None = None
        for act in (Reducer.start, Reducer.wait):
            for reducer in self.reducers:
                try:
                    act(reducer)
                except Exception as error:  # noqa: BLE001 - raised below, when the others are through
                    failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # it holds this frame
        self._finished = by
        self.num_passes += 1
        if not self._is_compared and self.reducers:
            self._is_compared = True
            if self._context.num_joins == self._num_joins:
                self._check_first_step()

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
        is_mine = unsent is not None and unsent["rank"] == self._context.rank
        residuals: dict[torch.Tensor, torch.Tensor] = {}
        for place, left in unsent["residuals"].items() if unsent is not None and is_mine else ():
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
        """Begin to reduce one parameter's gradient in place, under the parameter's name.

        Raises:
            ArgumentError: it has none.
        """
        name, gradient = self.names[parameter], parameter.grad
        if gradient is None:
            raise ArgumentError(f"{name} has no gradient to reduce")
        op, prescale, postscale = self._options.how
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
        team = self.reducers[0].team
        return allreduce_async(loss, name=f"{team.name}.loss", process_set=team.process_set).wait()

    def updated(self, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer has changed its parameters; every so many times (REIGEN_CHECK_REPLICAS) they are compared.

        Raises:
            ReplicaError: they are not the same on all ranks.
        """
        due = self._comparisons.due(self._context.config.check_replicas, self._context.num_joins)
        if due and self.reducers:
            names = [name for name, _ in self.named(parameters)]
            self.reducers[0].team.check_replicas([tensor_bytes(p) for p in parameters], names)

    def _check_first_step(self) -> None:
        parameters = [parameter for reducer in self.reducers for parameter in reducer.parameters]
        whole = self._context.config.check_replicas > 0
        data = [bytes_to_compare(parameter, whole=whole) for parameter in parameters]
        self.reducers[0].team.check_first_step(data, [name for name, _ in self.named(parameters)])

    def discard(self) -> None:
        """The gradients are about to be cleared.

        Raises:
            StepOrderError: complete ones are on their way.
        """
        check_no_pending_gradient(self.reducers, "optimizer.zero_grad()")
        for reducer in self.reducers:
            if reducer.tracker.num_arrived:
                reducer.tracker.reset()
        self._finished = FinishedBy.NONE

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many gradients are summed up locally.

        Raises:
            ArgumentError: not a positive integer.
            StepOrderError: complete gradients are on their way.
        """
        check_passes(passes)
        check_no_pending_gradient(self.reducers, "optimizer.set_backward_passes_per_step()")
        self._passes = passes
        for reducer in self.reducers:
            reducer.tracker.set_backward_passes_per_step(passes)

    @property
    def _others(self) -> bool:
        """Return whether there are ranks with which this one reduces."""
        members = self._options.process_set
        return bool(members.included()) and (members.size() or 1) > 1

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
        current = contexts.current()
        if current is self._context:
            return
        if self._known and not self.reducers and self._others:
            raise ArgumentError(
                "this DistributedOptimizer was made in a job of one rank, so it has watched no gradient; "
                f"make a new one for the job of {current.size} ranks"
            )
        self._context = current
        self._begin_comparisons()

    def _begin_comparisons(self) -> None:
        """Compare replicas from now on, as in a job that begins."""
        self._comparisons = ReplicaCheckSchedule()
        #: whether the parameters have been compared, or need not be: shared ones are where they come to exist once
        self._is_compared = bool(self._options.owned)
        #: who has joined before its first step would be the only one to compare
        self._num_joins = self._context.num_joins


def release_reducers(reducers: list[Reducer]) -> None:
    """Take the hooks off and free the buckets: when the optimizer is gone."""
    for reducer in reducers:
        reducer.release()
    reducers.clear()
