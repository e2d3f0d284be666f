"""Parameters that exist once a host: who updates which elements of them. Pure; the protocol of a step stands here.

With ``share_parameters`` the parameters of a model lie once in the memory of a host, and every rank's ``p.data`` is a
view of them. Of each gradient bucket every *owner* (a rank of the host; on several hosts one that carries gradients
between them) has a slice: it alone receives the slice's sums, and it alone updates the slice's elements of the
parameters, with an optimizer whose state exists for them alone. All ranks see the result: nothing is sent back.

A step, on every rank:

a. Backward fills the rank's own buckets. A bucket that is complete is submitted, and reduced to its owners: each finds
   the sums of its slice in its own copy of the bucket. The last bucket is kept back, as are all where nothing could go
   on while backward runs.
b. ``step()`` submits what is left, the last bucket too: its reduction ends when all ranks have come to ``step()``, so
   no rank reads the weights any more (backward may read them until it returns).
c. Every owner updates its slice, and says in shared memory that it begins and that it has ended.
d. A barrier: all ranks go on, with weights that no rank changes until all have come to the next (b).

Where gradients were asked for before ``step()`` (clipping, GradScaler, ``synchronize()``), the weights may have been
read since then, so (c) is preceded by a barrier.

Every wait has the job's deadline and ends when a rank is lost. A rank that fails by itself where the others count on it
(its optimizer raises, its module was moved) ends the job for all, with an error that names it: no rank waits in vain.
Up to (b) the weights are whole then: those of the last step. If a rank is lost in (c), or before (d) is over, what
every owner has said tells whether they are those of the last step, of this one, or some of each; see `UpdateProgress`.
Once a rank of the host has looked, no rank begins an update any more: one that was stopped and goes on changes nothing
of it.

Between steps every rank may read everything (a rank that saves a checkpoint while others go on reads whole weights and
states: there is no update without it).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from reigen.api.gradients.bucket_plan import Bucket, BucketPlan
from reigen.types import DTYPES

#: A parameter is cut at multiples of so many bytes from its first element, as it lies in memory: whole vectors, twice
#: unrolled, of the widest kernels. So vectors and remainders have the same elements as in the whole parameter.
SHARD_ALIGNMENT_BYTES = 128

#: A cut moves to the end of a parameter that is nearer than this part of an owner's share.
_SNAP_DIVISOR = 32


class ShardGranularity(enum.Enum):
    """Unit that one owner has to update as a whole, for the sake of the optimizer's arithmetic."""

    ELEMENTS = "elements"
    PARAMETERS = "whole parameters"


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Elements ``start`` to ``stop`` of one parameter, counted as they lie in memory."""

    parameter: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Return their number."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardAssignment:
    """Owners of the parts of a plan's buckets.

    Attributes:
        counts: for each bucket, how many of its elements every owner has, in the order in which they lie. Gaps between
            the gradients count as elements.
        pieces: for each owner, what it updates, bucket by bucket; all elements of the plan's parameters, each once. The
            first owner has the parameters without elements.
    """

    counts: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[ParameterRange, ...], ...]


def assign_shards(
    plan: BucketPlan,
    num_owners: int,
    alignment_bytes: int = SHARD_ALIGNMENT_BYTES,
    division: ShardGranularity = ShardGranularity.ELEMENTS,
) -> ShardAssignment:
    """Divide every bucket among the owners, in equal runs of bytes as far as that can be.

    A parameter is cut at most ``num_owners - 1`` times, at multiples of ``alignment_bytes`` from its beginning. Where
    parameters are divided whole, owners that have had less of the buckets before get more of the next one.

    Example:
        >>> from reigen.api.gradients.bucket_plan import ParameterSpec, plan_buckets
        >>> plan = plan_buckets([ParameterSpec(100, 4, "float32")], [0], 1 << 20)
        >>> share_out(plan, 2).pieces
        ((Piece(parameter=0, start=0, stop=32),), (Piece(parameter=0, start=32, stop=100),))
    """
    counts: list[tuple[int, ...]] = []
    pieces: list[list[ParameterRange]] = [[] for _ in range(num_owners)]
    loads = [0] * num_owners
    for bucket in plan.buckets:
        itemsize = DTYPES[bucket.dtype].itemsize
        is_cut = division is ShardGranularity.ELEMENTS
        cuts = _cut_elements(bucket, num_owners, alignment_bytes) if is_cut else _cut_parameters(bucket, loads)
        bounds = [0, *cuts, bucket.nbytes]
        loads = [load + end - begin for load, (begin, end) in zip(loads, itertools.pairwise(bounds), strict=True)]
        counts.append(tuple((end - begin) // itemsize for begin, end in itertools.pairwise(bounds)))
        for owner in range(num_owners):
            low, high = (bucket.offset + bound for bound in bounds[owner : owner + 2])
            for place in bucket.places:
                start, stop = max(low, place.offset), min(high, place.offset + place.nbytes)
                if start < stop:
                    within = (start - place.offset) // itemsize, (stop - place.offset) // itemsize
                    pieces[owner].append(ParameterRange(place.parameter, *within))
                elif not place.nbytes and not owner:
                    pieces[owner].append(ParameterRange(place.parameter, 0, 0))
    return ShardAssignment(tuple(counts), tuple(map(tuple, pieces)))


def _cut_elements(bucket: Bucket, num_owners: int, alignment_bytes: int) -> list[int]:
    """Return where the slices of all owners but the first begin, in bytes from the bucket's beginning."""
    cuts: list[int] = []
    near = bucket.nbytes // num_owners // _SNAP_DIVISOR
    for owner in range(1, num_owners):
        ideal = bucket.offset + bucket.nbytes * owner // num_owners
        begin, end = _parameter_bounds(bucket, ideal)
        cut = begin + (ideal - begin) // alignment_bytes * alignment_bytes
        if ideal - begin <= near:
            cut = begin
        elif end - ideal <= near:
            cut = end
        cuts.append(max(min(cut - bucket.offset, bucket.nbytes), cuts[-1] if cuts else 0))
    return cuts


def _cut_parameters(bucket: Bucket, loads: Sequence[int]) -> list[int]:
    """The same where parameters stay whole, and the owners have so many bytes already."""
    total = sum(loads) + bucket.nbytes
    missing_bytes = [max(0, total - len(loads) * load) for load in loads]
    cuts: list[int] = []
    for wanted in itertools.accumulate(missing_bytes[:-1]):
        ideal = bucket.offset + bucket.nbytes * wanted // max(1, sum(missing_bytes))
        begin, end = _parameter_bounds(bucket, ideal)
        cuts.append((begin if ideal - begin <= end - ideal else end) - bucket.offset)
    return cuts


def _parameter_bounds(bucket: Bucket, position: int) -> tuple[int, int]:
    """Return where the parameter at this position begins, and where the next one does."""
    starts = [place.offset for place in bucket.places if place.nbytes]
    begin = max((start for start in starts if start <= position), default=bucket.offset)
    return begin, min((start for start in starts if start > position), default=bucket.offset + bucket.nbytes)


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    """Progress of the owners' updates when a rank was lost.

    Attributes:
        step: the number of the update, from 1.
        begun: for each owner, the last update that it began.
        ended: for each owner, the last update that it ended.
    """

    step: int
    begun: Sequence[int]
    ended: Sequence[int]

    @property
    def weights(self) -> int | None:
        """The update whose results the weights are, all of them; None: some are of one, some of another."""
        if min(self.ended) >= self.step:
            return self.step
        return self.step - 1 if max(self.begun) < self.step else None

    def describe(self) -> str:
        """Format it for an error."""
        if self.weights is not None:
            return f"the weights are whole: those after update {self.weights}"
        done = [owner for owner, ended in enumerate(self.ended) if ended >= self.step]
        half = [owner for owner, begun in enumerate(self.begun) if begun >= self.step and owner not in done]
        return (
            f"THE WEIGHTS ARE NOT CONSISTENT: of update {self.step}, {len(done)} of {len(self.ended)} slices are done"
            f"{f', {len(half)} in the middle of it' if half else ''}, the others hold update {self.step - 1}. Neither "
            "the weights nor the optimizer's state can be used; go on from the last checkpoint"
        )
