"""Barriers of a job's workers, as the scheduler counts them. Pure."""

from __future__ import annotations

from collections.abc import Collection

#: Names of barriers in one job.
MAX_BARRIERS = 1024


class Barriers:
    """Every barrier by its name: it is done for the n-th time when every needed worker has entered it n times."""

    def __init__(self) -> None:
        #: by name: how often each worker has entered
        self._entered: dict[str, dict[int, int]] = {}
        #: by name: how often it was done
        self._done: dict[str, int] = {}
        #: by name and worker: for which of its times it waits for an answer; no empty ones
        self._waiting: dict[str, dict[int, set[int]]] = {}
        #: names for which something has changed since the last `complete`, and who was needed then
        self._changed: set[str] = set()
        self._needed: frozenset[int] = frozenset()

    def enter(self, name: str, worker: int, sequence: int) -> bool:
        """A worker is there for the ``sequence``-th time; False: there are too many barriers.

        Its answer comes from the next `complete`, or a later one.
        """
        if name not in self._entered and len(self._entered) >= MAX_BARRIERS:
            return False
        entered = self._entered.setdefault(name, {})
        entered[worker] = max(entered.get(worker, 0), sequence)
        self._waiting.setdefault(name, {}).setdefault(worker, set()).add(sequence)
        self._changed.add(name)
        return True

    def complete(self, needed: Collection[int]) -> list[tuple[int, str, int]]:
        """What is done now and was not told: worker, name, and for which time."""
        told = []
        names = self._changed if self._needed == frozenset(needed) else set(self._waiting)
        self._changed, self._needed = set(), frozenset(needed)
        for name in sorted(names & self._waiting.keys()) if needed else ():
            waiting = self._waiting[name]
            done = max(self._done.get(name, 0), min(self._entered[name].get(worker, 0) for worker in needed))
            self._done[name] = done
            for worker in sorted(waiting):
                told += [(worker, name, sequence) for sequence in sorted(waiting[worker]) if sequence <= done]
                waiting[worker] = {sequence for sequence in waiting[worker] if sequence > done}
            left = {worker: sequences for worker, sequences in waiting.items() if sequences}
            if left:
                self._waiting[name] = left
            else:
                del self._waiting[name]
        return told

    def missing(self, name: str, sequence: int, needed: Collection[int]) -> tuple[int, ...]:
        """Whom the barrier waits for, ascending."""
        entered = self._entered.get(name, {})
        return tuple(sorted(worker for worker in needed if entered.get(worker, 0) < sequence))

    def done(self) -> tuple[tuple[str, int], ...]:
        """How often each was done, by name."""
        return tuple(sorted(item for item in self._done.items() if item[1]))

    def forget(self, worker: int) -> None:
        """As if the worker had never come."""
        for name, entered in self._entered.items():
            entered.pop(worker, None)
            self._waiting.get(name, {}).pop(worker, None)
