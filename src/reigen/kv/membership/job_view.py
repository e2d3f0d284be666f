"""What a worker or a server knows of its job: messages of the scheduler go in. No I/O, no threads, no clock."""

from __future__ import annotations

import logging
from collections import Counter, deque
from itertools import chain

from reigen.errors import ConfigError, PeerLostError, ReigenError
from reigen.kv.membership.messages import (
    AbandonBarrier,
    BarrierBroken,
    BarrierDone,
    EnterBarrier,
    LeaveJob,
    MembershipNews,
    MissingReply,
    NodeAssigned,
    NodeMessage,
    NodeRefused,
    RegisterNode,
    SavedJob,
    SchedulerMessage,
    ServerList,
    SilentReply,
)
from reigen.kv.membership.nodes import (
    JobEnded,
    MembershipEvent,
    NodeLeft,
    NodeLost,
    NodeReturned,
    NodeRole,
    ServerInfo,
    ServerMoved,
)

_log = logging.getLogger(__name__)

#: Broken barriers of one name of which a scheduler that was started anew is told.
_MOST_BROKEN = 16
#: A barrier, and how often this process has entered it.
BarrierEntry = tuple[str, int]


class JobView:
    """The job, seen from one of its nodes.

    Args:
        registration: what this process says of itself at first.
        is_loss_fatal: nobody can go on without a worker that is lost and not expected back.

    Attributes:
        is_recovery: this process takes the place of one that was lost.
        is_assigned: the scheduler has given this process its number.
        job: the number of the job; 0 before that.
        has_left: it has said, or will say, that it goes in good order.
        failure: why there is nothing more to hope for, None while there is.
        servers: where they are, by number; empty until all have come.
        lost: what is lost now, and how that was noticed.
        left: workers that have left in good order.
        events: what nobody has asked for yet.
        missing: the answer to who is missing, if that was asked.
        silent: answers to how many were silent, by for how long.
    """

    def __init__(self, registration: RegisterNode, *, is_loss_fatal: bool) -> None:
        self._registration, self._is_loss_fatal = registration, is_loss_fatal
        self.number, self.is_recovery = registration.number, False
        self.is_assigned = self.has_left = False
        self.job = 0
        self.failure: ReigenError | None = None
        self.servers: dict[int, ServerInfo] = {}
        self.lost: dict[tuple[NodeRole, int], NodeLost] = {}
        self.left: set[int] = set()
        self.events: list[MembershipEvent] = []
        self._entered: Counter[str] = Counter()
        #: barriers at which this process waits, with what is said of them to a scheduler that was started anew; how
        #: those ended that are over; and by name what is said of the last one at which it does not wait any more
        self._waiting: dict[BarrierEntry, EnterBarrier | AbandonBarrier] = {}
        self._outcomes: dict[BarrierEntry, BarrierDone | BarrierBroken] = {}
        self._passed: dict[str, EnterBarrier | AbandonBarrier] = {}
        #: and by name the latest ones that were broken: others may be that far behind
        self._broken: dict[str, deque[AbandonBarrier]] = {}
        self.missing: MissingReply | None = None
        self.silent: dict[float, int] = {}

    @property
    def name(self) -> str:
        """``server 1``; ``server`` while it has no number."""
        role = self._registration.role
        return role if self.number < 0 else f"{role} {self.number}"

    @property
    def is_out(self) -> bool:
        """Whether this process may go: a worker that leaves, once the scheduler has said that it knows."""
        return not self.has_left or self._registration.role == "server" or self.number in self.left

    def registration(self, saved: tuple[SavedJob, ...] = ()) -> RegisterNode:
        """What to say first on a new connection.

        Args:
            saved: jobs of which a server has found snapshots; they count while it has no number.
        """
        first = self._registration
        return RegisterNode(
            first.role,
            self.number,
            first.host,
            first.address,
            first.incarnation,
            first.num_workers,
            first.num_servers,
            self.job,
            self.is_recovery,
            tuple(sorted(self.left)),
            bool(self.servers),
            self._barriers(),
            () if self.is_assigned else saved,
            first.is_restart,
        )

    def _barriers(self) -> tuple[EnterBarrier | AbandonBarrier, ...]:
        """What a scheduler that was started anew has to know: others may still wait at the last one of each name."""
        said = {*self._passed.values(), *self._waiting.values(), *chain.from_iterable(self._broken.values())}
        return tuple(sorted(said, key=lambda one: (one.name, one.sequence)))

    def enter(self, barrier: str) -> BarrierEntry:
        """This process is at a barrier."""
        self._entered[barrier] += 1
        entry = barrier, self._entered[barrier]
        self._waiting[entry] = EnterBarrier(*entry)
        return entry

    def give_up(self, entry: BarrierEntry) -> AbandonBarrier:
        """This process does not want to wait any more; what to say to the scheduler, whose word counts."""
        self._waiting[entry] = AbandonBarrier(*entry)
        return AbandonBarrier(*entry)

    def outcome(self, entry: BarrierEntry) -> BarrierDone | BarrierBroken | None:
        """How the barrier ended, None if it has not."""
        return self._outcomes.get(entry)

    def forget(self, entry: BarrierEntry) -> None:
        """This process does not wait there any more."""
        said, outcome = self._waiting.pop(entry), self._outcomes.pop(entry, None)
        if isinstance(outcome, BarrierDone):
            said = EnterBarrier(*entry, is_over=True)
        elif outcome is not None:
            said = AbandonBarrier(*entry, is_over=True)
            self._broken.setdefault(entry[0], deque(maxlen=_MOST_BROKEN)).append(said)
        self._passed[entry[0]] = said

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
                self._tell(JobEnded(1, str(error)))

    def take(self, message: SchedulerMessage) -> list[NodeMessage]:
        """Take in a message of the scheduler; returns what to say to it."""
        if isinstance(message, NodeAssigned):
            return self._take_place(message)
        if isinstance(message, NodeRefused):
            self._refuse(message)
        elif isinstance(message, ServerList):
            self._find(message)
        elif isinstance(message, MembershipNews):
            for event in message.events:
                self._learn(event)
        elif isinstance(message, BarrierDone | BarrierBroken):
            if (message.name, message.sequence) in self._waiting:
                self._outcomes[message.name, message.sequence] = message
        elif isinstance(message, SilentReply):
            self.silent[message.seconds] = message.num_nodes
        else:
            self.missing = message
        return []

    def _take_place(self, message: NodeAssigned) -> list[NodeMessage]:
        """This process has its number; say again what a scheduler that was started anew cannot know."""
        if not self.is_assigned:
            self.number, self.is_recovery, self.is_assigned = message.number, message.is_recovery, True
            self.job = message.job
            self._entered.update(dict(message.barriers))
            self._passed.update({name: EnterBarrier(name, sequence) for name, sequence in message.barriers})
            what = ", in place of one that was lost" if message.is_recovery else ""
            _log.info("this process is %s of the job%s", self.name, what)
            return []
        return [*self._barriers(), LeaveJob()] if self.has_left else list(self._barriers())

    def _refuse(self, message: NodeRefused) -> None:
        if not self.is_assigned:
            self.failure = ConfigError(f"the scheduler refuses this {self.name}: {message.reason}")
            return
        ranks = (self.number,) if self._registration.role == "worker" else ()
        self.fail(
            PeerLostError(f"this process, {self.name}, is not in the job any more: {message.reason}", ranks=ranks)
        )

    def _find(self, message: ServerList) -> None:
        for peer in message.servers:
            if self.servers.setdefault(peer.number, peer) != peer:  # it moved while there was no scheduler
                self._learn(ServerMoved(peer))

    def _learn(self, event: MembershipEvent) -> None:
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
            if not self.servers or self.servers.get(event.server.number) == event.server:
                return  # before all have come, nobody knows where it was
            self.servers[event.server.number] = event.server
        elif self.failure is None:
            self.failure = event.error()
        self._tell(event)

    def _tell(self, event: MembershipEvent) -> None:
        _log.info("%s", event)
        self.events.append(event)
