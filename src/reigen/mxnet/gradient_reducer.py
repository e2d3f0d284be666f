"""Reduction of one model's gradients over all ranks while MXNet still computes others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reigen import context
from reigen.api.gradients.bucket_plan import split_evenly
from reigen.api.gradients.reduce_group import ReduceGroup, choose_reduction
from reigen.api.operations import Average
from reigen.api.process_sets import ProcessSet, process_set_number
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError
from reigen.mxnet.collectives import reduce_in_place
from reigen.types import ReduceOp


class GradientReducer:
    """Sum of gradients over the ranks, in place. The optimizer makes averages of them by `factor`.

    So does Horovod: gradients which a script clips between the two are as large as it expects.

    Args:
        predivide: gradients are divided by it before they are added; `factor` makes up for it.
        num_groups: reduce gradients in so many groups, all or none of each; 0: each by itself.
        process_set: the ranks that take part; others reduce nothing.

    Raises:
        ArgumentError: ``predivide`` is not positive, ``num_groups`` is negative, or the set is not registered.
        NotInitializedError: ``init()`` has not been called.
    """

    def __init__(self, predivide: float, num_groups: int, process_set: ProcessSet) -> None:
        self._average = choose_reduction(Average, predivide)
        if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 0:
            raise ArgumentError(f"num_groups must be a number of groups, or 0, got {num_groups!r}")
        self.predivide, self.num_groups, self.process_set = predivide, num_groups, process_set
        self._reduction = ReductionSpec(ReduceOp.SUM, self._average.prescale, 1.0)
        self._enter_job()

    def follow_job(self) -> bool:
        """Reduce over the ranks of the present job; returns whether it is another one than before."""
        if not context.is_initialized() or context.current() is self._context:
            return False
        self._enter_job()
        return True

    def _enter_job(self) -> None:
        self._context = context.current()
        process_set_number(self.process_set)  # one that is not registered is a mistake on every rank, also outside it
        takes_part = bool(self.process_set.included())
        self._reduce_group = ReduceGroup(self._context, self.process_set, self._reduction) if takes_part else None
        #: sum times factor is the average
        self.factor = self._average.postscale / self._reduce_group.size if self._reduce_group is not None else 1.0

    @property
    def reduce_group(self) -> ReduceGroup | None:
        """Ranks that reduce, if this is one of them and not alone."""
        return self._reduce_group if self._reduce_group is not None and self._reduce_group.size > 1 else None

    def reduce(self, named: Sequence[tuple[object, int, Any]]) -> None:
        """Put the reduction of (name, alike on every rank; priority; array) into MXNet's engine; does not wait."""
        reduce_group = self.reduce_group
        if reduce_group is None or not named:
            return
        groups = split_evenly(named, self.num_groups or len(named))
        for group in groups:
            label, priority, _ = group[0]
            arrays = [array for _, _, array in group]
            name = f"{reduce_group.name}.{label}"
            reduce_in_place(arrays, self._reduction, name, priority, self.process_set)
