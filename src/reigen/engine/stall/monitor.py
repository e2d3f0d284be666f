"""Stalls in a running job: rank 0 inspects, every rank answers where it is.

All of it travels as notes (`Topic.STACKS`), which the thread that drives the engine reads, also while it waits inside
of a collective. A rank that computes has its engine's thread parked; a note wakes it.

a. Rank 0 knows what waits in negotiation. What waits in the middle of moving data is known to those that wait there:
   the lowest of them tells rank 0 (`_RunningStalled`), and tells when it goes on (`_RunningResumed`).
b. Rank 0 asks (`_StackRequest`) all ranks, those that are named answer (`_StackReply`).
c. Rank 1 asks rank 0 whether it is there (`_Ping`), which answers (`_Pong`). Only one rank does: one warning is enough.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

import msgspec

from reigen.engine.control_tree import describe_relays
from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import Operation, Topic
from reigen.engine.stall import report
from reigen.engine.stall.inspector import (
    AbortStalled,
    CoordinatorAction,
    CoordinatorMonitor,
    PendingCollective,
    QueryRanks,
    Stall,
    StallInspector,
    StallResolved,
    WarnStall,
    name_ranks,
)
from reigen.engine.stall.stack_sampler import StackSample, process_state, sample_stack
from reigen.errors import DeadlineError

_log = logging.getLogger(__name__)


class _StackRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    ranks: tuple[int, ...]


class _StackReply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int
    sample: StackSample


class _RunningStalled(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """In the middle of a collective for so long, with these ranks missing."""

    name: str
    kind: str
    process_set: int
    seconds: float
    ready: tuple[int, ...]
    missing: tuple[int, ...]


class _RunningResumed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Not stuck any more."""


class _Ping(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Question whether rank 0 is there."""


class _Pong(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Answer that rank 0 is there."""


_Message = _StackRequest | _StackReply | _RunningStalled | _RunningResumed | _Ping | _Pong
_DECODER = msgspec.msgpack.Decoder(_Message)


@dataclass(frozen=True, slots=True)
class MonitoredRank:
    """The rank on which a `StallMonitor` sits.

    Attributes:
        rank: its number.
        pids: process ids by rank, of the ranks of this host.
        post: sends a note.
        outstanding: names of the collectives that are not complete here.
        waiting: code of the method in which threads wait for a handle.
        coordinator: on rank 0.
    """

    rank: int
    pids: Mapping[int, int]
    post: Callable[[Topic, bytes], None]
    outstanding: Callable[[], list[str]]
    waiting: CodeType
    coordinator: Coordinator | None


class StallMonitor:
    """One rank's part. All methods are for the thread that drives the engine.

    Args:
        monitored_rank: the rank.
        check_seconds: how long a collective may wait before rank 0 warns of it.
        shutdown_seconds: how long before rank 0 ends the job; 0 for never.
        deadline_seconds: how long at all.
    """

    def __init__(
        self, monitored_rank: MonitoredRank, check_seconds: float, shutdown_seconds: float, deadline_seconds: float
    ) -> None:
        self._monitored_rank = monitored_rank
        self._check = min(check_seconds, shutdown_seconds or check_seconds)
        #: the thread that made this, which called init(): it is the one that trains
        self._thread = threading.get_ident()
        ranks = () if monitored_rank.coordinator is None else monitored_rank.coordinator.process_sets[0]
        #: on rank 0: its ``next_look`` is when `look` wants to be called
        self.inspector = StallInspector(check_seconds, shutdown_seconds, deadline_seconds, ranks)
        self._coordinator_check = CoordinatorMonitor(check_seconds, shutdown_seconds)
        #: stuck in the middle of a collective: by the rank that reported it
        self._stuck: dict[int, PendingCollective] = {}
        #: what this rank has reported of itself
        self._reported: _RunningStalled | None = None
        self._running = ""
        #: `ranks_missing` was called, and `resumed` not yet
        self.is_stalled = False

    def due(self) -> float:
        """Return when `look` has something to do, at the latest, if no event comes."""
        coordinator = self._monitored_rank.coordinator
        if coordinator is None:
            return math.inf
        return self.inspector.due(0.0 if self._stuck else coordinator.oldest_wait())

    def look(self, now: float) -> DeadlineError | None:
        """On rank 0: ask, warn. Returns the error with which the job is to end, if it is."""
        coordinator = self._monitored_rank.coordinator
        if coordinator is None:
            return None
        waits = [*coordinator.waits(), *self._stuck.values()]
        for instruction in self.inspector.look(waits, now):
            match instruction:
                case QueryRanks(number, ranks):
                    self._post(_StackRequest(number, ranks))
                    if self._monitored_rank.rank in ranks:
                        self.inspector.answered(self._monitored_rank.rank, number, self._here())
                case WarnStall(stall):
                    _log.warning("%s", self._format(stall, coordinator))
                case StallResolved(over, moment):
                    _log.warning("%s", report.format_resolved(over, moment))
                case AbortStalled(stall):
                    states = self._states(stall.silent)
                    _log.error("%s", self._format(stall, coordinator))
                    return report.stall_error(stall, states)
        return None

    def check_coordinator(self, name: str, since: float, now: float) -> DeadlineError | None:
        """On rank 1, which waits in ``name``: is rank 0 there? Returns the error with which to give up, or None."""
        if self._monitored_rank.rank != 1:
            return None
        match self._coordinator_check.look(since, now):
            case CoordinatorAction.ASK:
                self._post(_Ping())
            case CoordinatorAction.WARN:
                _log.warning("%s", report.format_coordinator_silence(name, now - since, self._states([0])))
            case CoordinatorAction.GIVE_UP:
                return DeadlineError(
                    report.format_coordinator_silence(name, now - since, self._states([0])), ranks=(0,)
                )
        return None

    def receive(self, sender: int, data: bytes) -> None:
        """A note has come. Some come twice."""
        match _DECODER.decode(data):
            case _StackRequest(number, ranks):
                if self._monitored_rank.rank in ranks:
                    self._post(_StackReply(number, self._here()))
            case _StackReply(number, answer):
                self.inspector.answered(sender, number, answer)
            case _RunningStalled(name, kind, process_set, seconds, ready, missing):
                since = time.monotonic() - seconds
                self._stuck[sender] = PendingCollective(name, kind, process_set, since, ready, missing, is_running=True)
            case _RunningResumed():
                self._stuck.pop(sender, None)
            case _Ping():
                self._post(_Pong())
            case _Pong():
                if self._coordinator_check.answered(time.monotonic()):
                    _log.warning("Stall over: rank 0 answers.")

    def ranks_missing(
        self, operation: Operation, since: float, ready: tuple[int, ...], missing: tuple[int, ...]
    ) -> None:
        """Take in that this rank, as ``ready``, waits for ``missing`` in a collective; called now and then."""
        self.is_stalled = True
        kind = operation.kind.name.lower()
        self._running = f"{kind} {operation.name}, for whose data {name_ranks(missing)} did not come yet"
        seconds = time.monotonic() - since
        if seconds < self._check or self._monitored_rank.rank != min(ready):
            return
        if self._reported is not None and self._reported.missing == missing:
            return
        self._reported = _RunningStalled(operation.name, kind, operation.process_set, seconds, ready, missing)
        if self._monitored_rank.coordinator is None:
            self._post(self._reported)
        else:
            self._stuck[self._monitored_rank.rank] = PendingCollective(
                operation.name, kind, operation.process_set, since, ready, missing, is_running=True
            )

    def resumed(self) -> None:
        """Take in that the collective that was given to `ranks_missing` is over."""
        self._running, self.is_stalled = "", False
        if self._reported is None:
            return
        self._reported = None
        if self._monitored_rank.coordinator is None:
            self._post(_RunningResumed())
        else:
            self._stuck.pop(self._monitored_rank.rank, None)

    def _post(self, message: _Message) -> None:
        self._monitored_rank.post(Topic.STACKS, msgspec.msgpack.encode(message))

    def _here(self) -> StackSample:
        return sample_stack(
            self._thread, self._monitored_rank.waiting, self._monitored_rank.outstanding(), self._running
        )

    def _format(self, stall: Stall, coordinator: Coordinator) -> str:
        relays = describe_relays(coordinator.tree, stall.silent)
        return report.format_stall(stall, coordinator.process_sets, self._states(stall.silent), relays)

    def _states(self, ranks: Sequence[int]) -> dict[int, str]:
        pids = self._monitored_rank.pids
        return {rank: process_state(pids[rank]) for rank in ranks if rank in pids}
