"""Who of a job is alive, as the control service keeps it: events go in, what to tell whom comes out. No I/O, no clock.

The protocol, beside the one of `cluster.membership.control_service`:

a. A rank opens a connection of its own for the whole job and sends Enter: the *room*, its number in it, where it runs.
   The service answers Entered, and News of what has happened in the room before. What makes no sense is Refused. A room
   is for the ranks of one job (or one life of it) and is never used again.
b. A rank that goes in good order sends Leave. One that cannot go on sends Abort with its reason. Then it may close.
c. A connection that ends before that: the rank has died. One that is *silent* (the kernel got no answer in time): the
   whole machine has gone, or the network to it, and with it every rank there.
d. The service tells everybody in the room: News of Died, Aborted and Left.

Attribution. When a process dies, its peers notice broken connections and give up, and that may be heard here first.
Also the ranks of a machine that crashes do not end at one moment. So a death or an abort is held for a moment. What
was held is then told together: deaths first, one event for each machine, in the order in which machines lost their
first rank; then the first abort; then who left. Nothing is held when a machine has no rank left that could follow.
Only the first abort of a room is told: it ends everybody's waiting, and those that come later follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from reigen.cluster.membership.abort_message import AbortMessage

#: How long what went wrong is held for what went wrong at the same time.
HOLD_SECONDS = 0.25
MAX_GROUPS = 4096
MAX_SIZE = 1 << 16
MAX_NAME_BYTES = 512
MAX_REASON_BYTES = 4096
#: Events in one message.
_MAX_EVENTS = 256


class EnterGroup(msgspec.Struct, tag=7, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank is there from now on, for as long as its connection lasts."""

    request: int
    room: str
    rank: int
    size: int
    host: str
    machine: str


class LeaveGroup(msgspec.Struct, tag=8, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank goes in good order."""


class GroupEntered(msgspec.Struct, tag=10, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to Enter."""

    request: int


class RanksDied(msgspec.Struct, tag="died", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Ranks of one machine ended without a word, at one time.

    Attributes:
        host: of these ranks.
        whole_host: they are more than one, and all that the machine had.
        silent: nothing was heard of the machine for so long that it counts as lost.
    """

    ranks: tuple[int, ...]
    host: str
    whole_host: bool
    silent: bool


class RankAborted(msgspec.Struct, tag="aborted", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank could not go on."""

    rank: int
    host: str
    abort: AbortMessage


class RankLeft(msgspec.Struct, tag="left", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank went in good order."""

    rank: int
    host: str


LivenessEvent = RanksDied | RankAborted | RankLeft


class LivenessUpdate(msgspec.Struct, tag=11, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What has happened, in the order in which to believe it."""

    events: tuple[LivenessEvent, ...]


class RequestRefused(msgspec.Struct, tag=6, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The request cannot be served."""

    request: int
    reason: str


LivenessRequest = EnterGroup | LeaveGroup | AbortMessage
LivenessReply = GroupEntered | LivenessUpdate | RequestRefused
OutgoingReplies = list[tuple[Any, LivenessReply]]


class _MemberState(Enum):
    HERE = auto()
    LEFT = auto()
    ABORTED = auto()
    DIED = auto()


@dataclass
class _GroupMember:
    owner: Any
    host: str
    machine: str
    state: _MemberState = _MemberState.HERE


@dataclass
class _Group:
    """The ranks that have met in one room.

    Attributes:
        size: how many are expected.
        members: who has entered, by rank.
        told: all events, in the order of their telling.
        connected: members that can be told something.
        deaths: held: by machine, its ranks that died.
        silent: machines among these that are silent.
        abort: held.
        has_aborted: some rank has given up; it was told, or is held.
        lefts: held.
        until: when what is held is told; None: nothing is.
    """

    size: int
    members: dict[int, _GroupMember] = field(default_factory=dict)
    told: list[LivenessEvent] = field(default_factory=list)
    connected: dict[Any, int] = field(default_factory=dict)
    deaths: dict[str, list[int]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    abort: RankAborted | None = None
    has_aborted: bool = False
    lefts: list[RankLeft] = field(default_factory=list)
    until: float | None = None

    def on_machine(self, machine: str) -> Iterator[tuple[int, _GroupMember]]:
        """The members of one machine."""
        return ((rank, member) for rank, member in self.members.items() if member.machine == machine)

    def hold(self, now: float) -> None:
        """Something went wrong: wait for more of it."""
        if self.until is None:
            self.until = now + HOLD_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether what is held must be told now."""
        if self.until is None:
            return False
        followers = (m for machine in self.deaths for _, m in self.on_machine(machine) if m.state is _MemberState.HERE)
        return now >= self.until or (bool(self.deaths) and next(followers, None) is None)

    def release(self) -> list[LivenessEvent]:
        """What was held, in order; nothing is held any more."""
        events: list[LivenessEvent] = []
        for machine, ranks in self.deaths.items():
            everybody = dict(self.on_machine(machine))
            whole = len(ranks) > 1 and len(ranks) == len(everybody)
            events.append(RanksDied(tuple(sorted(ranks)), everybody[ranks[0]].host, whole, machine in self.silent))
        events += [] if self.abort is None else [self.abort]
        events += self.lefts
        self.deaths, self.silent, self.abort, self.lefts, self.until = {}, set(), None, [], None
        return events


class LivenessTable:
    """All rooms of a job. An owner is whatever names a connection; times are of any steady clock, in seconds."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Group] = {}
        self._room_of: dict[Any, _Group] = {}

    def handle(self, owner: Any, message: LivenessRequest, now: float) -> OutgoingReplies:
        """Take one message of a rank; returns who is to be told what, in this order."""
        if isinstance(message, EnterGroup):
            return self._enter(owner, message)
        room = self._room_of.get(owner)
        if room is None:
            return []
        rank = room.connected[owner]
        member = room.members[rank]
        if member.state is not _MemberState.HERE:
            return []
        if isinstance(message, LeaveGroup):
            member.state = _MemberState.LEFT
            room.lefts.append(RankLeft(rank, member.host))
            if room.until is None:
                return self._tell(room)
        else:
            member.state = _MemberState.ABORTED
            if not room.has_aborted:
                room.abort, room.has_aborted = RankAborted(rank, member.host, _truncate_abort(message)), True
                room.hold(now)
        return self._tell_if_due(room, now)

    def lost(self, owner: Any, now: float, *, silent: bool = False) -> OutgoingReplies:
        """A connection has ended; ``silent``: because nothing was heard of the machine any more."""
        room = self._room_of.pop(owner, None)
        if room is None:
            return []
        rank = room.connected.pop(owner)
        member = room.members[rank]
        if member.state is not _MemberState.HERE:
            return []
        for each, gone in list(room.on_machine(member.machine)) if silent else [(rank, member)]:
            if gone.state is _MemberState.HERE:
                gone.state = _MemberState.DIED
                room.deaths.setdefault(member.machine, []).append(each)
        if silent:
            room.silent.add(member.machine)
        room.hold(now)
        return self._tell_if_due(room, now)

    def due(self) -> float | None:
        """When to call `tick`; None: something else must happen first."""
        return min((room.until for room in self._rooms.values() if room.until is not None), default=None)

    def tick(self, now: float) -> OutgoingReplies:
        """Time has passed; returns who is to be told what."""
        told: OutgoingReplies = []
        for room in self._rooms.values():
            told += self._tell_if_due(room, now)
        return told

    def flush(self) -> OutgoingReplies:
        """The service ends: tell now what is held."""
        return [told for room in self._rooms.values() if room.until is not None for told in self._tell(room)]

    def validate(self) -> None:
        """Assert what must hold between two events."""
        for room in self._rooms.values():
            assert (room.until is not None) == bool(room.deaths or room.lefts or room.abort)
            assert all(0 <= rank < room.size for rank in room.members)
            said = [rank for event in room.told if isinstance(event, RanksDied) for rank in event.ranks]
            said += [event.rank for event in room.told if isinstance(event, RankLeft)]
            assert len(set(said)) == len(said), "nobody ends twice"
            for owner, rank in room.connected.items():
                assert self._room_of[owner] is room
                assert room.members[rank].owner == owner

    def _enter(self, owner: Any, message: EnterGroup) -> OutgoingReplies:
        problem = self._problem(owner, message)
        if problem:
            return [(owner, RequestRefused(message.request, problem))]
        if message.room not in self._rooms:
            self._make_space()
        room = self._rooms.setdefault(message.room, _Group(message.size))
        room.members[message.rank] = _GroupMember(owner, message.host, message.machine)
        room.connected[owner] = message.rank
        self._room_of[owner] = room
        return [
            (owner, GroupEntered(message.request)),
            *((owner, LivenessUpdate(events)) for events in _split_events(room.told)),
        ]

    def _problem(self, owner: Any, message: EnterGroup) -> str:
        names = (message.room, message.host, message.machine)
        room = self._rooms.get(message.room)
        if max(len(name.encode()) for name in names) > MAX_NAME_BYTES:
            return f"a name is longer than {MAX_NAME_BYTES} bytes"
        if not 0 <= message.rank < message.size <= MAX_SIZE:
            return f"there is no rank {message.rank} among {message.size}"
        if owner in self._room_of:
            return "this connection has entered a room before"
        if room is None:
            full = len(self._rooms) >= MAX_GROUPS and all(each.connected for each in self._rooms.values())
            return f"there are {MAX_GROUPS} rooms already" if full else ""
        if room.size != message.size:
            return f"this rank counts {message.size} ranks, others {room.size}"
        if message.rank in room.members:
            return f"rank {message.rank} (host {room.members[message.rank].host}) has been here before"
        return ""

    def _make_space(self) -> None:
        """Forget the oldest room that nobody is in any more, if there are too many."""
        if len(self._rooms) >= MAX_GROUPS:
            del self._rooms[next(name for name, room in self._rooms.items() if not room.connected)]

    def _tell_if_due(self, room: _Group, now: float) -> OutgoingReplies:
        return self._tell(room) if room.is_due(now) else []

    def _tell(self, room: _Group) -> OutgoingReplies:
        events = room.release()
        room.told += events
        listeners = [
            owner for owner, rank in room.connected.items() if room.members[rank].state is not _MemberState.LEFT
        ]
        return [(owner, LivenessUpdate(portion)) for owner in listeners for portion in _split_events(events)]


def _truncate_abort(abort: AbortMessage) -> AbortMessage:
    reason = abort.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    return msgspec.structs.replace(abort, reason=reason, kind=abort.kind[:64], ranks=abort.ranks[:MAX_SIZE])


def _split_events(events: list[LivenessEvent]) -> Iterator[tuple[LivenessEvent, ...]]:
    return (tuple(events[start : start + _MAX_EVENTS]) for start in range(0, len(events), _MAX_EVENTS))
