"""Who of a job is alive, as the control service keeps it: events go in, what to tell whom comes out. No I/O, no clock.

The protocol, beside the one of `cluster.service`:

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

from reigen.cluster.told import Abort

#: How long what went wrong is held for what went wrong at the same time.
HOLD_SECONDS = 0.25
MAX_ROOMS = 4096
MAX_SIZE = 1 << 16
MAX_NAME_BYTES = 512
MAX_REASON_BYTES = 4096
#: Events in one message.
_PORTION = 256


class Enter(msgspec.Struct, tag=7, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank is there from now on, for as long as its connection lasts."""

    request: int
    room: str
    rank: int
    size: int
    host: str
    machine: str


class Leave(msgspec.Struct, tag=8, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank goes in good order."""


class Entered(msgspec.Struct, tag=10, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to Enter."""

    request: int


class Died(msgspec.Struct, tag="died", array_like=True, frozen=True, forbid_unknown_fields=True):
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


class Aborted(msgspec.Struct, tag="aborted", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank could not go on."""

    rank: int
    host: str
    abort: Abort


class Left(msgspec.Struct, tag="left", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A rank went in good order."""

    rank: int
    host: str


Event = Died | Aborted | Left


class News(msgspec.Struct, tag=11, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What has happened, in the order in which to believe it."""

    events: tuple[Event, ...]


class Refused(msgspec.Struct, tag=6, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The request cannot be served."""

    request: int
    reason: str


Call = Enter | Leave | Abort
Answer = Entered | News | Refused
Instructions = list[tuple[Any, Answer]]


class _State(Enum):
    HERE = auto()
    LEFT = auto()
    ABORTED = auto()
    DIED = auto()


@dataclass
class _Member:
    owner: Any
    host: str
    machine: str
    state: _State = _State.HERE


@dataclass
class _Room:
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
    members: dict[int, _Member] = field(default_factory=dict)
    told: list[Event] = field(default_factory=list)
    connected: dict[Any, int] = field(default_factory=dict)
    deaths: dict[str, list[int]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    abort: Aborted | None = None
    has_aborted: bool = False
    lefts: list[Left] = field(default_factory=list)
    until: float | None = None

    def on_machine(self, machine: str) -> Iterator[tuple[int, _Member]]:
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
        followers = (m for machine in self.deaths for _, m in self.on_machine(machine) if m.state is _State.HERE)
        return now >= self.until or (bool(self.deaths) and next(followers, None) is None)

    def release(self) -> list[Event]:
        """What was held, in order; nothing is held any more."""
        events: list[Event] = []
        for machine, ranks in self.deaths.items():
            everybody = dict(self.on_machine(machine))
            whole = len(ranks) > 1 and len(ranks) == len(everybody)
            events.append(Died(tuple(sorted(ranks)), everybody[ranks[0]].host, whole, machine in self.silent))
        events += [] if self.abort is None else [self.abort]
        events += self.lefts
        self.deaths, self.silent, self.abort, self.lefts, self.until = {}, set(), None, [], None
        return events


class Roll:
    """All rooms of a job. An owner is whatever names a connection; times are of any steady clock, in seconds."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}
        self._room_of: dict[Any, _Room] = {}

    def handle(self, owner: Any, message: Call, now: float) -> Instructions:
        """Take one message of a rank; returns who is to be told what, in this order."""
        if isinstance(message, Enter):
            return self._enter(owner, message)
        room = self._room_of.get(owner)
        if room is None:
            return []
        rank = room.connected[owner]
        member = room.members[rank]
        if member.state is not _State.HERE:
            return []
        if isinstance(message, Leave):
            member.state = _State.LEFT
            room.lefts.append(Left(rank, member.host))
            if room.until is None:
                return self._tell(room)
        else:
            member.state = _State.ABORTED
            if not room.has_aborted:
                room.abort, room.has_aborted = Aborted(rank, member.host, _bounded(message)), True
                room.hold(now)
        return self._tell_if_due(room, now)

    def lost(self, owner: Any, now: float, *, silent: bool = False) -> Instructions:
        """A connection has ended; ``silent``: because nothing was heard of the machine any more."""
        room = self._room_of.pop(owner, None)
        if room is None:
            return []
        rank = room.connected.pop(owner)
        member = room.members[rank]
        if member.state is not _State.HERE:
            return []
        for each, gone in list(room.on_machine(member.machine)) if silent else [(rank, member)]:
            if gone.state is _State.HERE:
                gone.state = _State.DIED
                room.deaths.setdefault(member.machine, []).append(each)
        if silent:
            room.silent.add(member.machine)
        room.hold(now)
        return self._tell_if_due(room, now)

    def due(self) -> float | None:
        """When to call `tick`; None: something else must happen first."""
        return min((room.until for room in self._rooms.values() if room.until is not None), default=None)

    def tick(self, now: float) -> Instructions:
        """Time has passed; returns who is to be told what."""
        told: Instructions = []
        for room in self._rooms.values():
            told += self._tell_if_due(room, now)
        return told

    def flush(self) -> Instructions:
        """The service ends: tell now what is held."""
        return [told for room in self._rooms.values() if room.until is not None for told in self._tell(room)]

    def validate(self) -> None:
        """Assert what must hold between two events."""
        for room in self._rooms.values():
            assert (room.until is not None) == bool(room.deaths or room.lefts or room.abort)
            assert all(0 <= rank < room.size for rank in room.members)
            said = [rank for event in room.told if isinstance(event, Died) for rank in event.ranks]
            said += [event.rank for event in room.told if isinstance(event, Left)]
            assert len(set(said)) == len(said), "nobody ends twice"
            for owner, rank in room.connected.items():
                assert self._room_of[owner] is room
                assert room.members[rank].owner == owner

    def _enter(self, owner: Any, message: Enter) -> Instructions:
        problem = self._problem(owner, message)
        if problem:
            return [(owner, Refused(message.request, problem))]
        if message.room not in self._rooms:
            self._make_space()
        room = self._rooms.setdefault(message.room, _Room(message.size))
        room.members[message.rank] = _Member(owner, message.host, message.machine)
        room.connected[owner] = message.rank
        self._room_of[owner] = room
        return [(owner, Entered(message.request)), *((owner, News(events)) for events in _portions(room.told))]

    def _problem(self, owner: Any, message: Enter) -> str:
        names = (message.room, message.host, message.machine)
        room = self._rooms.get(message.room)
        if max(len(name.encode()) for name in names) > MAX_NAME_BYTES:
            return f"a name is longer than {MAX_NAME_BYTES} bytes"
        if not 0 <= message.rank < message.size <= MAX_SIZE:
            return f"there is no rank {message.rank} among {message.size}"
        if owner in self._room_of:
            return "this connection has entered a room before"
        if room is None:
            full = len(self._rooms) >= MAX_ROOMS and all(each.connected for each in self._rooms.values())
            return f"there are {MAX_ROOMS} rooms already" if full else ""
        if room.size != message.size:
            return f"this rank counts {message.size} ranks, others {room.size}"
        if message.rank in room.members:
            return f"rank {message.rank} (host {room.members[message.rank].host}) has been here before"
        return ""

    def _make_space(self) -> None:
        """Forget the oldest room that nobody is in any more, if there are too many."""
        if len(self._rooms) >= MAX_ROOMS:
            del self._rooms[next(name for name, room in self._rooms.items() if not room.connected)]

    def _tell_if_due(self, room: _Room, now: float) -> Instructions:
        return self._tell(room) if room.is_due(now) else []

    def _tell(self, room: _Room) -> Instructions:
        events = room.release()
        room.told += events
        listeners = [owner for owner, rank in room.connected.items() if room.members[rank].state is not _State.LEFT]
        return [(owner, News(portion)) for owner in listeners for portion in _portions(events)]


def _bounded(abort: Abort) -> Abort:
    reason = abort.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    return msgspec.structs.replace(abort, reason=reason, kind=abort.kind[:64], ranks=abort.ranks[:MAX_SIZE])


def _portions(events: list[Event]) -> Iterator[tuple[Event, ...]]:
    return (tuple(events[start : start + _PORTION]) for start in range(0, len(events), _PORTION))
