"""Leases of samples: which batches of a data set workers train on, and which are done. Pure.

A *plan* cuts the order of the samples, epoch after epoch, into batches, numbered from 0. A *lease* is a batch that a
worker has taken. The states of a batch:

    FREE -> LEASED(process) -> COMMITTED      or FREE again: at the process's death, when it leaves, or gives it back

How each sample is in the values exactly once, whoever dies, and when
---------------------------------------------------------------------
A. The ledger (`SampleLedger`) is on one server, and is saved like all facts of a store: before a lease, or the receipt
   of a commit, leaves the server.
B. Each push that a worker makes during a lease carries the number of the batch. A shard keeps the numbers that are in
   its value (`NumberSet`), saved as one with the value. A push whose number is there is acknowledged and not applied.
C. A worker commits a batch when all pushes of its lease are acknowledged: then every shard has it.
D. Where a process dies before that, the batch is FREE, and another worker trains on it once more. Shards that had got
   the dead worker's push do not apply the other one's (B); those that had not, do. So each shard has each committed
   batch once, although different shards may have it from different workers.
E. Nothing else has to be true. Two live workers with the same batch, a push that comes late, or a commit that is told
   twice do no harm: (B) holds for each shard on its own, and commits are a set. So no process needs to know whether
   another one is dead or just silent.
F. What a shard keeps is short: batches below the `floor`, which are all committed, count as there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from reigen.errors import ArgumentError

#: Batches that a plan may have.
MAX_BATCHES = 1 << 40
#: Worker and incarnation of a process.
Process = tuple[int, int]


def batch_number(plan: int, batch: int) -> int:
    """Return the number of a plan's batch among those of all plans; from 1, as pushes carry it."""
    return plan * MAX_BATCHES + batch + 1


class NumberSet:
    """Set of numbers that are mostly consecutive, as ranges.

    Args:
        ranges: first and last number (exclusive) of each, ascending, with gaps between them.

    Raises:
        ValueError: they are not.

    Example::

        >>> numbers = NumberSet([(0, 3)])
        >>> numbers.add(4), numbers.add(3), 3 in numbers, numbers.ranges()
        (True, True, True, ((0, 5),))
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            if not (self._stops[-1] if self._stops else -1) < start < stop:
                raise ValueError(f"({start}, {stop}) does not follow {self._stops[-1:]}")
            self._starts.append(start)
            self._stops.append(stop)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._stops[place]

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def add(self, number: int) -> bool:
        """Add a number; return whether it was not there."""
        is_new = number not in self
        self.add_range(number, number + 1)
        return is_new

    def add_range(self, start: int, stop: int) -> None:
        """Add all numbers from ``start`` to ``stop`` (exclusive)."""
        if start >= stop:
            return
        first = bisect_right(self._stops, start - 1)  # of the ranges that touch it
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def gaps(self, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the numbers from 0 to ``stop`` (exclusive) that are not there, ascending."""
        begin = 0
        for start, end in zip(self._starts, self._stops, strict=True):
            if start >= stop:
                break
            if begin < start:
                yield begin, start
            begin = end
        if begin < stop:
            yield begin, stop

    @property
    def num_ranges(self) -> int:
        return len(self._starts)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges, for another set."""
        return tuple(zip(self._starts, self._stops, strict=True))


def select_unapplied(batches: Sequence[int], applied: NumberSet) -> list[int]:
    """Return which of several pushes a shard has to apply, by their places (B).

    Args:
        batches: the batch of each, from 1; 0 for a push of no lease.
        applied: those that the shard's value has.
    """
    seen, places = set[int](), []
    for place, batch in enumerate(batches):
        if batch and (batch in seen or batch in applied):
            continue
        seen.add(batch)
        places.append(place)
    return places


class SamplePlan(msgspec.Struct, frozen=True):
    """Meaning of the numbers of batches, the same for all workers.

    Attributes:
        num_samples: of the data set.
        batch_size: samples of a batch; the last one of an epoch may have fewer.
        seed: of the epochs' orders.
        shuffle: False: in the order of the data set.
        drop_last: leave out a last batch that would be shorter.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__)

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def bounds(self, batch: int) -> tuple[int, int, int]:
        """Return the epoch of a batch, and its places in that epoch's order: from, to (exclusive)."""
        epoch, place = divmod(batch, self.batches_per_epoch)
        start = place * self.batch_size
        return epoch, start, min(start + self.batch_size, self.num_samples)


class LedgerState(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """State of a ledger in a snapshot.

    Attributes:
        plan: see `SampleLedger`.
        committed: ranges of batches.
        leased: batch, worker and incarnation of each lease.
    """

    plan: SamplePlan
    committed: tuple[tuple[int, int], ...]
    leased: tuple[tuple[int, int, int], ...]


class SampleLedger:
    """Ledger of one plan.

    Args:
        plan: of the batches.
        num_skipped: batches, from the first one on, that count as committed.
    """

    def __init__(self, plan: SamplePlan, num_skipped: int = 0) -> None:
        self.plan = plan
        self._committed = NumberSet([(0, num_skipped)] if num_skipped else [])
        #: by batch, the process that has it; none is committed
        self._leased: dict[int, Process] = {}

    @classmethod
    def from_state(cls, state: LedgerState) -> SampleLedger:
        """Return the ledger of a restarted server."""
        ledger = cls(state.plan)
        ledger._committed = NumberSet(state.committed)
        ledger._leased = {batch: (worker, incarnation) for batch, worker, incarnation in state.leased}
        return ledger

    def state(self) -> LedgerState:
        """Return the state for a snapshot."""
        leased = tuple((batch, *process) for batch, process in self._leased.items())
        return LedgerState(self.plan, self._committed.ranges(), leased)

    @property
    def floor(self) -> int:
        """Number of batches, from the first one on, that are all committed."""
        return next(self._committed.gaps(MAX_BATCHES))[0]

    def is_over(self, num_batches: int) -> bool:
        """Return whether so many batches, from the first one on, are all committed."""
        return self.floor >= num_batches

    def holders(self) -> tuple[int, ...]:
        """Return the workers that have leases, ascending."""
        return tuple(sorted({worker for worker, _ in self._leased.values()}))

    def commit(self, batch: int) -> bool:
        """Note that a batch is in all shards, by whichever worker; return whether that is news."""
        self._leased.pop(batch, None)
        return self._committed.add(batch)

    def release(self, process: Process) -> bool:
        """Free the leases of a process that is gone or has given them back; return whether it had one."""
        own = [batch for batch, holder in self._leased.items() if holder == process]
        for batch in own:
            del self._leased[batch]
        return bool(own)

    def lease(self, process: Process, num_batches: int) -> int | None:
        """Give a process the first free batch instead of its lease; None: none of the first ``num_batches`` is free.

        A process asks when it has nothing: what the ledger thinks that it has, it was never told.
        """
        self.release(process)
        for start, stop in self._committed.gaps(num_batches):
            for batch in range(start, stop):
                if batch not in self._leased:
                    self._leased[batch] = process
                    return batch
        return None

    def validate(self) -> None:
        """Assert what must hold between two calls."""
        assert not any(batch in self._committed for batch in self._leased), "what is committed is nobody's"
        assert len(set(self._leased.values())) == len(self._leased), "a process has one lease"


class LedgerBook:
    """Ledgers of a store, one for each plan, in the order in which they were begun."""

    def __init__(self, states: Iterable[LedgerState] = ()) -> None:
        self._ledgers = [SampleLedger.from_state(state) for state in states]

    def state(self) -> tuple[LedgerState, ...]:
        """Return the state for a snapshot."""
        return tuple(ledger.state() for ledger in self._ledgers)

    def find(self, plan: SamplePlan, num_skipped: int = 0) -> tuple[int, SampleLedger]:
        """Return the ledger of a plan, and its number; it is begun if there is none.

        Raises:
            ArgumentError: workers have leases of another plan: they would train on the same samples.
        """
        for number, ledger in enumerate(self._ledgers):
            if ledger.plan == plan:
                return number, ledger
            if holders := ledger.holders():
                names = ", ".join(f"worker {worker}" for worker in holders)
                raise ArgumentError(
                    f"samples are leased by {plan}, and {names} lease(s) them by {ledger.plan}: give the same on all "
                    "workers, or begin with others when all batches of these are done"
                )
        self._ledgers.append(SampleLedger(plan, num_skipped))
        return len(self._ledgers) - 1, self._ledgers[-1]

    def release(self, process: Process) -> bool:
        """Free the leases of a process; return whether it had one."""
        released = [ledger.release(process) for ledger in self._ledgers]
        return any(released)
