"""Ways of control messages between rank 0 and the other ranks of a job."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from reigen.config import Config
from reigen.engine.control_tree import ControlTree
from reigen.planner.costs import Costs
from reigen.planner.layout import JobLayout


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """Connections of negotiation.

    Attributes:
        size: ranks of the job.
        children: ranks that have a connection to rank 0: each sends it one message for what all ranks below have to
            report, and gets each announcement from it.
        depth: ranks that a message passes between rank 0 and the farthest one.
        relay_children: the most that such a rank has below it.
    """

    size: int
    children: int
    depth: int = 0
    relay_children: int = 0

    @classmethod
    def of(cls, layout: JobLayout) -> ControlPlan:
        """Plan a job: on one host reports lie in shared memory, between hosts there is a star, in large jobs a tree.

        The tree is that of `reigen.engine.control_tree`; jobs that are not elastic have it.
        """
        size, least = layout.num_ranks, Config().control_tree_ranks
        if layout.num_hosts == 1:
            return cls(size, 0)
        if not least or size < max(least, 3):
            return cls(size, size - 1)
        ends = [0, *itertools.accumulate(host.num_ranks for host in layout.cluster.hosts)]
        tree = ControlTree([range(first, end) for first, end in itertools.pairwise(ends) if first < end])
        depths = [0] * size
        for rank in range(1, size):  # parents come before their children
            parent = tree.parent(rank)
            depths[rank] = depths[parent] + (parent > 0)
        largest = max(len(tree.children(rank)) for rank in range(1, size))
        return cls(size, len(tree.children(0)), max(depths), largest)

    def messages(self, num_ranks: int) -> float:
        """Return the messages that rank 0 gets, on average, for a report of so many ranks that are not rank 0."""
        return self.children * num_ranks / max(1, self.size - 1)

    def seconds(self, hop_seconds: float, costs: Costs) -> float:
        """Return how long a message is under way to, or from, the farthest rank, besides rank 0's own work."""
        if not self.children:
            return costs.barrier_seconds
        return (self.depth + 1) * hop_seconds + self.depth * self.relay_children * costs.control_message_seconds
