"""How ranks on several machines share the work between machines. Pure: nothing here moves a byte.

A *lane* has one rank of every machine. Tensors are cut in as many slices as there are lanes, and slice c travels
between machines in lane c alone. So the ranks of a machine send together what one rank would, each of them a part;
ranks that have no lane, because another machine has fewer, take part inside their machine only.

The ranks of a lane ascend as the machines do, machines being ordered by their lowest ranks. A network that adds in the
order of ranks then adds in the order of machines in every lane, and the bits of an element do not depend on the lane
that it travels in: only on the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from reigen.backends.buffer_list import rank_slice
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp

#: Up to here one lane carries all: a message of half the size takes as long.
SMALL_BYTES = 1 << 15

_EXACT = (ReduceOp.MIN, ReduceOp.MAX)


@dataclass(frozen=True, slots=True)
class CrossGroups:
    """A backend's ranks by machine, and who of them carries what.

    Attributes:
        machines: the ranks of each machine, ascending; machines by their lowest rank.
        lanes: for each lane, its rank on each machine.
        reason: why there are so many.
    """

    machines: tuple[tuple[int, ...], ...]
    lanes: tuple[tuple[int, ...], ...]
    reason: str

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> CrossGroups:
        """The lanes of ranks that are grouped by machine; empty groups do not count."""
        machines = tuple(sorted(tuple(sorted(group)) for group in groups if group))
        lanes: list[tuple[int, ...]] = []
        free = [list(machine) for machine in machines]
        while (lane := _next_cross_group(free)) is not None:
            lanes.append(lane)
            for ranks, rank in zip(free, lane, strict=True):
                del ranks[: ranks.index(rank) + 1]
        fewest = min(map(len, machines))
        reason = f"the machine with the fewest ranks has {fewest}"
        if len(lanes) < fewest:
            reason += ", and ranks are numbered across machines so that no more can be put in one order"
        return cls(machines, tuple(lanes), reason)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.machines))

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, machine by machine."""
        return tuple(rank for machine in self.machines for rank in machine)

    @property
    def adds_in_rank_order(self) -> bool:
        """Adding up every machine, and then the machines, is adding in rank order: only the first adds anything."""
        return self.order == tuple(range(self.size)) and all(len(machine) == 1 for machine in self.machines[1:])

    def host_of(self, rank: int) -> int:
        """The index of a rank's machine."""
        return next(index for index, machine in enumerate(self.machines) if rank in machine)

    def group_of(self, rank: int) -> int | None:
        """The index of a rank's lane, if it has one."""
        return next((index for index, lane in enumerate(self.lanes) if rank in lane), None)

    def slices(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        """For each lane, which of ``count`` elements it carries."""
        if count * itemsize <= SMALL_BYTES:
            return [(0, count), *[(count, count)] * (len(self.lanes) - 1)]
        return [rank_slice(count, lane, len(self.lanes), itemsize) for lane in range(len(self.lanes))]

    def among(self, ranks: Sequence[int]) -> list[list[int]]:
        """Some of the ranks by machine, numbered anew."""
        number = {rank: index for index, rank in enumerate(sorted(ranks))}
        groups = [[number[rank] for rank in machine if rank in number] for machine in self.machines]
        return [group for group in groups if group]


def _next_cross_group(free: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The lowest free rank of each machine that is higher than the one before."""
    lane: list[int] = []
    for ranks in free:
        higher = [rank for rank in ranks if not lane or rank > lane[-1]]
        if not higher:
            return None
        lane.append(higher[0])
    return tuple(lane)


@dataclass(frozen=True, slots=True)
class TwoStageReduction:
    """A reduction in two stages: inside every machine, and between machines.

    Attributes:
        local: of the inputs of a machine's ranks; scales them, does not divide.
        network: of the machines' partial results; divides and scales.
        wide: partial results are float32 although the type is float16 or bfloat16. Dividing, scaling and rounding come
            after both stages then, with ``whole``.
        whole: the reduction at once.
    """

    local: Reduction
    network: Reduction
    wide: bool
    whole: Reduction


@functools.lru_cache(maxsize=256)
def two_stage_reduction(reduction: Reduction) -> TwoStageReduction:
    """How to reduce in two stages, where some machine has several ranks.

    Integers give what they give at once: sums wrap around in any order, and an average is truncated once, at the end.
    Sums and products of float16 and bfloat16 are rounded once, at the end, as at once; so their partial results travel
    as float32, which costs half as many bytes again: see `reigen.backends.hierarchical.backend`.
    """
    dtype, count = reduction.dtype, reduction.count
    combining = ReduceOp.SUM if reduction.op is ReduceOp.AVERAGE else reduction.op
    local = Reduction(dtype, combining, count, prescale=reduction.prescale)
    wide = dtype.is_floating and dtype.itemsize == 2 and combining not in _EXACT
    if wide:
        network = Reduction(DTYPES["float32"], combining, count)
    else:
        network = Reduction(dtype, reduction.op, count, postscale=reduction.postscale)
    return TwoStageReduction(local, network, wide, reduction)
