"""All gradients of one optimizer, and where in the step it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import torch

from reigen import context as contexts
from reigen.errors import ArgumentError, CollectiveError
from reigen.frontends.gradients import check_passes
from reigen.frontends.replicas import check_replicas
from reigen.torch.adapter import bytes_of, dtype_of
from reigen.torch.reducer import ReduceOptions, Reducer, check_finished


class Finished(Enum):
    """Who asked for the gradients that are ready now."""

    NOBODY = "nobody: step() has to"
    USER = "the user called synchronize()"
    READER = "somebody who reads the gradients, such as GradScaler"


class GradientAverager:
    """Reducers for the parameters known at construction, and one more for each lot that is found trainable later.

    With one rank there are none: nothing is hooked, nothing is communicated.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], options: ReduceOptions, passes: int) -> None:
        self._context = contexts.current()
        self._options = options
        self._passes = check_passes(passes)
        self._names = {parameter: name for name, parameter in named}
        #: by id, which is faster to look up than a tensor; holding the tensor keeps its id its own
        self._known: dict[int, torch.Tensor] = {}
        self._finished = Finished.NOBODY
        #: updates of the parameters since the ranks last began to count alike
        self._num_updates = 0
        self.reducers: list[Reducer] = []
        self.adopt([parameter for _, parameter in named])

    @property
    def backward_passes_per_step(self) -> int:
        """Gradients that are summed up locally before they are communicated."""
        return self._passes

    @property
    def outstanding(self) -> bool:
        """Whether complete gradients are on their way."""
        return any(reducer.tracker.outstanding for reducer in self.reducers)

    @property
    def finished(self) -> Finished:
        """Who has finished this pass; NOBODY again as soon as a new gradient has come."""
        if any(reducer.tracker.num_arrived for reducer in self.reducers):
            return Finished.NOBODY
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
                self._names.setdefault(parameter, f"parameter.{len(self._known)}")
                self._known[id(parameter)] = parameter
                new.append(parameter)
        if new and self._context.size > 1:
            named = [(self._names[parameter], parameter) for parameter in new]
            self.reducers.append(Reducer(self._context, named, self._options, self._passes))

    def finish(self, parameters: Iterable[torch.Tensor], by: Finished) -> None:
        """Collective: all gradients become those that all ranks agree on.

        Args:
            parameters: every parameter of the optimizer now; those that have become trainable are adopted.
            by: on whose behalf.

        Raises:
            CollectiveError: an operation failed.
            ArgumentError: the optimizer was made for a job of one rank and there are more now.
        """
        self._check_context()
        self.adopt(parameters)
        for reducer in self.reducers:
            reducer.start()
        failure: CollectiveError | None = None
        for reducer in self.reducers:
            try:
                reducer.wait()
            except CollectiveError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        self._finished = by

    def stepped(self) -> None:
        """The gradients have been used or dropped: the next step needs new ones."""
        self._finished = Finished.NOBODY

    def updated(self, parameters: Sequence[torch.Tensor]) -> None:
        """The optimizer has changed its parameters; every so many times (REIGEN_CHECK_REPLICAS) they are compared.

        Raises:
            ReplicaError: they are not the same on all ranks.
        """
        every = self._context.config.check_replicas
        if not every or not self.reducers:
            return
        self._num_updates += 1
        if self._num_updates % every == 0:
            names = [self._names.get(p, f"parameter {index}") for index, p in enumerate(parameters)]
            check_replicas(self._context, [bytes_of(p) for p in parameters], names, self.reducers[0].name)

    def discard(self) -> None:
        """The gradients are about to be cleared.

        Raises:
            StepOrderError: complete ones are on their way.
        """
        check_finished(self.reducers, "optimizer.zero_grad()")
        for reducer in self.reducers:
            if reducer.tracker.num_arrived:
                reducer.tracker.reset()
        self._finished = Finished.NOBODY

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many gradients are summed up locally.

        Raises:
            ArgumentError: not a positive integer.
            StepOrderError: complete gradients are on their way.
        """
        check_passes(passes)
        check_finished(self.reducers, "optimizer.set_backward_passes_per_step()")
        self._passes = passes
        for reducer in self.reducers:
            reducer.tracker.set_backward_passes_per_step(passes)

    def _check_context(self) -> None:
        current = contexts.current()
        if current is self._context:
            return
        if self._known and not self.reducers and current.size > 1:
            raise ArgumentError(
                "this DistributedOptimizer was made in a job of one rank, so it has watched no gradient; "
                f"make a new one for the job of {current.size} ranks"
            )
        self._context = current


def release(reducers: list[Reducer]) -> None:
    """Take the hooks off and free the buckets: when the optimizer is gone."""
    for reducer in reducers:
        reducer.release()
    reducers.clear()
