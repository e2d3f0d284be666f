"""State machine of a relay: reports of the ranks below it become few. Pure; where relays stand: `control_tree`.

The protocol is that of `reigen.engine.coordinator`; this is between ranks and coordinator, and neither sees it.

a. Announcements pass a relay on their way down, unchanged, before those below it read them. So it knows the names and
   process sets of slots, the sets' ranks, and who has been answered.
b. What ranks report under a name, by slot or in full, is kept until all ranks below the relay that take part have
   reported it. Then it leaves as `MergedReports`: one report for all that say the same. Those that have joined are
   not waited for.
c. What is kept for `HOLD_SECONDS` leaves as it is: the coordinator has to know who is missing. From then on until the
   name is answered, nobody waits for those ranks again: the last rank's report leaves at once.
d. Reports under different names may overtake each other; nothing in the protocol depends on their order. JOIN,
   `ShutdownRequest` and pieces of long messages do not overtake anything: what their sender has said before leaves
   first.
e. A hit of a slot that is not known, and what is reported in a set that is not known, is not kept. What is kept for a
   slot leaves before the relay lets pass that the slot was evicted: for the coordinator it has crossed that on its way,
   as it has for the ranks (step E there).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from reigen.engine.messages import (
    JOIN_NAME,
    Announcement,
    CacheEviction,
    ErrorResponse,
    ForwardedMessage,
    JobAbort,
    MergedReports,
    MessageFragment,
    Note,
    OperationKind,
    RankShutdown,
    Report,
    Response,
    ResponseList,
    ShutdownRequest,
    SubmitRequest,
)
from reigen.engine.rank_masks import from_bytes, lowest_rank, to_bytes, to_mask

#: How long a report waits for those of other ranks.
HOLD_SECONDS = 0.1

_Kept = int | SubmitRequest
_Merged = int | SubmitRequest | ShutdownRequest


class _HeldName(msgspec.Struct):
    """Reports under one name; ranks are masks."""

    since: float
    process_set: int
    ranks: int = 0
    reports: dict[_Kept, int] = {}


class ReportMerger:
    """Reports of a relay and of the ranks below it.

    Args:
        size: of the job.
        subtree: the relay and the ranks below it, as a mask.
    """

    def __init__(self, size: int, subtree: int) -> None:
        self._subtree = subtree
        #: ranks of process sets, by number
        self._sets = {0: (1 << size) - 1}
        #: ranks of sets that are being made, and numbers of those that are being removed, by the operation's name
        self._changing: dict[str, int] = {}
        self._removing: dict[str, int] = {}
        #: name and process set of each slot, and the slots by name
        self._slots: dict[int, tuple[str, int]] = {}
        self._slot_of: dict[str, int] = {}
        self._joined = 0
        #: by name; oldest first
        self._held: dict[str, _HeldName] = {}
        #: ranks whose report has left before those of others (step c), by name
        self._sent: dict[str, int] = {}
        self._outgoing: list[tuple[int, _Merged] | ForwardedMessage] = []
        self._closed = False

    def receive(self, ranks: int, reports: Iterable[Report], now: float) -> None:
        """Take in reports that are the same from all of these ranks, or those of a relay."""
        for report in reports:
            if self._closed:
                return
            if isinstance(report, int):
                name, process_set = self._slots.get(report, ("", -1))
                self._keep(name, process_set, report, ranks, now)
            elif isinstance(report, SubmitRequest):
                self._receive_in_full(report, ranks, now)
            elif isinstance(report, MergedReports):
                self.receive(from_bytes(report.first, report.ranks), report.reports, now)
            elif isinstance(report, ShutdownRequest):
                self._release_of(ranks)
                self._outgoing.append((ranks, report))
            elif isinstance(report, ForwardedMessage):
                self._forward(report)
            else:
                self._forward(ForwardedMessage(lowest_rank(ranks), report))

    def follow(self, announcements: Iterable[Announcement]) -> None:
        """Take in announcements, before they are passed on (step a)."""
        for announcement in announcements:
            if isinstance(announcement, ResponseList):
                for batch in announcement.batches:
                    for item in batch:
                        self._answered(item)
            elif isinstance(announcement, ErrorResponse):
                self._sent.pop(announcement.name, None)
                self._changing.pop(announcement.name, None)
                self._removing.pop(announcement.name, None)
            elif isinstance(announcement, CacheEviction):
                self._evict(announcement.slots)
            elif isinstance(announcement, RankShutdown | JobAbort):
                self._closed = True
                self._held.clear()
                self._outgoing.clear()

    def take(self, now: float) -> list[Report]:
        """Return the reports that are to be sent now."""
        while self._held:
            name, first = next(iter(self._held.items()))
            if now < first.since + HOLD_SECONDS:
                break
            self._release(name)
        outgoing, self._outgoing = self._outgoing, []
        messages: list[Report] = []
        reports: list[_Merged] = []
        for index, item in enumerate(outgoing):
            if isinstance(item, ForwardedMessage):
                messages.append(item)
                continue
            ranks, report = item
            reports.append(report)
            following = outgoing[index + 1] if index + 1 < len(outgoing) else None
            if not isinstance(following, tuple) or following[0] != ranks:
                messages.append(MergedReports(*to_bytes(ranks), tuple(reports)))
                reports = []
        return messages

    def next_release(self) -> float | None:
        """Return when to call `take` at the latest, if no report comes; None: nothing is kept."""
        for held in self._held.values():
            return held.since + HOLD_SECONDS
        return None

    def _receive_in_full(self, report: SubmitRequest, ranks: int, now: float) -> None:
        operation = report.operation
        if operation.kind is OperationKind.JOIN:
            self._release_of(ranks)
            self._outgoing.append((ranks, report))
            self._joined |= ranks
            for name in list(self._held):  # they are not waited for any more
                self._release_if_complete(name)
            return
        if operation.kind is OperationKind.ADD_SET:
            self._changing[operation.name] = to_mask(operation.shape)
        elif operation.kind is OperationKind.REMOVE_SET:
            self._removing[operation.name] = operation.shape[0] if operation.shape else 0
        self._keep(operation.name, operation.process_set, report, ranks, now)

    def _keep(self, name: str, process_set: int, report: _Kept, ranks: int, now: float) -> None:
        if process_set not in self._sets:  # step e
            self._outgoing.append((ranks, report))
            return
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _HeldName(now, process_set)
        held.ranks |= ranks
        held.reports[report] = held.reports.get(report, 0) | ranks
        self._release_if_complete(name)

    def _release_if_complete(self, name: str) -> None:
        held = self._held[name]
        expected = self._subtree & self._sets.get(held.process_set, 0) & ~self._joined
        if not expected & ~held.ranks & ~self._sent.get(name, 0):
            self._release(name)
            del self._sent[name]

    def _release(self, name: str) -> None:
        held = self._held.pop(name)
        self._outgoing += [(ranks, report) for report, ranks in held.reports.items()]
        self._sent[name] = self._sent.get(name, 0) | held.ranks

    def _release_of(self, ranks: int) -> None:
        """Have all leave that these ranks have reported (step d)."""
        for name in [name for name, held in self._held.items() if held.ranks & ranks]:
            self._release(name)

    def _forward(self, message: ForwardedMessage) -> None:
        if isinstance(message.message, MessageFragment):
            self._release_of(1 << message.rank)
        assert isinstance(message.message, MessageFragment | Note)
        self._outgoing.append(message)

    def _answered(self, item: int | Response) -> None:
        if isinstance(item, int):
            if item in self._slots:
                self._sent.pop(self._slots[item][0], None)
            return
        self._sent.pop(item.name, None)
        if item.name == JOIN_NAME:
            self._joined = 0
        elif (members := self._changing.pop(item.name, None)) is not None:
            self._sets[item.value] = members
        elif (number := self._removing.pop(item.name, None)) is not None:
            self._sets.pop(number, None)
        if item.slot >= 0:
            old = self._slot_of.get(item.name)
            if old is not None:
                del self._slots[old]
            self._slot_of[item.name], self._slots[item.slot] = item.slot, (item.name, item.process_set)

    def _evict(self, slots: Sequence[int]) -> None:
        """Step e."""
        for slot in slots:
            name, _ = self._slots.pop(slot, ("", 0))
            if self._slot_of.pop(name, None) is None:
                continue
            held = self._held.get(name)
            if held is not None and slot in held.reports:
                self._release(name)
            self._sent.pop(name, None)

    def validate_state(self) -> None:
        """Check the invariants; for tests."""
        assert not any(held.ranks & self._sent.get(name, 0) for name, held in self._held.items())
        assert self._slot_of == {name: slot for slot, (name, _) in self._slots.items()}
        assert all(held.ranks and not held.ranks & ~self._subtree for held in self._held.values())
        assert all(held.process_set in self._sets or held.ranks for held in self._held.values())
        assert list(self._held.values()) == sorted(self._held.values(), key=lambda held: held.since)
