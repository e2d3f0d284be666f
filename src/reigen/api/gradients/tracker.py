"""Tracker of gradients: the optimizer's logic as a pure state machine.

Parameters and buckets are numbers. The executor (in the framework's package) tells what happened and does what the
answer says; the tracker holds no tensor, no memory and no handle.

A *pass* lasts from the end of one :meth:`GradientTracker.finish` to the end of the next:

a. ``gradient(p)`` for each gradient that backward produced. A parameter is *complete* when it has had
   ``backward_passes_per_step`` of them; one more is an error, because the sum that is on its way would be overwritten.
b. A complete gradient is collected into its bucket; the last one of a unit submits the unit's buckets.
c. ``finish()`` names every gradient that was not collected (the executor contributes what it has, or zeros, so that
   ranks whose models ran differently still agree) and every bucket that was not submitted.

In the first pass there is no plan: nothing is collected, and the order of arrival is recorded. The executor agrees on
one order with the other ranks, makes a plan and calls :meth:`GradientTracker.adopt` before that pass's ``finish()``.
From the second pass on, buckets are submitted while backward runs. Where the ranks cannot agree, the executor adopts
some plan for one pass and calls :meth:`GradientTracker.abandon` after it: the next one is like the first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex

from reigen.api.gradients.bucket_plan import BucketPlan
from reigen.errors import ArgumentError, StepOrderError


@dataclass(frozen=True, slots=True)
class GradientAction:
    """Instructions for a gradient that came: ``collect`` it into its bucket; then ``submit`` these buckets, if any."""

    collect: bool
    submit: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishAction:
    """Instructions for the end of a pass.

    Attributes:
        missing: parameters of the plan whose gradients were not collected, in bucket order.
        submit: buckets that were not submitted, in plan order.
    """

    missing: tuple[int, ...]
    submit: tuple[int, ...]


_NO_ACTION = GradientAction(collect=False)
_COLLECT = GradientAction(collect=True)


class GradientTracker:
    """Counts gradients and decides when a bucket is complete.

    Args:
        num_parameters: the parameters are 0 .. num_parameters - 1.
        backward_passes_per_step: gradients that a parameter gets before its sum is communicated.
    """

    def __init__(self, num_parameters: int, backward_passes_per_step: int = 1) -> None:
        #: the plan, or None in the first pass
        self.plan: BucketPlan | None = None
        #: gradients that came in this pass; 0 means that the pass has not begun
        self.num_arrived = 0
        #: complete parameters of this pass in order of completion; each once
        self.order: list[int] = []
        self._passes = check_passes(backward_passes_per_step)
        #: gradients per parameter in this pass; never above _passes
        self._counts = [0] * num_parameters
        #: parameters collected in this pass; a subset of order
        self._collected: set[int] = set()
        #: gradients that each unit still waits for; 0 exactly when it may be submitted
        self._waiting: list[int] = []
        #: buckets submitted in this pass
        self._submitted: set[int] = set()
        #: gradients in each unit
        self._members: list[int] = []
        self._submissions: list[GradientAction] = []

    @property
    def outstanding(self) -> bool:
        """Return whether complete gradients wait for ``finish()``: touching them now would corrupt or lose them."""
        return bool(self.order)

    @property
    def backward_passes_per_step(self) -> int:
        """Gradients that a parameter gets before its sum is communicated."""
        return self._passes

    def gradient(self, parameter: int) -> GradientAction:
        """Backward has produced one more gradient of ``parameter``; raises StepOrderError if that is one too many."""
        count = self._counts[parameter] + 1
        if count > self._passes:
            raise StepOrderError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                f"It is {self._passes} now; increase backward_passes_per_step to accumulate gradients locally. "
                "To drop a batch, call synchronize() and then zero_grad(), on all ranks."
            )
        self._counts[parameter] = count
        self.num_arrived += 1
        if count < self._passes:
            return _NO_ACTION
        self.order.append(parameter)
        if self.plan is None:
            return _NO_ACTION
        unit = self.plan.unit_of.get(parameter)
        if unit is None:
            return _NO_ACTION
        self._collected.add(parameter)
        self._waiting[unit] -= 1
        if self._waiting[unit]:
            return _COLLECT
        self._submitted.update(self.plan.units[unit])
        return self._submissions[unit]

    def failed(self, buckets: Iterable[int]) -> None:
        """The buckets could not be submitted: ``finish()`` names them again."""
        self._submitted.difference_update(buckets)

    def adopt(self, plan: BucketPlan) -> None:
        """Use this plan from now on. Nothing has been collected yet, so all of it is missing from the running pass."""
        self.plan = plan
        self._submissions = [GradientAction(collect=True, submit=unit) for unit in plan.units]
        self._members = [sum(len(plan.buckets[bucket].places) for bucket in unit) for unit in plan.units]
        self._forget_buckets()

    def abandon(self) -> None:
        """The plan was for the pass that has ended: the next one has none."""
        self.plan = None
        self._members, self._submissions = [], []
        self._forget_buckets()

    def finish(self) -> FinishAction:
        """End the pass; return its last contributions and submissions. Call :meth:`reset` once these are done.

        Raises:
            StepOrderError: there is no plan yet; the executor must adopt one first.
        """
        if self.plan is None:
            raise StepOrderError("the gradients of the first pass have no plan yet")
        missing = (place.parameter for bucket in self.plan.buckets for place in bucket.places)
        buckets = range(len(self.plan.buckets))
        return FinishAction(
            tuple(parameter for parameter in missing if parameter not in self._collected),
            tuple(bucket for bucket in buckets if bucket not in self._submitted),
        )

    def reset(self) -> None:
        """A new pass begins: forget what came in this one. The plan stays."""
        self.num_arrived = 0
        self.order.clear()
        self._counts = [0] * len(self._counts)
        self._forget_buckets()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many gradients a parameter gets before its sum is communicated; counting starts anew.

        Raises:
            ArgumentError: ``passes`` is not a positive integer.
            StepOrderError: complete gradients are waiting for ``step()`` or ``synchronize()``.
        """
        passes = check_passes(passes)
        if self.outstanding:
            raise StepOrderError("backward_passes_per_step cannot change between backward() and step()")
        self._passes = passes
        self.reset()

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert len(set(self.order)) == len(self.order)
        assert self._collected <= set(self.order)
        assert all(0 <= count <= self._passes for count in self._counts)
        assert {p for p, count in enumerate(self._counts) if count == self._passes} == set(self.order)
        assert self.num_arrived == sum(self._counts)
        if self.plan is not None:
            for unit, buckets in enumerate(self.plan.units):
                members = [place.parameter for bucket in buckets for place in self.plan.buckets[bucket].places]
                assert self._waiting[unit] == len(set(members) - self._collected)
                assert not self._waiting[unit] or self._submitted.isdisjoint(buckets)

    def _forget_buckets(self) -> None:
        self._collected.clear()
        self._submitted.clear()
        self._waiting = self._members.copy()


def check_passes(passes: object) -> int:
    """``passes`` as an int; raises ArgumentError if ``backward_passes_per_step`` cannot be that."""
    if not isinstance(passes, SupportsIndex) or isinstance(passes, bool) or operator.index(passes) <= 0:
        raise ArgumentError(f"backward_passes_per_step must be a positive integer, got {passes!r}")
    return operator.index(passes)
