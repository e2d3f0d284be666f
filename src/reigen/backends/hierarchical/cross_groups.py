"""Division of work between hosts among the ranks of several hosts. Pure: nothing here moves a byte.

A *cross group* has one rank of every host. Tensors are cut in as many slices as there are cross groups, and slice c
travels between hosts in cross group c alone. So the ranks of a host send together as much as one rank would, each of
them a part; ranks without a cross group, because another host has fewer, take part inside their host only.

The ranks of a cross group ascend as the hosts do, hosts being ordered by their lowest ranks. A network that adds in the
order of ranks then adds in the order of hosts in every cross group, and the bits of an element do not depend on the
group that it travels in: only on the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from reigen.backends.buffer_list import rank_slice
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp

#: Up to here one cross group carries all: a message of half the size takes as long.
SMALL_BYTES = 1 << 15

_EXACT = (ReduceOp.MIN, ReduceOp.MAX)


@dataclass(frozen=True, slots=True)
class CrossGroups:
    """Ranks of a backend by host, and by cross group.

    Attributes:
        hosts: the ranks of each host, ascending; hosts by their lowest rank.
        groups: for each cross group, its rank on each host.
        reason: why there are so many.
    """

    hosts: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    reason: str

    @classmethod
    def of(cls, ranks_by_host: Sequence[Sequence[int]]) -> CrossGroups:
        """Make the cross groups; empty hosts do not count."""
        hosts = tuple(sorted(tuple(sorted(ranks)) for ranks in ranks_by_host if ranks))
        groups: list[tuple[int, ...]] = []
        free = [list(host) for host in hosts]
        while (group := _next_cross_group(free)) is not None:
            groups.append(group)
            for ranks, rank in zip(free, group, strict=True):
                del ranks[: ranks.index(rank) + 1]
        fewest = min(map(len, hosts))
        reason = f"the host with the fewest ranks has {fewest}"
        if len(groups) < fewest:
            reason += ", and ranks are numbered across hosts so that no more can be put in one order"
        return cls(hosts, tuple(groups), reason)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, host by host."""
        return tuple(rank for host in self.hosts for rank in host)

    @property
    def adds_in_rank_order(self) -> bool:
        """True if adding up every host, and then the hosts, is adding in rank order: only the first adds anything."""
        return self.order == tuple(range(self.size)) and all(len(host) == 1 for host in self.hosts[1:])

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(index for index, host in enumerate(self.hosts) if rank in host)

    def group_of(self, rank: int) -> int | None:
        """Return the index of a rank's cross group, if it has one."""
        return next((index for index, group in enumerate(self.groups) if rank in group), None)

    def slices(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        """Return for each cross group the range of its elements, of ``count``."""
        if count * itemsize <= SMALL_BYTES:
            return [(0, count), *[(count, count)] * (len(self.groups) - 1)]
        return [rank_slice(count, index, len(self.groups), itemsize) for index in range(len(self.groups))]

    def among(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return some of the ranks by host, numbered anew."""
        number = {rank: index for index, rank in enumerate(sorted(ranks))}
        by_host = [[number[rank] for rank in host if rank in number] for host in self.hosts]
        return [numbers for numbers in by_host if numbers]


def _next_cross_group(free: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the lowest free rank of each host that is higher than the one before."""
    group: list[int] = []
    for ranks in free:
        higher = [rank for rank in ranks if not group or rank > group[-1]]
        if not higher:
            return None
        group.append(higher[0])
    return tuple(group)


@dataclass(frozen=True, slots=True)
class TwoStageReduction:
    """Reduction in two stages: inside every host, and between hosts.

    Attributes:
        local: of the inputs of a host's ranks; scales them, does not divide.
        network: of the hosts' partial results; divides and scales.
        wide: partial results are float32 although the type is float16 or bfloat16. Dividing, scaling and rounding come
            after both stages then, with ``full``.
        full: the reduction at once.
    """

    local: Reduction
    network: Reduction
    wide: bool
    full: Reduction


@functools.lru_cache(maxsize=256)
def two_stage_reduction(reduction: Reduction) -> TwoStageReduction:
    """Divide a reduction into two stages, where some host has several ranks.

    Integers have the same result as at once: sums wrap around in any order, and an average is truncated once, at the
    end. Sums and products of float16 and bfloat16 are rounded once, at the end, as at once; so their partial results
    travel as float32, which costs half as many bytes again: see `reigen.backends.hierarchical.backend`.
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
