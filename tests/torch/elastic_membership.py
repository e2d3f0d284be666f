"""A membership for tests: views that are written down, of the ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reigen.api import job
from reigen.elastic import membership
from reigen.errors import HostsUpdatedInterrupt


class Left(Exception):
    """There is no further view of which this process is a member."""


@dataclass
class WrittenViews:
    """Membership of a process, by views that are known beforehand.

    Attributes:
        place: this process's number in the pool.
        views: the ranks of each, by their numbers in the pool.
        changes: how many commits there are before the members change, for each view; None: it ends otherwise.
        syncs: whether `needs_sync` says so.
    """

    place: int
    views: Sequence[Sequence[int]]
    changes: Sequence[int | None]
    syncs: bool = True
    number: int = -1
    steps: int = field(default=0)

    def begin(self) -> WrittenViews:
        """Enter the first view that this process is in."""
        membership.use(self)
        self.reset()
        return self

    def step_applied(self) -> None:
        self.steps += 1
        self.check()

    def check(self) -> None:
        change = self.changes[self.number]
        if change is not None and self.steps > change:
            raise HostsUpdatedInterrupt

    def needs_sync(self) -> bool:
        return self.syncs

    def fail(self) -> None:
        """Nobody is told."""

    def reset(self) -> None:
        job.shutdown()
        first = self.number + 1
        self.number = next((n for n in range(first, len(self.views)) if self.place in self.views[n]), -1)
        if self.number < 0:
            raise Left
        self.steps = 0
        job.init([*self.views[self.number]])
