"""Leases of samples on a server, by COMMAND (`reigen.kv.consistency.sample_leases`).

============== ====================================================== =================================================
command        arguments                                              answer
============== ====================================================== =================================================
lease_samples  plan: of a `SamplePlan`; skips, stop: number of        [state, batch, floor, plan]: ``leased``, and the
               batches; commits: a batch or None; waits: bool         batch; ``wait``; or ``over``: all are committed
return_samples                                                        None; what the worker has is free
sample_floor   plan: its number; floor: number of batches             None; at all servers: shards may forget these
rejoin_rounds                                                         None; at all servers: the worker is expected again
============== ====================================================== =================================================

All are answered at once, but for ``lease_samples`` with ``waits``: that waits until a batch is free, or all are
committed. A worker that asks has no lease, so that asking again after a broken connection does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from reigen.errors import ArgumentError, DeadlineError, PeerLostError
from reigen.kv.consistency.sample_leases import (
    MAX_BATCHES,
    LedgerBook,
    LedgerState,
    NumberSet,
    Process,
    SampleLedger,
    SamplePlan,
    batch_number,
)
from reigen.kv.protocol import RESULT_CODEC, CommandResult, MessageKind, StoreCommand
from reigen.kv.server.requests import WorkerRequest
from reigen.kv.server.stalls import WaitingWorker

_WHAT = "leases of samples"


class LeasingStore(Protocol):
    """Interface of the store whose workers lease samples.

    Attributes:
        must_save: what was decided belongs into the next snapshot; no answer leaves before.
        left: workers that are not expected in rounds.
        losses: workers that are lost, and why.
    """

    must_save: bool
    left: set[int]
    losses: dict[int, str]


class _LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of ``lease_samples``."""

    plan: SamplePlan
    skips: int
    stop: int
    commits: int | None
    waits: bool

    def check(self) -> None:
        """Raise ArgumentError if they make no sense."""
        last = max(self.skips, self.stop, -1 if self.commits is None else self.commits)
        if min(self.skips, self.stop, self.commits or 0) < 0 or last >= MAX_BATCHES:
            raise ArgumentError(f"batches {self.skips} to {self.stop}, of which {self.commits} is committed")
        if min(self.plan.num_samples, self.plan.batch_size, self.plan.batches_per_epoch) < 1:
            raise ArgumentError(f"no batches: {self.plan}")


@dataclass
class _Waiting:
    """A worker that waits for a batch."""

    request: WorkerRequest
    number: int
    ledger: SampleLedger
    stop: int


@dataclass
class StoreLeases:
    """Leases of a store's samples, and the batches that its shards need not remember."""

    store: LeasingStore
    _book: LedgerBook = field(default_factory=LedgerBook)
    #: batches of all plans that every shard has, or does not need any more
    _committed: NumberSet = field(default_factory=NumberSet)
    _waiting: list[_Waiting] = field(default_factory=list)

    def commands(self) -> dict[str, Callable[[WorkerRequest, StoreCommand], None]]:
        """Return the function of each command, whose errors are for this worker alone."""
        return {
            "lease_samples": self._lease,
            "return_samples": self._give_back,
            "sample_floor": self._raise_floor,
            "rejoin_rounds": self._rejoin,
        }

    def release(self, process: Process) -> None:
        """Free the leases of a process that is gone."""
        self._waiting = [one for one in self._waiting if process_of(one.request) != process]
        if self._book.release(process):
            self.store.must_save = True
            self._settle()

    def compact(self, applied: NumberSet) -> None:
        """Have a shard's batches include those that all shards have."""
        for start, stop in self._committed.ranges():
            applied.add_range(start, stop)

    def expire(self, before: float) -> None:
        """Answer requests that have waited since ``before`` with an error that names the workers with leases."""
        late = [one for one in self._waiting if one.request.since < before]
        self._waiting = [one for one in self._waiting if one not in late]
        for one in late:
            holders = one.ledger.holders()
            names = ", ".join(f"worker {worker}" for worker in holders)
            error = DeadlineError(f"{_WHAT}: none is free; those of {names} are not committed", ranks=holders)
            one.request.connection.refuse(one.request, error)

    def waiting(self) -> Iterator[WaitingWorker]:
        """Yield the workers that wait for a batch, with those that have some."""
        for one in self._waiting:
            if one.request.connection.is_open:
                yield WaitingWorker(_WHAT, one.request.connection.worker, one.ledger.holders(), one.request.since)

    def state(self) -> tuple[LedgerState, ...]:
        """Return the ledgers for a snapshot."""
        return self._book.state()

    def restore(self, states: Sequence[LedgerState]) -> None:
        """Take over the ledgers of `state`."""
        self._book = LedgerBook(states)

    def _lease(self, request: WorkerRequest, command: StoreCommand) -> None:
        try:
            asked = msgspec.convert(command.arguments, _LeaseRequest)
        except msgspec.ValidationError as error:
            raise ArgumentError(f"lease_samples: {error}") from None
        asked.check()
        if (worker := request.connection.worker) in self.store.losses:  # its last words, of which it hears nothing
            raise PeerLostError(f"worker {worker} was given up as lost", ranks=(worker,))
        number, ledger = self._book.find(asked.plan, asked.skips)
        ledger.release(process_of(request))  # before others are given something
        if asked.commits is not None:
            ledger.commit(asked.commits)
        self.store.must_save = True
        one = _Waiting(request, number, ledger, asked.stop)
        self._settle()
        if not self._grant(one):
            if asked.waits:
                self._waiting.append(one)
            else:
                answer(request, ["wait", 0, ledger.floor, number])

    def _settle(self) -> None:
        """Answer those that have waited long enough, in the order of their coming."""
        self._waiting = [one for one in self._waiting if one.request.connection.is_open and not self._grant(one)]

    def _grant(self, one: _Waiting) -> bool:
        """Answer a worker if there is a batch for it, or will be none; return whether."""
        ledger = one.ledger
        batch = ledger.lease(process_of(one.request), one.stop)
        if batch is None and not ledger.is_over(one.stop):
            return False
        self.store.must_save = True
        answer(one.request, ["over" if batch is None else "leased", batch or 0, ledger.floor, one.number])
        return True

    def _give_back(self, request: WorkerRequest, _: StoreCommand) -> None:
        self.release(process_of(request))
        answer(request, None)

    def _raise_floor(self, request: WorkerRequest, command: StoreCommand) -> None:
        plan, floor = command.arguments.get("plan"), command.arguments.get("floor")
        if not isinstance(plan, int) or not isinstance(floor, int) or plan < 0 or not 0 <= floor < MAX_BATCHES:
            raise ArgumentError(f"sample_floor of a plan {plan!r:.20} and {floor!r:.20} batches")
        begin = batch_number(plan, 0)
        self._committed.add_range(begin, begin + floor)
        answer(request, None)

    def _rejoin(self, request: WorkerRequest, _: StoreCommand) -> None:
        self.store.left.discard(request.connection.worker)
        self.store.must_save = True
        answer(request, None)


def process_of(request: WorkerRequest) -> Process:
    """Return the process that has sent a request."""
    return request.connection.worker, request.connection.hello.incarnation


def answer(request: WorkerRequest, value: Any) -> None:
    """Answer a COMMAND."""
    request.connection.answer(request, MessageKind.DONE, RESULT_CODEC.encode(CommandResult(value)))
