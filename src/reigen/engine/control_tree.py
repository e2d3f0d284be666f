"""Tree by hosts on which control messages travel in large jobs. Pure.

In small jobs there is a star of connections around rank 0. In large ones rank 0 would read as many messages for each
batch as there are ranks. There the first rank of each host is its *relay*: the other ranks of the host report to it,
and it to the relay of another host, up to rank 0. No rank has more than `FANOUT` children on its own host, and as many
on other hosts: where a host has more ranks, some of these are relays, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reigen.engine.rank_masks import to_mask, to_ranks
from reigen.errors import format_ranks

#: Children of a rank on its own host, and those on others.
FANOUT = 16


class ControlTree:
    """Parents and children of ranks.

    Args:
        hosts: the ranks of each host; the first rank of the first one is 0.
        fanout: see `FANOUT`.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], fanout: int = FANOUT) -> None:
        self.size = sum(map(len, hosts))
        #: by rank; -1 for rank 0
        self._parents = [-1] * self.size
        self._children: list[list[int]] = [[] for _ in range(self.size)]
        relays = [ranks[0] for ranks in hosts]
        for group in (relays, *hosts):
            for place, rank in enumerate(group[1:]):
                self._parents[rank] = group[place // fanout]
                self._children[group[place // fanout]].append(rank)

    def parent(self, rank: int) -> int:
        """Return the rank to which a rank reports; -1 for rank 0."""
        return self._parents[rank]

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that report to a rank."""
        return tuple(self._children[rank])

    def neighbors(self, rank: int) -> tuple[int, ...]:
        """Return the ranks to which a rank has a connection."""
        parent = self._parents[rank]
        return (*self._children[rank],) if parent < 0 else (parent, *self._children[rank])

    def subtree(self, rank: int) -> int:
        """Return a rank and all whose reports pass through it, as a mask."""
        mask, left = 0, [rank]
        while left:
            one = left.pop()
            mask |= 1 << one
            left += self._children[one]
        return mask

    def silent_relays(self, silent: Collection[int]) -> dict[int, int]:
        """Return for each rank that may be silent because of a relay the one of these that is nearest to rank 0.

        Args:
            silent: ranks of which nothing is heard. It may be because of a relay if that is one of them, and all ranks
                below it are.
        """
        mask, found = to_mask(silent), dict[int, int]()
        for rank in silent:
            relay = rank
            while (relay := self._parents[relay]) > 0:
                if not self.subtree(relay) & ~mask:
                    found[rank] = relay
        return found

    def relays(self) -> tuple[int, ...]:
        """Return all ranks but 0 that have children."""
        return to_ranks(sum(1 << rank for rank, children in enumerate(self._children) if rank and children))


def describe_relays(tree: ControlTree | None, silent: Collection[int]) -> str:
    """Return the end of a message about ranks of which nothing is heard: those of them that may wait for a relay."""
    below: dict[int, list[int]] = {}
    for rank, relay in ({} if tree is None else tree.silent_relays(silent)).items():
        below.setdefault(relay, []).append(rank)
    return "".join(
        f"; {'ranks' if len(ranks) > 1 else 'rank'} {format_ranks(ranks)} "
        f"{'report' if len(ranks) > 1 else 'reports'} through rank {relay}, so it alone may be stuck"
        for relay, ranks in sorted(below.items())
    )
