"""What a worker or a server knows of its job: messages of the scheduler go in. No I/O, no threads, no clock."""

from __future__ import annotations

import logging
from collections import Counter

from reigen.errors import ConfigError, DeadlineError, PeerLostError, ReigenError
from reigen.kv.nodes import Event, NodeLeft, NodeLost, NodeReturned, Peer, Role, ServerMoved, Stop
from reigen.kv.registry import (
    Answer,
    Assigned,
    BarrierDone,
    Call,
    EnterBarrier,
    Leave,
    Missing,
    News,
    Refused,
    Register,
    Welcome,
)

_log = logging.getLogger(__name__)

#: A barrier, and how often this process has entered it.
Entry = tuple[str, int]


class Standing:
    """The job, seen from one of its nodes.

    Args:
        registration: what this process says of itself at first.
        is_loss_fatal: nobody can go on without a worker that is lost and not expected back.

    Attributes:
        is_recovery: this process takes the place of one that was lost.
        is_assigned: the scheduler has given this process its number.
        has_left: it has said, or will say, that it goes in good order.
        failure: why there is nothing more to hope for, None while there is.
        servers: where they are, by number; empty until all have come.
        lost: what is lost now, and how that was noticed.
        left: workers that have left in good order.
        events: what nobody has asked for yet.
    """

    def __init__(self, registration: Register, *, is_loss_fatal: bool) -> None:
        self._registration, self._is_loss_fatal = registration, is_loss_fatal
        self.number, self.is_recovery = registration.number, False
        self.is_assigned = self.has_left = False
        self.failure: ReigenError | None = None
        self.servers: dict[int, Peer] = {}
        self.lost: dict[tuple[Role, int], NodeLost] = {}
        self.left: set[int] = set()
        self.events: list[Event] = []
        self._entered: Counter[str] = Counter()
        #: barriers at which this process waits, and those of them to which all have come
        self._waiting: set[Entry] = set()
        self._done: set[Entry] = set()
        #: answers to questions that are open
        self.missing: dict[Entry, Missing] = {}

    @property
    def name(self) -> str:
        """``server 1``; ``server`` while it has no number."""
        role = self._registration.role
        return role if self.number < 0 else f"{role} {self.number}"

    def registration(self) -> Register:
        """What to say first on a new connection."""
        first = self._registration
        return Register(
            first.role,
            self.number,
            first.host,
            first.address,
            first.incarnation,
            first.num_workers,
            first.num_servers,
            self.is_assigned,
            self.is_recovery,
            tuple(sorted(self.left)),
        )

    def enter(self, barrier: str) -> Entry:
        """This process is at a barrier."""
        self._entered[barrier] += 1
        entry = barrier, self._entered[barrier]
        self._waiting.add(entry)
        return entry

    def is_done(self, entry: Entry) -> bool:
        """Whether all have come to it."""
        return entry in self._done

    def forget(self, entry: Entry) -> None:
        """This process does not wait there any more."""
        self._waiting.discard(entry)
        self._done.discard(entry)

    def fatal_loss(self) -> NodeLost | None:
        """The first node that is lost and without which the job cannot go on."""
        for loss in self.lost.values():
            if not loss.will_return and (loss.role == "server" or self._is_loss_fatal):
                return loss
        return None

    def fail(self, error: ReigenError) -> None:
        """There is nothing more to hope for."""
        if self.failure is None:
            self.failure = error
            if self.is_assigned:
                self._tell(Stop(1, str(error)))

    def take(self, message: Answer) -> list[Call]:
        """Take in a message of the scheduler; returns what to say to it."""
        if isinstance(message, Assigned):
            return self._take_place(message)
        if isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, Welcome):
            self._find(message)
        elif isinstance(message, News):
            for event in message.events:
                self._learn(event)
        elif isinstance(message, BarrierDone):
            self._done |= {(message.name, message.sequence)} & self._waiting
        else:
            self.missing[message.barrier, message.sequence] = message
        return []

    def _take_place(self, message: Assigned) -> list[Call]:
        """This process has its number; say again what a scheduler that was started anew cannot know."""
        if not self.is_assigned:
            self.number, self.is_recovery, self.is_assigned = message.number, message.is_recovery, True
            self._entered.update(dict(message.barriers))
            what = ", in place of one that was lost" if message.is_recovery else ""
            _log.info("this process is %s of the job%s", self.name, what)
            return []
        # others may still wait at the last one of each name for what the old scheduler would have said
        entries = sorted(self._waiting | set(self._entered.items()))
        again: list[Call] = [EnterBarrier(*entry) for entry in entries]
        return [*again, Leave()] if self.has_left else again

    def _refuse(self, message: Refused) -> None:
        if not self.is_assigned:
            self.failure = ConfigError(f"the scheduler refuses this {self.name}: {message.reason}")
            return
        ranks = (self.number,) if self._registration.role == "worker" else ()
        self.fail(
            PeerLostError(f"this process, {self.name}, is not in the job any more: {message.reason}", ranks=ranks)
        )

    def _find(self, message: Welcome) -> None:
        for peer in message.servers:
            if self.servers.setdefault(peer.number, peer) != peer:  # it moved while there was no scheduler
                self._learn(ServerMoved(peer))

    def _learn(self, event: Event) -> None:
        """Keep what an event says, once."""
        if isinstance(event, NodeLost):
            if self.lost.get((event.role, event.number)) == event:
                return
            self.lost[event.role, event.number] = event
        elif isinstance(event, NodeReturned | NodeLeft):
            self.lost.pop((event.role, event.number), None)
            if isinstance(event, NodeLeft) and event.role == "worker":
                if event.number in self.left:
                    return
                self.left.add(event.number)
        elif isinstance(event, ServerMoved):
            self.lost.pop(("server", event.server.number), None)
            if self.servers.get(event.server.number) == event.server:
                return
            self.servers[event.server.number] = event.server
        elif self.failure is None:
            kind = PeerLostError if self.servers else DeadlineError  # before all have come: somebody never did
            self.failure = kind(f"the job is over: {event.reason}")
        self._tell(event)

    def _tell(self, event: Event) -> None:
        _log.info("%s", event)
        self.events.append(event)
