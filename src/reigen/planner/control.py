"""Ways of control messages between rank 0 and the other ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Plan a job: on one host reports lie in shared memory; between hosts each rank has a connection to rank 0."""
        return cls(layout.num_ranks, layout.num_ranks - 1 if layout.num_hosts > 1 else 0)

    def messages(self, num_ranks: int) -> float:
        """Return the messages that rank 0 gets, on average, for a report of so many ranks that are not rank 0."""
        return self.children * num_ranks / max(1, self.size - 1)

    def seconds(self, hop_seconds: float, costs: Costs) -> float:
        """Return how long a message is under way to, or from, the farthest rank, besides rank 0's own work."""
        if not self.children:
            return costs.barrier_seconds
        return (self.depth + 1) * hop_seconds + self.depth * self.relay_children * costs.control_message_seconds
