"""Group of ranks that reduce the same gradients: the optimizers' interface to the engine, for all frameworks."""

from __future__ import annotations

import weakref

import numpy as np

from reigen.api.adapter import Array
from reigen.api.collectives import parse_op
from reigen.api.process_sets import ProcessSet, process_set_number
from reigen.backends.base import BlockJournal
from reigen.backends.device import HostOrDeviceArray
from reigen.context import Context, Handle, MemoryRegion
from reigen.engine.operation_builders import OwnerReduction, ReductionSpec
from reigen.errors import ArgumentError
from reigen.types import DTYPES, DType, ReduceOp


def choose_reduction(op: int, predivide: float) -> ReductionSpec:
    """The operator and its factors that ``op`` and ``gradient_predivide_factor`` mean.

    Raises:
        ArgumentError: there is no such operator, or a factor that does not go with it.
    """
    chosen = parse_op(op)
    if predivide != 1.0 and chosen is not ReduceOp.AVERAGE:
        raise ArgumentError("gradient_predivide_factor is supported only with op=Average")
    if not predivide > 0:
        raise ArgumentError(f"gradient_predivide_factor must be positive, got {predivide!r}")
    return ReductionSpec(chosen, 1.0 / predivide, float(predivide))


class ReduceGroup:
    """Ranks of a process set that reduce one optimizer's gradients together, seen from this rank.

    Attributes:
        name: the same on every rank, for the list of gradients; the names of all its operations begin with it.
        number: of the process set.
        ranks: their numbers in the job.
        size: number of ranks.

    Raises:
        ArgumentError: the process set is not registered.
    """

    def __init__(self, context: Context, process_set: ProcessSet, reduction: ReductionSpec) -> None:
        self.context = context
        self.process_set = process_set
        self.reduction = reduction
        self.number = process_set_number(process_set)
        self.ranks = tuple(context.process_sets[self.number])
        self.size = len(self.ranks)
        self.name = f"gradients.{next(context.gradient_sets[self.number])}"

    def reduce(
        self,
        array: HostOrDeviceArray,
        dtype: DType,
        part: str,
        region: MemoryRegion | None = None,
        *,
        blocking: bool = False,
        journal: BlockJournal | None = None,
    ) -> Handle:
        """Reduce gradients in place; ``region`` is the registered memory in which they lie, if they do."""
        reduction = self.reduction
        return self.context.allreduce(
            array,
            array,
            dtype,
            op=reduction.op,
            name=f"{self.name}.{part}",
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            region=region,
            journal=journal,
            divide_by_active=self.context.counts_active and reduction.op is ReduceOp.AVERAGE,
            process_set=self.number,
            blocking=blocking,
        )

    def gather(self, source: Array, part: str, target: Array, *, blocking: bool) -> Handle:
        """Bring every rank's bytes, equally many, into ``target``, in rank order."""
        return self.context.allgather(
            source,
            DTYPES["uint8"],
            name=f"{self.name}.{part}",
            make_output=lambda _: target,
            process_set=self.number,
            blocking=blocking,
        )

    def combine(self, array: Array, op: ReduceOp, part: str) -> None:
        """Allreduce numbers in place, and wait. Works while some rank has joined."""
        dtype, name = DTYPES[array.dtype.name], f"{self.name}.{part}"
        self.context.allreduce(array, array, dtype, op=op, name=name, process_set=self.number, blocking=True).wait()

    def where(self, applies: bool, part: str) -> list[int]:
        """Collective: the ranks on which something applies."""
        flags = np.zeros(self.size, np.int32)
        flags[self.ranks.index(self.context.rank)] = applies
        self.combine(flags, ReduceOp.MAX, part)
        return [self.ranks[place] for place in np.flatnonzero(flags)]

    def reduce_to_owners(
        self,
        array: Array,
        dtype: DType,
        part: str,
        region: MemoryRegion,
        counts: tuple[int, ...],
        *,
        blocking: bool,
    ) -> Handle:
        """Reduce gradients in registered memory in place, each owner's part (of ``counts`` elements) for it alone."""
        parts = OwnerReduction(region, counts, self.reduction.op, self.reduction.prescale, self.reduction.postscale)
        name = f"{self.name}.{part}"
        return self.context.reduce_to_owners(array, dtype, parts, name=name, process_set=self.number, blocking=blocking)

    @property
    def survives_deaths(self) -> bool:
        """Return whether this is a group of all ranks, in a job that completes steps in which a rank dies."""
        return self.context.keeps_journals and not self.number

    @property
    def keeps_journals(self) -> bool:
        """Return whether survivors of this group can finish its sums in registered memory."""
        context, op = self.context, self.reduction.op
        is_one_host = context.backend == "shm" and not self.number
        return context.keeps_journals and is_one_host and self.size > 1 and op is not ReduceOp.ADASUM

    def barrier(self, part: str) -> None:
        """Wait until all have come."""
        self.context.barrier(name=f"{self.name}.{part}", process_set=self.number, blocking=True).wait()

    def allocate(self, nbytes: int, *, shared: bool = False) -> MemoryRegion:
        """Registered memory; collective. ``shared``: one for all ranks of a host."""
        name = f"{self.name}.shared" if shared else self.name
        return self.context.allocate(max(1, nbytes), name=name, process_set=self.number, shared=shared)

    def memory_of(self, region: MemoryRegion) -> Array:
        """A region's memory, which is given back with the last view of it."""
        memory = np.frombuffer(region.array.data, np.uint8)
        weakref.finalize(memory, self.free, region).atexit = False
        return memory

    def free(self, region: MemoryRegion) -> None:
        """Give it back."""
        self.context.free(region, process_set=self.number)
