"""Membership of a job as one of its members knows it: messages of the service go in. No I/O, no threads, no clock."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec

from reigen.cluster.membership.abort_message import (
    AbortMessage,
    error_from_abort,
    left_error,
    make_abort_message,
)
from reigen.cluster.membership.messages import (
    BarrierOver,
    EnterBarrier,
    HeldKeys,
    JobEnded,
    LeaveJob,
    MemberAborted,
    MemberAssigned,
    MemberLeft,
    MemberLost,
    MemberMessage,
    MemberRefused,
    MemberReturned,
    MemberRole,
    MembershipEvent,
    MembershipNews,
    MembershipReply,
    RegisterMember,
    ResizeAccepted,
    ResizeServers,
    SavedJob,
    ServerInfo,
    ServerList,
    StatusQuery,
    StatusReply,
    WorkerRoster,
)
from reigen.errors import CollectiveError, ConfigError, PeerLostError, ReigenError, format_ranks

_log = logging.getLogger(__name__)

#: Broken barriers of one name of which a service that was started anew is told.
_MOST_BROKEN = 16
#: A barrier, and how often this process has entered it.
BarrierEntry = tuple[str, int]


class JobView:
    """View of a job that one of its members has.

    Args:
        registration: what this process says of itself at first.
        is_loss_fatal: no member can go on without a worker that is lost and not expected back.
        peer_timeout_seconds: after how long a silent host counts as lost; for messages to ranks.

    Attributes:
        is_recovery: this process takes the place of one that was lost.
        is_assigned: the service has given this process its number.
        job: the number of the job; 0 before that.
        epoch: the latest of which it has heard.
        has_left: it has said, or will say, that it goes in good order.
        failure: why there is nothing more to hope for, None while there is.
        servers: where they are, by number; empty until all have come.
        lost: what is lost now, and how that was noticed.
        left: workers, or ranks, that have left in good order, with their hosts.
        roster: in an elastic job, the workers that are there, in the order in which they have joined.
        events: those that were not taken yet.
        status: answers to queries, by seconds of silence.
        asked: queries without an answer, which another service is asked again.
        held_keys: what a server has said of its keys last.
        resizes: requests for another number of server processes without an answer, by their numbers.
    """

    def __init__(
        self, registration: RegisterMember, *, is_loss_fatal: bool = True, peer_timeout_seconds: float = 0.0
    ) -> None:
        self._registration, self._is_loss_fatal = registration, is_loss_fatal
        self._peer_timeout_seconds = peer_timeout_seconds
        self.number, self.is_recovery = registration.number, False
        self.is_assigned = self.has_left = False
        self.job = self.epoch = 0
        self.failure: ReigenError | None = None
        self.servers: dict[int, ServerInfo] = {}
        self.lost: dict[tuple[MemberRole, int], MemberLost] = {}
        #: incarnations of workers of whose loss, for good, it has heard: a server that was away hears of it again
        self._gone: set[int] = set()
        self.left: dict[int, str] = {}
        self.roster: list[int] = []
        self._abort: CollectiveError | None = None
        self.events: list[MembershipEvent] = []
        self._entered: Counter[str] = Counter()
        #: barriers at which this process waits, with the messages of them for a service that was started anew; outcomes
        #: of those that are over; and by name the message of the last one at which it does not wait any more
        self._waiting: dict[BarrierEntry, EnterBarrier] = {}
        self._outcomes: dict[BarrierEntry, BarrierOver] = {}
        self._passed: dict[str, EnterBarrier] = {}
        #: and by name the latest ones that were broken: others may be that far behind
        self._broken: dict[str, deque[EnterBarrier]] = {}
        self.status: dict[float, StatusReply] = {}
        self.asked: set[float] = set()
        self.held_keys: HeldKeys | None = None
        self.resizes: dict[int, ResizeServers] = {}
        self._num_resizes = 0

    @property
    def name(self) -> str:
        """``server 1``; ``server`` while it has no number."""
        role = self._registration.role
        return role if self.number < 0 else f"{role} {self.number}"

    @property
    def is_out(self) -> bool:
        """Return whether this process may go: a worker that leaves, once the service has confirmed it."""
        return not self.has_left or self._registration.role == "server" or self.number in self.left

    def registration(self, saved: tuple[SavedJob, ...] = ()) -> RegisterMember:
        """Make the first message on a new connection.

        Args:
            saved: jobs of which a server has found snapshots; they count while it has no number.
        """
        return msgspec.structs.replace(
            self._registration,
            number=self.number,
            job=self.job,
            epoch=self.epoch,
            is_recovery=self.is_recovery,
            left=tuple(sorted(self.left)),
            lost=tuple(self.lost),
            is_open=bool(self.servers),
            barriers=self._barriers(),
            saved=() if self.is_assigned else saved,
        )

    def _barriers(self) -> tuple[EnterBarrier, ...]:
        """Return barriers for a service that was started anew: others may still wait at the last one of each name."""
        known = {*self._passed.values(), *self._waiting.values(), *chain.from_iterable(self._broken.values())}
        return tuple(sorted(known, key=lambda one: (one.name, one.sequence)))

    def enter(self, barrier: str) -> BarrierEntry:
        """Enter a barrier."""
        self._entered[barrier] += 1
        entry = barrier, self._entered[barrier]
        self._waiting[entry] = EnterBarrier(*entry)
        return entry

    def resize_servers(self, num: int) -> ResizeServers:
        """Ask for another number of server processes; returns the message, which `resizes` has until the answer."""
        self._num_resizes += 1
        message = self.resizes[self._num_resizes] = ResizeServers(num, self._num_resizes)
        return message

    def give_up(self, entry: BarrierEntry) -> EnterBarrier:
        """Give up a barrier; returns the message to the service, which decides."""
        self._waiting[entry] = EnterBarrier(*entry, is_abandoned=True)
        return self._waiting[entry]

    def outcome(self, entry: BarrierEntry) -> BarrierOver | None:
        """Return how the barrier ended, None if it has not."""
        return self._outcomes.get(entry)

    def forget(self, entry: BarrierEntry) -> None:
        """Stop waiting at a barrier."""
        message, outcome = self._waiting.pop(entry), self._outcomes.pop(entry, None)
        if outcome is not None:
            message = EnterBarrier(*entry, is_abandoned=outcome.is_broken, is_over=True)
            if outcome.is_broken:
                self._broken.setdefault(entry[0], deque(maxlen=_MOST_BROKEN)).append(message)
        self._passed[entry[0]] = message

    def fatal_loss(self) -> MemberLost | None:
        """Return the first member that is lost and without which the job cannot go on."""
        for loss in self.lost.values():
            if not loss.will_return and (loss.role == "server" or self._is_loss_fatal):
                return loss
        return None

    def fail(self, error: ReigenError) -> None:
        """Fail, for good."""
        if self.failure is None:
            self.failure = error
            if self.is_assigned:
                self._notify(JobEnded(1, str(error)))

    def take(self, message: MembershipReply) -> list[MemberMessage]:
        """Take in a message of the service; returns what to say to it."""
        if isinstance(message, MemberAssigned):
            return self._take_place(message)
        if isinstance(message, MemberRefused):
            self._refuse(message)
        elif isinstance(message, ServerList):
            self._find(message)
        elif isinstance(message, MembershipNews):
            self.epoch = max(self.epoch, message.epoch)
            for event in message.events:
                self._learn(event)
        elif isinstance(message, BarrierOver):
            if (message.name, message.sequence) in self._waiting:
                self._outcomes[message.name, message.sequence] = message
        elif isinstance(message, ResizeAccepted):
            self.resizes.pop(message.request, None)
        else:
            self.status[message.seconds] = message
        return []

    def _take_place(self, message: MemberAssigned) -> list[MemberMessage]:
        """Take the number; returns messages for a service that was started anew."""
        self.epoch = max(self.epoch, message.epoch)
        if not self.is_assigned:
            self.number, self.is_recovery, self.is_assigned = message.number, message.is_recovery, True
            self.job = message.job
            self._entered.update(dict(message.barriers))
            self._passed.update({name: EnterBarrier(name, sequence) for name, sequence in message.barriers})
            if self._registration.role != "rank":
                what = ", in place of one that was lost" if message.is_recovery else ""
                _log.info("this process is %s of the job%s", self.name, what)
            return []
        again: list[MemberMessage] = [*self._barriers(), *map(StatusQuery, sorted(self.asked))]
        again += [] if self.held_keys is None else [self.held_keys]
        again += self.resizes.values()
        return [*again, LeaveJob()] if self.has_left else again

    def _refuse(self, message: MemberRefused) -> None:
        if not self.is_assigned:
            self.failure = ConfigError(f"the scheduler refuses this {self.name}: {message.reason}")
            return
        ranks = () if self._registration.role == "server" else (self.number,)
        self.fail(
            PeerLostError(f"this process, {self.name}, is not in the job any more: {message.reason}", ranks=ranks)
        )

    def _find(self, message: ServerList) -> None:
        for peer in message.servers:
            if self.servers.setdefault(peer.number, peer) != peer:  # it moved while there was no scheduler
                self._learn(MemberReturned("server", peer.number, peer.host, peer.incarnation, peer.address))

    def _learn(self, event: MembershipEvent) -> None:
        """Take in an event, once."""
        if isinstance(event, MemberLost):
            if self.lost.get((event.role, event.number)) == event or self._is_past(event):
                return
            self.lost.update({(event.role, number): event for number in event.numbers})
            self._strike(event)
        elif isinstance(event, WorkerRoster):
            self._take_roster(event)
        elif isinstance(event, MemberReturned | MemberLeft):
            self.lost.pop((event.role, event.number), None)
            self._gone.discard(event.incarnation)
            if isinstance(event, MemberLeft) and event.role != "server":
                if event.number in self.left:
                    return
                self.left[event.number] = event.host
                self._strike(event)
            if isinstance(event, MemberReturned) and event.is_new:
                self.left.pop(event.number, None)
                self._strike(event)  # whose process was another one
                self.roster.append(event.number)
            if isinstance(event, MemberReturned) and event.role == "server":
                if not self.servers or self.servers.get(event.number) == event.server:
                    return  # before all have come, it is not known where it was
                self.servers[event.number] = event.server
        elif isinstance(event, MemberAborted):
            reporter = "" if event.number == self.number else f"{event.role} {event.number}, host {event.host}"
            self._abort = self._abort or error_from_abort(event.abort, reporter)
        elif self.failure is None:
            self.failure = event.error()
        self._notify(event)

    def _is_past(self, loss: MemberLost) -> bool:
        """Return whether it has heard of that before: another process may have the place by now."""
        if loss.role != "worker" or loss.will_return or not loss.incarnation:
            return False
        is_past = loss.incarnation in self._gone
        self._gone.add(loss.incarnation)
        return is_past

    def _take_roster(self, roster: WorkerRoster) -> None:
        """Take in the workers that are there, and forget those that had their places before."""
        self.roster = list(roster.workers)
        for number in roster.workers:
            self.left.pop(number, None)
            self.lost.pop(("worker", number), None)

    def _strike(self, event: MemberLost | MemberLeft | MemberReturned) -> None:
        """Take a worker that has gone from the roster."""
        if event.role == "worker" and event.number in self.roster:
            self.roster.remove(event.number)

    def _notify(self, event: MembershipEvent) -> None:
        if self._registration.role != "rank":  # which asks by `rank_error`
            _log.info("%s", event)
            self.events.append(event)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> AbortMessage:
        """Give up as a rank; returns the message to the service."""
        self._abort = self._abort or error
        return make_abort_message(error, self.number)

    def rank_error(self, needed: Sequence[int]) -> CollectiveError | None:
        """Return why waiting for the ranks ``needed`` will never succeed, or None while it may.

        Ranks that died without a word are the cause of what the others did then, so they are named first, and those
        that were lost first before others. Then comes the abort of a rank; ranks that left; the service.
        """
        wanted = set(needed)
        for loss in dict.fromkeys(self.lost.values()):
            if wanted.intersection(loss.numbers) or self.number in loss.numbers:
                return self._loss_error(loss, [rank for rank in loss.numbers if rank in wanted or loss.is_silent])
        if self._abort is not None:
            return self._abort
        left = sorted(rank for rank in self.left if rank in wanted and rank != self.number)
        if left:
            return left_error(format_ranks_by_host(left, self.left), left)
        return self.failure if isinstance(self.failure, CollectiveError) else None

    def _loss_error(self, loss: MemberLost, ranks: Sequence[int]) -> PeerLostError:
        host, silence = loss.host, f"for {self._peer_timeout_seconds:g} s (REIGEN_PEER_TIMEOUT)"
        if self.number in loss.numbers:
            reason = (
                f"this rank, {self.number}, was given up by the others: nothing was heard of its host, {host}, "
                f"{silence}; was it suspended, or the network cut?"
            )
        elif loss.is_silent:
            reason = (
                f"host {host} was lost, and rank(s) {format_ranks(ranks)} with it: nothing was heard of it {silence}; "
                "it crashed, or the network to it is cut"
            )
        elif loss.is_whole_host:
            reason = (
                f"host {host} was lost, or all its processes were killed: its rank(s) {format_ranks(loss.numbers)} "
                "died at once while others wait for them"
            )
        else:
            reason = f"rank(s) {format_ranks(ranks)} (host {host}) died while others wait for them"
        return PeerLostError(reason, ranks=loss.numbers if loss.is_whole_host else ranks)


def format_ranks_by_host(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """``1, 2 (host h1), 4 (host h2)``: ranks with their hosts, where these are known."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    return ", ".join(
        f"{format_ranks(some)} (host {host})" if host else format_ranks(some) for host, some in by_host.items()
    )
