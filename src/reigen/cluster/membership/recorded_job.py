"""Roster of an elastic job as its scheduler has recorded it, for the scheduler that is started in its place. Pure.

A scheduler appends each event to the record before anybody is told of it (`MembershipTable.announced`), so that the
next one knows at least as much as any member: which process has which place, in which order they have joined, who is
lost and may not come back, whether the job has begun, and whether it is over. What is no event, the members say when
they connect again: where servers are, and how often workers have entered which barriers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from reigen.cluster.membership.messages import (
    JobEnded,
    MemberLeft,
    MemberLost,
    MemberReturned,
    MembershipEvent,
    WorkerRoster,
)

#: Losses of processes whose places others have taken: so many are told again to servers that were away.
MOST_PAST_LOSSES = 256


class RecordedEvent(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Event, the epoch behind it, and of a worker that joins the launcher's number for its place and incarnation."""

    event: MembershipEvent
    epoch: int
    slot: tuple[int, int] | None = None


@dataclass
class RecordedWorker:
    """Latest process of one place.

    Attributes:
        came: its joining.
        joined: the how-manieth process it was that has joined.
        is_recovery: the job had begun then.
        slot: the launcher's number for its place, and how often that was used before.
        loss: why it is lost; None: it is not.
        has_left: it has left in good order.
    """

    came: MemberReturned
    joined: int
    is_recovery: bool
    slot: tuple[int, int] | None = None
    loss: MemberLost | None = None
    has_left: bool = False

    @property
    def is_present(self) -> bool:
        """Return whether it was there at last."""
        return self.loss is None and not self.has_left


@dataclass
class RecordedJob:
    """Job as its record tells.

    Attributes:
        epoch: the latest one.
        workers: by place.
        num_joined: how many have joined.
        latest_uses: by slot (the launcher's number for a place), how often it was used before the latest that joined.
        has_opened: the job has begun.
        has_left_last: the worker that went last has left in good order.
        past_losses: of processes whose places others have, the latest ones.
        stop: the job is over.
    """

    epoch: int = 0
    workers: dict[int, RecordedWorker] = field(default_factory=dict)
    num_joined: int = 0
    latest_uses: dict[int, int] = field(default_factory=dict)
    has_opened: bool = False
    has_left_last: bool = False
    past_losses: list[MemberLost] = field(default_factory=list)
    stop: JobEnded | None = None

    @classmethod
    def replay(cls, entries: Iterable[RecordedEvent]) -> RecordedJob:
        """Return the job behind these events."""
        job = cls()
        for entry in entries:
            job._take(entry)
        return job

    def _take(self, entry: RecordedEvent) -> None:
        event, self.epoch = entry.event, max(self.epoch, entry.epoch)
        if isinstance(event, JobEnded):
            self.stop = event
        elif isinstance(event, WorkerRoster):
            self.has_opened |= event.is_open
        elif event.role != "worker":
            return
        elif isinstance(event, MemberReturned):
            before = self.workers.get(event.number)
            if before is not None and before.loss is not None:
                self.past_losses = [*self.past_losses, before.loss][-MOST_PAST_LOSSES:]
            self.num_joined += 1
            note_use(self.latest_uses, entry.slot)
            self.workers[event.number] = RecordedWorker(event, self.num_joined, self.has_opened, entry.slot)
        elif isinstance(event, MemberLost):
            lost = self.workers[event.number]
            lost.loss = event
            self.has_left_last = self.has_left_last and was_used_since(self.latest_uses, lost.slot)
        elif isinstance(event, MemberLeft):
            self.workers[event.number].has_left = self.has_left_last = True


def note_use(latest_uses: dict[int, int], slot: tuple[int, int] | None) -> None:
    """Note that a process of a slot has joined."""
    if slot is not None:
        latest_uses[slot[0]] = max(slot[1], latest_uses.get(slot[0], 0))


def was_used_since(latest_uses: Mapping[int, int], slot: tuple[int, int] | None) -> bool:
    """Return whether another process of a slot has joined behind one: the launcher has seen the end of that one."""
    return slot is not None and slot[1] < latest_uses.get(slot[0], 0)
