"""Barriers of a job's workers, as the scheduler counts them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from reigen.cluster.membership.messages import BarrierOver, EnterBarrier

#: Names of barriers in one job, and broken ones of one name that are remembered for those who come late.
MAX_BARRIERS = 1024


@dataclass
class _Barrier:
    """The barriers of one name.

    Attributes:
        entered: how often each worker has.
        num_over: how often all have, or one has given up.
        broken: outcomes of those that were given up, as long as a worker may come to them.
        waiting: by worker: for which of its times it waits for an answer; no empty ones.
    """

    entered: dict[int, int] = field(default_factory=dict)
    num_over: int = 0
    broken: dict[int, BarrierOver] = field(default_factory=dict)
    waiting: dict[int, set[int]] = field(default_factory=dict)


class BarrierTable:
    """Every barrier by its name: it is done for the n-th time when every needed worker has entered it n times.

    Or one of them gives it up before: then it is broken for that time, for all of them.
    """

    def __init__(self) -> None:
        self._barriers: dict[str, _Barrier] = {}
        #: workers that do not want to wait any more, by names
        self._giving_up: dict[tuple[int, str], EnterBarrier] = {}
        #: names for which something has changed since the last `complete`, and who was needed then
        self._changed: set[str] = set()
        self._needed: frozenset[int] = frozenset()

    def accepts(self, worker: int, name: str) -> bool:
        """Return whether the table has a place for a name, and for one more entry of a worker."""
        one = self._barriers.get(name)
        if one is None:
            return len(self._barriers) < MAX_BARRIERS
        return len(one.waiting.get(worker, ())) < MAX_BARRIERS

    def receive(self, worker: int, message: EnterBarrier, needed: Collection[int]) -> None:
        """A worker enters, gives up, or says again how one ended. Answers come from the next `complete`, or a later."""
        name, sequence = message.name, message.sequence
        one = self._named(name)
        if not message.is_over and message.is_abandoned:
            self._giving_up[worker, name] = message
            return
        one.entered[worker] = max(one.entered.get(worker, 0), sequence)
        if not message.is_over:
            one.waiting.setdefault(worker, set()).add(sequence)
        else:
            one.num_over = max(one.num_over, sequence)
            if message.is_abandoned:
                self._break(worker, message, needed)

    def complete(self, needed: Collection[int], *, all_known: bool = True) -> list[tuple[int, BarrierOver]]:
        """Return barriers that are over now and were not announced, each with its worker.

        Args:
            needed: workers without which no barrier is done.
            all_known: it is known of all workers where they are. Otherwise one may have passed a barrier that another
                wants to give up, and nothing is given up.
        """
        outcomes = self._complete(needed)
        if self._giving_up and all_known:
            for (worker, name), message in self._giving_up.items():
                self.receive(worker, EnterBarrier(name, message.sequence), needed)
            outcomes += self._complete(needed)
            for (worker, name), message in self._giving_up.items():
                if message.sequence > self._barriers[name].num_over:
                    self._barriers[name].num_over = message.sequence
                    self._break(worker, message, needed)
            self._giving_up.clear()
            outcomes += self._complete(needed)
        return outcomes

    def _break(self, worker: int, message: EnterBarrier, needed: Collection[int]) -> None:
        name, sequence = message.name, message.sequence
        one = self._named(name)
        one.broken.setdefault(sequence, BarrierOver(name, sequence, worker, self.missing(name, sequence, needed)))
        if len(one.broken) > MAX_BARRIERS:
            del one.broken[min(one.broken)]

    def _complete(self, needed: Collection[int]) -> list[tuple[int, BarrierOver]]:
        outcomes: list[tuple[int, BarrierOver]] = []
        names = self._changed if self._needed == frozenset(needed) else set(self._barriers)
        self._changed, self._needed = set(), frozenset(needed)
        for name in sorted(names) if needed else ():
            one = self._barriers[name]
            lowest = min(one.entered.get(worker, 0) for worker in needed)
            one.num_over = max(one.num_over, lowest)
            for worker in sorted(one.waiting):
                over = sorted(sequence for sequence in one.waiting[worker] if sequence <= one.num_over)
                outcomes += [(worker, one.broken.get(sequence) or BarrierOver(name, sequence)) for sequence in over]
                one.waiting[worker].difference_update(over)
            one.waiting = {worker: sequences for worker, sequences in one.waiting.items() if sequences}
            lowest = min([lowest, *one.entered.values()])  # one that is lost now may come back
            one.broken = {sequence: what for sequence, what in one.broken.items() if sequence >= lowest}
        return outcomes

    def missing(self, name: str, sequence: int, needed: Collection[int]) -> tuple[int, ...]:
        """Return the workers that the barrier waits for, ascending."""
        entered = self._named(name).entered
        return tuple(sorted(worker for worker in needed if entered.get(worker, 0) < sequence))

    def over(self) -> tuple[tuple[str, int], ...]:
        """Return how often each barrier is over, by name."""
        return tuple(sorted((name, one.num_over) for name, one in self._barriers.items() if one.num_over))

    def join(self, worker: int) -> tuple[tuple[str, int], ...]:
        """Add a worker, from the next time of each barrier on that has not begun; returns how often each has."""
        begun = {name: max([one.num_over, *one.entered.values()]) for name, one in self._barriers.items()}
        self.forget(worker)
        for name, sequence in begun.items():
            self._barriers[name].entered[worker] = sequence
        return tuple(sorted((name, sequence) for name, sequence in begun.items() if sequence))

    def forget(self, worker: int) -> None:
        """Forget a worker: it may come for the first time."""
        for one in self._barriers.values():
            one.entered.pop(worker, None)
            one.waiting.pop(worker, None)

    def _named(self, name: str) -> _Barrier:
        self._changed.add(name)
        return self._barriers.setdefault(name, _Barrier())
