"""Membership table of a job, as its service keeps it: messages go in, replies to connections come out.

No I/O, no clock. The messages and events stand in `reigen.cluster.membership.messages`; in which the roles differ, in
`reigen.cluster.membership.members`. Ranks have one connection each and do not come back, so of what follows only A, C,
E, J and K are theirs.

The protocol
------------
A. *Numbers.* A member says its number where it was given one (its rank, its task number), and gets it; else the lowest
   that no member has had, in the order of arrival. What makes no sense is refused.
B. *Start.* When all servers have come for the first time, every member that is there is told where they are, and every
   one that comes later at once. A process that is lost (C) before that is forgotten, as if it had not come. Servers
   that do not come, and later workers, end the job when the time for it is over. No time counts for anything in which
   the service itself did not run: what others said meanwhile is still to be read.
C. *Loss.* A connection that ends without Leave or Abort may be made again within its role's time for that, if there is
   any; then the member counts as lost, and at once if another process comes for its number, or the launcher says that
   its process has ended. A member that says nothing
   for the heartbeat's timeout counts as lost, too. All are told (`MemberLost`).
   A server that has said so (`MoveServer`) moves to another process, which comes for its number at once.
D. *Return.* A lost member that says something is there again, the same process; another process that registers for the
   number of a lost one takes its place (``is_recovery``) and goes on with barriers where the others are. All are told:
   `MemberReturned`. One that was away says whom it holds for lost (`RegisterMember.lost`), and hears
   which of them have returned. But where a loss is final (a rank, a worker under abort, a server that is not started
   again, or not in time) it is refused. While the process that has the number is connected, and may be dead without
   any notice, another that comes for it waits for a sign of life, or the end, of the first.
E. *Leaving.* A member that leaves is announced to all (`MemberLeft`). It is not waited for any more, nor does it come
   back. Ranks that leave are announced together, at the next `tick`, which is that of the same turn of the service's
   loop, and only to those that have not left: at the end of a job all leave, and each would be told of each.
F. *Barriers.* A barrier is done for the n-th time when every worker has entered it n times, but those that have left or
   are lost and not awaited. If one of them gives it up before, it is broken for that time, and all are told so that
   are there, or come to it later: no member passes a barrier at which another has failed. Entering again is answered
   again.
G. *End.* When all workers have left, the job is over with exit code 0; when all have left or are lost, and nobody came
   in their place, with another one (under continue: if none has left): `WORKERS_LOST_EXIT_CODE` if it was a worker
   that was lost first, else 1. It is announced to all (`JobEnded`), and a process that comes later is refused.
   After a restart (H) that waits for those who have not come back: they are to be told, too.
H. *Restart of the service.* Members connect again and say what they were told before (`RegisterMember.is_known`): their
   numbers, the epoch, and which workers have left; how often they have entered which barriers, and how these ended. A
   server that is started again, too, says what its snapshots tell (`RegisterMember.saved`). That is all there is to
   know. Who has not come ``return_seconds`` after the first of them counts as lost, and barriers are not given up
   before. Processes that are not known then take places of lost ones: that one comes for the first time, nobody can
   tell. (That one does not, its launcher can: `RegisterMember.is_restart`.)
   Where there may be members that know the job, unknown processes wait for the first of those, until
   ``known_first_until``: they would be taken for the first ones of a new job. They do not wait when unknown ones have
   come for all places: no member is left that knows. One that was told no number waits until it is clear which
   are free.
I. *Other jobs.* A job has a number: it follows from its secret, where a launcher made that for it alone; else its first
   service chose it. Of the latter kind, a service to which a known process comes first goes on with that one's job;
   one to which an unknown process comes first, that need not wait (H), has a new job, whatever was saved of earlier
   ones. Processes of any other job are refused. Where a job goes on, and servers cannot return, an unknown server is
   refused, too: what it comes for is a new job on the same port and with the same secret, while processes of the old
   one still run.
J. *Epochs.* Every change of who is there has a number, one more than the one before it, and all are sent the
   latest with what it hears. A service that is started again goes on behind the latest of which a member has heard.
K. *Attribution.* What goes wrong at one time is held for a moment, and told in the order of cause and effect
   (`reigen.cluster.membership.attribution`). A connection that ends because its host is *silent* (the kernel got no
   answer in time) stands for all members of that host. Only the first abort is sent: it ends the waiting of all, and
   those that come later follow from it.
L. *Elastic jobs.* Workers' numbers are places, of which a process gets one that is free: that nobody has had, or whose
   process is lost or has left. All are told of each that joins, and one that comes of all that are there, in the order
   in which they have joined (`WorkerRoster`). A lost process does not come back: it is refused. The job begins when
   ``first_workers`` have come, fewer where the service knows that some of them have ended, and ends when the last
   worker leaves in good order. One that comes later takes part in barriers that nobody has entered by then. A process
   that is noticed to be lost when another one of its slot has joined was not the last: the launcher has seen its end
   before.
M. *Restart of an elastic job's service.* Who is there, in which order, is not asked but read: the service records its
   events before it tells them (`cluster.membership.recorded_job`). Processes of the record are there, and have until
   the heartbeat's timeout to connect again, unless the launcher says that they have ended. Until each has, or is lost,
   no newcomer joins, no barrier is given up, the job does not begin, and workers that have come are not all. Servers
   come again as in H, without being asked who they know; the job is not over before they have. Where the record ends
   with the job's end, members that come are told of it. A process that was not told its place gets the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import structs

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from reigen.cluster.membership.abort_message import AbortMessage
from reigen.cluster.membership.attribution import HeldEvents
from reigen.cluster.membership.barriers import MAX_BARRIERS, BarrierTable
from reigen.cluster.membership.deadlines import MemberDeadlines
from reigen.cluster.membership.members import (
    NEVER,
    ConnectionId,
    JobSpec,
    LossPolicy,
    Member,
    MemberState,
    rank_job,
)
from reigen.cluster.membership.messages import (
    MAX_BARRIER_NAME_BYTES,
    EnterBarrier,
    JobEnded,
    LeaveJob,
    MemberAborted,
    MemberAssigned,
    MemberLost,
    MemberMessage,
    MemberRefused,
    MemberRole,
    MembershipEvent,
    MembershipNews,
    MembershipReply,
    MoveServer,
    RegisterMember,
    ResizeAccepted,
    ResizeServers,
    ServerList,
    StatusQuery,
    StatusReply,
    WorkerRoster,
    format_members,
)
from reigen.cluster.membership.recorded_job import MOST_PAST_LOSSES, RecordedJob, note_use, was_used_since

#: How late a `tick` may come before others get their time anew.
_LATE_SECONDS = 1.0
MAX_GROUPS = 4096
MAX_SIZE = 1 << 16
MAX_NAME_BYTES = 512
MAX_REASON_BYTES = 4096
#: Events in one message.
_MAX_EVENTS = 256

OutgoingReplies = list[tuple[ConnectionId, MembershipReply]]


class MembershipTable:
    """Members of one job. An owner names a connection; times are of any steady clock, in seconds.

    Args:
        spec: what the job was started with.
        job: its number, if it is a new one, or the only one with its secret; not 0.
        known_first_until: until when those who know the job may come first (H).
        recorded: an elastic job, as the service before this one has left it (M).

    Attributes:
        job: its number.
        epoch: counts changes of who is there.
        stop: the job is over; None while it is not.
        is_begun: a process has got a place.
        first_workers: of an elastic job, with how many workers it begins (L).
        announced: of an elastic job, events that its owner has not taken yet, in order: to be recorded first (M).
    """

    def __init__(
        self,
        spec: JobSpec,
        job: int = 1,
        known_first_until: float = -NEVER,
        recorded: RecordedJob | None = None,
        now: float = -NEVER,
    ) -> None:
        self.spec, self.job, self.epoch = spec, job, 0
        self._known_first_until = known_first_until
        #: unknown processes that wait for others (H), in the order of arrival
        self._waiting: dict[ConnectionId, RegisterMember] = {}
        self.stop: JobEnded | None = None
        self._members: dict[tuple[MemberRole, int], Member] = {
            (role, number): Member(role, number, policy)
            for role, policy in spec.roles.items()
            for number in range(policy.count)
        }
        self._of_role: dict[MemberRole, list[Member]] = {
            role: [member for member in self._members.values() if member.role == role]
            for role in ("rank", "worker", "server")
        }
        self._deadlines = MemberDeadlines(self._members.values())
        self._member_of: dict[ConnectionId, Member] = {}
        #: connections that have, or had, come for the place of a member (`Member.replacement`)
        self._replacement_of: dict[ConnectionId, Member] = {}
        #: other connections of processes that have made several
        self._duplicate_connections: dict[ConnectionId, Member] = {}
        #: a member has been here (B); all servers have (B); some member had been told its number before (H)
        self.is_begun = self._is_open = self._is_restarted = False
        #: a member has been lost, or has left
        self._has_departed = False
        #: and all servers had come by then (I)
        self._goes_on = False
        self._barriers = BarrierTable()
        #: incarnations of processes to which this service, and none before it, has given their places
        self._assigned: set[int] = set()
        #: since all workers have left or are lost, some of them awaited: until when
        self._awaited_until = NEVER
        self._held = HeldEvents(self._members.values())
        #: the one that is told (K)
        self._abort: MemberAborted | None = None
        #: (L) how many workers have joined; by slot, how often it was used before the latest of them; the job has
        #: begun; the worker that went last has left in good order
        self.first_workers = spec.first_workers
        self._num_joined, self._latest_uses = 0, dict[int, int]()
        self._has_opened = self._has_left_last = False
        self._now = now
        self._due = NEVER
        self._replies: OutgoingReplies = []
        self.announced: list[MembershipEvent] = []
        #: (M) incarnations of recorded workers that have not connected to this service; losses of processes whose
        #: places others have
        self._unheard: set[int] = set()
        self._past_losses: deque[MemberLost] = deque(maxlen=MOST_PAST_LOSSES)
        if recorded is not None:
            self._restore(recorded)

    def _restore(self, recorded: RecordedJob) -> None:
        """Step M."""
        self.epoch, self.stop, self._num_joined = recorded.epoch, recorded.stop, recorded.num_joined
        self._has_opened, self._has_left_last = recorded.has_opened, recorded.has_left_last
        self._latest_uses = dict(recorded.latest_uses)
        self._past_losses.extend(recorded.past_losses)
        self.is_begun = bool(recorded.workers)
        for number, worker in recorded.workers.items():
            member, came = self._members["worker", number], worker.came
            member.incarnation, member.host, member.joined = came.incarnation, came.host, worker.joined
            member.is_recovery, member.slot, member.loss = worker.is_recovery, worker.slot, worker.loss
            if worker.is_present:
                member.state, member.heard_at = MemberState.PRESENT, self._now
                self._unheard.add(member.incarnation)
                self._deadlines.set(member, self._now + self.spec.restart_reconnect_seconds)
            else:
                member.state = MemberState.LEFT if worker.has_left else MemberState.LOST
                member.lost_at, self._has_departed = self._now, True
        for server in self._of_role["server"] if self.is_begun else ():
            self._deadlines.set(server, self._now + server.policy.start_seconds)
        self._due = self._deadlines.earliest()

    # -- events -------------------------------------------------------------------------------------------------------

    def handle(self, owner: ConnectionId, message: MemberMessage, now: float) -> OutgoingReplies:
        """Handle a connection's message; returns replies, to be sent in this order.

        A connection that is sent `MemberRefused` is to be closed then.
        """
        self._advance(now)
        if isinstance(message, RegisterMember):
            self._register(owner, message)
        elif self.stop is None:
            if owner in self._duplicate_connections:
                self._switch_connection(owner)
            if owner in self._member_of:
                self._receive(owner, message)
        return self._finish()

    def ended(self, owner: ConnectionId, now: float, *, silent: bool = False) -> OutgoingReplies:
        """Handle the end of a connection; ``silent``: its host is not heard of any more."""
        self._advance(now)
        if self._is_replacement(owner):
            self._replacement_of[owner].replacement = None
        self._replacement_of.pop(owner, None)
        self._duplicate_connections.pop(owner, None)
        self._waiting.pop(owner, None)
        gone = self._member_of.pop(owner, None)
        if gone is not None:
            gone.owner = None
            others = reversed(self._duplicate_connections.items())
            duplicate = next((other for other, member in others if member is gone), None)
            if duplicate is not None and self.stop is None:
                self._switch_connection(duplicate)
            elif self.stop is None and gone.state is MemberState.PRESENT:
                self._lose_connection(gone, silent=silent)
        return self._finish()

    def note_death(self, incarnation: int, now: float) -> OutgoingReplies:
        """Handle the end of a member's process, as its launcher knows it; messages that it has sent still count (C)."""
        self._advance(now)
        for member in self._members.values():
            if member.incarnation == incarnation and member.state is MemberState.PRESENT and self.stop is None:
                member.has_died = True
                if member.owner is None:
                    self._lose_connection(member, silent=False)
        return self._finish()

    def tick(self, now: float) -> OutgoingReplies:
        """Handle the passing of time, behind all that has come meanwhile; returns replies."""
        self._advance(now)
        if self._held.has_departures:  # step E
            departures = self._held.take_departures()
            self.epoch += len(departures)
            staying = [owner for owner, one in self._member_of.items() if one.state is not MemberState.LEFT]
            self._send_news(staying, departures)
        self._expire(now)
        return self._finish()

    def due(self) -> float | None:
        """Return the time at which to call `tick`; None: an event must come first."""
        return None if self._due == NEVER else self._due

    def flush(self) -> OutgoingReplies:
        """Return the events that are held: the service ends."""
        self._announce(*self._held.take_departures(), *self._held.release())
        return self._finish()

    @property
    def is_empty(self) -> bool:
        """Return whether no member has a connection."""
        return not self._member_of

    # -- registering --------------------------------------------------------------------------------------------------

    def _register(self, owner: ConnectionId, message: RegisterMember) -> None:
        """Steps A, D, H, I, M."""
        if self.stop is not None and self.spec.is_elastic and message.is_known and message.job == self.job:
            self._send_news([owner], [self.stop])
            return
        if message.is_known and not self.is_begun:
            self.job = message.job
        if problem := self._problem(owner, message):
            self._refuse(owner, problem)
        elif message.is_known:
            self.epoch = max(self.epoch, message.epoch)
            self._admit(owner, message)
        else:
            self._waiting[owner] = message

    def _must_wait(self, message: RegisterMember) -> bool:
        """Steps H, M: whether those who know the job may still come, or whose place a process may have is not clear."""
        if self._unheard and self.spec.has_places(message.role):
            return bool(self._unheard - {message.incarnation, *(one.incarnation for one in self._waiting.values())})
        if not self.is_begun and self._now < self._known_first_until:
            return len(self._waiting) + 1 < len(self._members)
        if message.number >= 0 or not self._is_restarted:
            return False
        of_role = self._of_role[message.role]
        num_absent = sum(member.state is MemberState.ABSENT for member in of_role)
        num_others = sum(one.role == message.role and one.number < 0 for one in self._waiting.values())
        return num_others + 1 < num_absent and all(member.state is not MemberState.LOST for member in of_role)

    def _admit_waiting(self) -> None:
        """Step H: admit processes that need not wait any more, servers first: they may know the job."""
        for owner in sorted(self._waiting, key=lambda one: not self._waiting[one].saved):
            message = self._waiting.pop(owner)
            if self._must_wait(message):
                self._waiting[owner] = message
            else:
                self._admit(owner, message)

    def _admit(self, owner: ConnectionId, message: RegisterMember) -> None:
        member = self._choose(message)
        if member is None:
            num = self.spec.roles[message.role].count
            self._refuse(owner, f"all {num} {message.role}(s) of this job are there already")
            return
        if message.is_known and message.incarnation not in self._assigned and not self.spec.is_elastic:
            self._take_history(message.left, goes_on=message.is_open)
        if not self._is_open and not self.spec.is_elastic:  # else the snapshots are of this service's time
            for saved in (one for one in message.saved if one.job == self.job):
                self._take_history(saved.left, goes_on=True)
        is_free = self.spec.has_places(member.role) and member.state is MemberState.LEFT
        if member.is_final and not member.incarnation:
            self._refuse(owner, f"{member.name} was given up: {member.loss_reason}")
        elif (
            member.state is MemberState.ABSENT
            or (message.is_known and not member.incarnation)
            or (is_free and member.incarnation != message.incarnation)
        ):
            recovers = message.is_recovery if message.is_known else self._is_restarted or message.is_restart
            self._assign_place(owner, member, message, is_recovery=recovers)
        elif member.incarnation == message.incarnation:
            self._connect_again(owner, member, message)
        elif message.is_known:
            self._refuse(owner, f"another process has become {member.name}")
        else:
            self._replace(owner, member, message)
        if self._member_of.get(owner) is member:
            self._correct(owner, message)
            for one in message.barriers if member.role == "worker" else ():
                self._enter_barrier(owner, one)

    def _correct(self, owner: ConnectionId, message: RegisterMember) -> None:
        """Step D: tell a member that was away who has returned meanwhile, or will have; a roster has said it (L)."""
        keys = [key for key in dict.fromkeys(message.lost) if key in self._members]
        believed_lost = [self._members[key] for key in keys if not self.spec.has_places(key[0])]
        for member in believed_lost:
            member.is_missed |= member.state is MemberState.ABSENT
        self._send_news([owner], [one.return_event for one in believed_lost if one.state is MemberState.PRESENT])

    def _problem(self, owner: ConnectionId, message: RegisterMember) -> str:
        """Return why a process cannot be in the job; empty if it can."""
        role, counts = message.role, self.spec.counts
        if self.stop is not None:
            return f"the job is over: {self.stop.reason}"
        names = (message.host, message.host_id, message.address)
        if any(len(name.encode(errors="replace")) > MAX_NAME_BYTES for name in names):
            return f"a name is longer than {MAX_NAME_BYTES} bytes"
        if message.is_known and message.job != self.job:
            return "the scheduler that it has found serves another job, on the same port and with the same secret"
        if (
            owner in self._member_of
            or owner in self._duplicate_connections
            or owner in self._waiting
            or self._is_replacement(owner)
        ):
            return "this connection has registered before"
        if message.counts != counts:
            variables = "" if role == "rank" else " (DMLC_NUM_WORKER, DMLC_NUM_SERVER)"
            expected = " and ".join(f"{number} {each}(s)" for each, number in message.counts.items())
            return f"it expects {expected}, but this job has {' and '.join(map(str, counts.values()))}{variables}"
        if role not in counts or message.number >= counts[role]:
            return f"there is no {role} {message.number} among {counts.get(role, 0)}"
        is_lasting = self.spec.roles[role].on_loss is LossPolicy.ABORT
        if self._goes_on and not message.is_known and role == "server" and is_lasting:
            return (
                "this scheduler goes on with a job that has its servers, since a process of it came first, and servers "
                "without snapshots cannot be replaced. For a new job, end the processes of the old one "
                f"({', '.join(sorted(f'{one.name} on host {one.host}' for one in self._member_of.values()))}), or take "
                "another DMLC_PS_ROOT_PORT"
            )
        return ""

    def _choose(self, message: RegisterMember) -> Member | None:
        """Return the place that a process asks for, or gets; None: all are taken."""
        if message.number >= 0:
            return self._members[message.role, message.number]
        of_role = self._of_role[message.role]
        own = [member for member in of_role if member.incarnation == message.incarnation]
        if own and self.spec.has_places(message.role):  # it was not told its place (M)
            return own[0]
        free = [member for member in of_role if member.state is MemberState.ABSENT]
        gone = {MemberState.LOST, MemberState.LEFT} if self.spec.has_places(message.role) else {MemberState.LOST}
        free += [member for member in of_role if member.state in gone]
        free += [member for member in of_role if member.state is MemberState.PRESENT and member.owner is None]
        return free[0] if free else None

    def _is_replacement(self, owner: ConnectionId) -> bool:
        member = self._replacement_of.get(owner)
        return member is not None and member.replacement is not None and member.replacement[0] == owner

    def _take_history(self, left: tuple[int, ...], *, goes_on: bool) -> None:
        """Step H: a member knows of the time before this service, or its snapshots do."""
        self._goes_on = self._goes_on or goes_on
        if not self._is_restarted:
            self._is_restarted = True
            for member in self._members.values():
                if member.state is MemberState.ABSENT:
                    self._deadlines.set(member, self._now + self.spec.return_seconds)
        for number in left:
            gone = self._members.get(("rank" if "rank" in self.spec.roles else "worker", number))
            if gone is not None and gone.state is MemberState.ABSENT:
                gone.state, self._has_departed = MemberState.LEFT, True
                self._deadlines.set(gone, NEVER)

    def _replace(self, owner: ConnectionId, member: Member, message: RegisterMember) -> None:
        """Handle another process that comes for a place that is, or was, taken."""
        if member.state is MemberState.LEFT:
            self._refuse(owner, f"{member.name} has left this job before; it cannot come back")
        elif member.state is MemberState.ABORTED:
            self._refuse(owner, f"{member.name} has given up before; it cannot come back")
        elif member.owner is not None and member.state is MemberState.PRESENT:
            if member.replacement is not None or member.policy.heartbeat_timeout_seconds == NEVER:
                self._refuse(owner, f"{member.name} is there already, on host {member.host}")
            else:
                member.replacement, self._replacement_of[owner] = (owner, message), member
        else:
            member.replacement, self._replacement_of[owner] = (owner, message), member
            self._lose(member, "its process ended")

    def _assign_place(self, owner: ConnectionId, member: Member, message: RegisterMember, *, is_recovery: bool) -> None:
        """Give a process its place."""
        is_elastic = self.spec.has_places(member.role)
        is_recovery = self._has_opened if is_elastic else is_recovery
        is_news = (
            is_elastic or member.state is MemberState.LOST or member.is_missed or (is_recovery and not message.is_known)
        )
        member.is_missed = False
        if member.state is MemberState.LOST:
            self._announce(*self._held.release())  # comes before the return
        if is_elastic and member.loss is not None:
            self._past_losses.append(member.loss)
        if member.owner is not None:  # a process that is silent; whatever it says now, it is too late
            self._member_of.pop(member.owner)
            self._refuse(member.owner, f"another process has become {member.name}")
        member.state, member.loss, member.is_recovery = MemberState.PRESENT, None, is_recovery
        member.has_died = member.moves = False
        member.incarnation = message.incarnation
        self.epoch += 1
        _drop_connections(self._duplicate_connections, member)
        if not message.is_known:
            self._assigned.add(message.incarnation)
        barriers = () if message.is_known or not is_recovery else self._barriers.over()
        if is_elastic:
            self._num_joined += 1
            member.joined, member.slot = self._num_joined, message.slot
            note_use(self._latest_uses, member.slot)
            barriers = self._barriers.join(member.number)
        self._place(owner, member, message, barriers)
        if is_news:
            self._announce(member.return_event)
        self._send_state(owner)

    def _connect_again(self, owner: ConnectionId, member: Member, message: RegisterMember) -> None:
        """Take a new connection of the process that has the place."""
        if member.is_excluded:
            self._refuse(owner, f"it was given up: {member.loss_reason}")
            return
        if member.owner is not None:
            self._duplicate_connections[member.owner] = self._member_of.pop(member.owner)
        is_unassigned = self.spec.has_places(member.role) and not message.is_known
        self._place(owner, member, message, self._barriers.join(member.number) if is_unassigned else ())
        self._revive(member)
        self._send_state(owner)

    def _switch_connection(self, owner: ConnectionId) -> None:
        """Take another connection of a process for the one that it uses: messages on two came disordered."""
        member = self._duplicate_connections.pop(owner)
        if member.owner is not None:
            self._duplicate_connections[member.owner] = self._member_of.pop(member.owner)
        member.owner = owner
        self._member_of[owner] = member
        self._assign(owner, member)  # so that it says again what it waits for
        self._send_state(owner)

    def _place(
        self, owner: ConnectionId, member: Member, message: RegisterMember, barriers: tuple[tuple[str, int], ...] = ()
    ) -> None:
        member.owner, member.host, member.address = owner, message.host, message.address
        member.host_id, member.heard_at = message.host_id, self._now
        self._unheard.discard(member.incarnation)
        until = NEVER if member.state is MemberState.LEFT else self._now + member.policy.heartbeat_timeout_seconds
        self._deadlines.set(member, until)
        self._member_of[owner] = member
        if not self.is_begun:  # step B: the others have so much time
            self.is_begun = True
            for other in self._members.values():
                if other.state is MemberState.ABSENT and not self._is_restarted:
                    self._deadlines.set(other, self._now + other.policy.start_seconds)
        self._assign(owner, member, barriers)

    def _assign(self, owner: ConnectionId, member: Member, barriers: tuple[tuple[str, int], ...] = ()) -> None:
        self._reply(owner, MemberAssigned(member.number, member.is_recovery, self.job, self.epoch, barriers))

    def _send_state(self, new_connection: ConnectionId) -> None:
        """Step B: send the list of servers to one member, or all; and past events to one."""
        servers = self._of_role["server"]
        receivers = [new_connection] if self._is_open else []
        if not self._is_open and all(server.incarnation for server in servers):
            self._is_open, receivers = True, list(self._member_of)
        for owner in receivers if servers else ():
            self._reply(owner, ServerList(tuple(server.return_event.server for server in servers)))
        together: dict[MemberLost | None, list[Member]] = {}
        for member in _lost_members(self._members) if self._has_departed else ():
            together.setdefault(member.loss, []).append(member)
        is_of_server = self.spec.is_elastic and self._member_of[new_connection].role == "server"
        past: list[MembershipEvent | None] = [*self._past_losses] if is_of_server else []
        for loss, (first, *others) in together.items():  # but those that have returned
            assert loss is not None
            numbers = tuple(sorted(other.number for other in others))
            past.append(structs.replace(loss, number=first.number, incarnation=first.incarnation, others=numbers))
        past.append(self._abort)
        if self.spec.is_elastic:
            past.append(_make_roster(self._of_role["worker"], is_open=self._has_opened))
        if self._has_departed:
            past += [one.left_event for one in self._members.values() if one.state is MemberState.LEFT]
        self._send_news([new_connection], [event for event in past if event is not None and event not in self._held])

    # -- signs of life, and their absence -----------------------------------------------------------------------------

    def _receive(self, owner: ConnectionId, message: MemberMessage) -> None:
        member = self._member_of[owner]
        if member.is_excluded:
            self._refuse(owner, f"it was given up: {member.loss_reason}")
            return
        self._revive(member)
        if isinstance(message, LeaveJob) and member.state is MemberState.PRESENT:
            member.state, self._has_departed = MemberState.LEFT, True
            self._deadlines.set(member, NEVER)
            self._has_left_last = member.role == "worker"
            self._announce(*self._held.add_departure(member))
        elif isinstance(message, AbortMessage) and member.role == "rank" and member.state is MemberState.PRESENT:
            member.state = MemberState.ABORTED
            if self._abort is None:
                self._abort = MemberAborted(member.role, member.number, member.host, _truncate_abort(message))
                self._announce(*self._held.add_abort(self._abort, self._now + member.policy.hold_seconds))
        elif isinstance(message, EnterBarrier) and member.role == "worker":
            self._enter_barrier(owner, message)
        elif isinstance(message, MoveServer):
            member.moves = member.role == "server" and member.policy.on_loss is LossPolicy.WAIT
        elif isinstance(message, ResizeServers):
            self._reply(owner, ResizeAccepted(message.request))
        elif isinstance(message, StatusQuery):
            members, since = self._members.values(), self._now - message.seconds
            silent = [m for m in members if m.state is MemberState.PRESENT and m.heard_at < since]
            num_lost = sum(m.state is MemberState.LOST for m in members)
            self._reply(owner, StatusReply(*self.absent(), message.seconds, len(silent) + num_lost))

    def _revive(self, member: Member) -> None:
        """Take a sign of life of the process that has the place."""
        member.heard_at = self._now
        if member.replacement is not None:
            replacement, member.replacement = member.replacement[0], None
            self._refuse(replacement, f"{member.name} is there already, on host {member.host}")
        if member.state is MemberState.LOST:
            self._announce(*self._held.release())
            member.state, member.loss = MemberState.PRESENT, None
            self._announce(member.return_event)
        if member.state is MemberState.PRESENT:
            self._deadlines.set(member, self._now + member.policy.heartbeat_timeout_seconds)

    def _lose_connection(self, member: Member, *, silent: bool) -> None:
        """Steps C, K: the connection of a member has ended."""
        if member.policy.reconnect_seconds and member.replacement is None and not member.has_died:
            self._deadlines.set(member, self._now + member.policy.reconnect_seconds)
            return
        is_host = silent and member.policy.hold_seconds > 0
        for each in list(self._held.of_host(member.host_id)) if is_host else [member]:
            if each.state is MemberState.PRESENT:
                self._lose(each, "its host is silent" if is_host else "its process ended", is_silent=is_host)

    def _lose(self, member: Member, reason: str, *, is_silent: bool = False) -> None:
        """Steps B, C, D: the process that has the place is gone, or as good as."""
        replacement, member.replacement = member.replacement, None
        self._unheard.discard(member.incarnation)
        if member.role == "worker" and not was_used_since(self._latest_uses, member.slot):
            self._has_left_last = False
        is_elastic = self.spec.has_places(member.role)
        if member.state is MemberState.PRESENT and not (self._is_open or self._is_restarted or is_elastic):
            self._forget(member)
        elif member.state is not MemberState.LOST:
            member.state, member.lost_at, self._has_departed = MemberState.LOST, self._now, True
            self._report_loss(member, reason, is_awaited=True, is_silent=is_silent)
        if replacement is not None and member.is_final:
            self._refuse(replacement[0], f"{member.loss}; this job does not go on without it")
        elif replacement is not None:
            owner, message = replacement
            self._assign_place(
                owner, member, message, is_recovery=member.state is MemberState.LOST or message.is_restart
            )

    def _report_loss(self, member: Member, reason: str, *, is_awaited: bool, is_silent: bool = False) -> None:
        policy, will_return = member.policy, is_awaited and member.policy.on_loss is LossPolicy.WAIT
        self._deadlines.set(member, self._now + policy.return_seconds if will_return else NEVER)
        member.loss = MemberLost(
            member.role, member.number, member.host, reason, will_return, member.incarnation, is_silent=is_silent,
            is_move=is_awaited and member.moves,
        )  # fmt: skip
        self._announce(*self._held.add_loss(member, member.loss, self._now))

    def _forget(self, member: Member) -> None:
        """Step B: as if it had not come."""
        if member.owner is not None:
            self._member_of.pop(member.owner)
            self._refuse(member.owner, "nothing was heard of it")
        if member.role == "worker":
            self._barriers.forget(member.number)
        _drop_connections(self._duplicate_connections, member)
        member.state, member.owner, member.incarnation = MemberState.ABSENT, None, 0
        self._deadlines.set(member, self._now + member.policy.start_seconds)

    def _expire(self, now: float) -> None:
        """Handle times that are over."""
        if self.stop is None and self._awaited_until <= now:
            reason = "all workers have left or are lost, and none came in their place"
            self._end(JobEnded(WORKERS_LOST_EXIT_CODE, reason))
        for member in self._deadlines.take_due(now):
            if self.stop is not None or member.until > now:
                continue
            if member.state is MemberState.PRESENT and member.owner is None:
                reason = "its process ended"
                if member.incarnation in self._unheard:
                    reason = f"it did not come back within {self.spec.restart_reconnect_seconds:g} s"
                self._lose(member, reason)
            elif member.state is MemberState.PRESENT:
                self._lose(member, f"nothing was heard of it for {member.policy.heartbeat_timeout_seconds:g} s")
            elif member.state is MemberState.LOST:
                reason = f"no process took its place within {member.policy.return_seconds:g} s"
                self._report_loss(member, reason, is_awaited=False)
            elif self._is_restarted:
                self._lose(member, f"it did not come back within {self.spec.return_seconds:g} s")
            else:  # step B
                self._end(_explain_absence(self.spec, *self.absent()))

    # -- barriers -----------------------------------------------------------------------------------------------------

    def _enter_barrier(self, owner: ConnectionId, message: EnterBarrier) -> None:
        """Step F."""
        name, number = message.name, self._member_of[owner].number
        if len(name.encode(errors="replace")) > MAX_BARRIER_NAME_BYTES or not self._barriers.accepts(number, name):
            self._refuse(
                owner, f"more than {MAX_BARRIERS} barriers, or a name of more than {MAX_BARRIER_NAME_BYTES} bytes"
            )
        else:
            self._barriers.receive(number, message, _needed_numbers(self._of_role["worker"]))

    def _complete(self) -> None:
        """Answer at barriers that are over now: all have come, or one has given up."""
        are_here = not self._is_restarted or all(one.state is not MemberState.ABSENT for one in self._of_role["worker"])
        all_known = are_here and not self._unheard
        for number, outcome in self._barriers.complete(_needed_numbers(self._of_role["worker"]), all_known=all_known):
            owner = self._members["worker", number].owner
            if owner is not None:
                self._reply(owner, outcome)

    def absent(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Workers and servers that have not come yet, or are lost."""
        some = [one for one in self._members.values() if one.state in {MemberState.ABSENT, MemberState.LOST}]
        workers, servers = (tuple(one.number for one in some if one.role == role) for role in ("worker", "server"))
        return workers, servers

    # -- news of all ---------------------------------------------------------------------------------------------------

    def _announce(self, *events: MembershipEvent) -> None:
        """Steps J, M."""
        self.epoch += len(events)
        if self.spec.is_elastic:
            self.announced += events
        self._send_news(list(self._member_of), events)

    def _send_news(self, owners: list[ConnectionId], events: Sequence[MembershipEvent]) -> None:
        for start in range(0, len(events), _MAX_EVENTS):
            news = MembershipNews(tuple(events[start : start + _MAX_EVENTS]), self.epoch)
            self._replies += [(owner, news) for owner in owners]

    def _refuse(self, owner: ConnectionId, reason: str) -> None:
        self._reply(owner, MemberRefused(reason))

    def _reply(self, owner: ConnectionId, answer: MembershipReply) -> None:
        self._replies.append((owner, answer))

    # -- time, and what follows for all -------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        if now > self._due + _LATE_SECONDS:  # this process did not run
            lost_seconds = now - self._due
            self._awaited_until += lost_seconds
            self._known_first_until += lost_seconds
            for member in self._members.values():
                until = member.until + lost_seconds
                if member.owner is not None:
                    member.heard_at = now
                    fresh = now + member.policy.heartbeat_timeout_seconds
                    until = max(until, fresh) if member.state is MemberState.PRESENT else until
                self._deadlines.set(member, until)
        self._now = now

    def _finish(self) -> OutgoingReplies:
        """Draw the consequences for all; returns replies."""
        if self._waiting and self.stop is None:
            self._admit_waiting()
        self._announce(*self._held.release(self._now))
        if self.stop is None and "worker" in self.spec.roles:
            self._complete()
            self._check_end()
        times = [self._held.until, self._awaited_until, self._deadlines.earliest()]
        if self._held.has_departures:
            times.append(self._now)
        if self._waiting and not self.is_begun:
            times.append(self._known_first_until)
        self._due = NEVER if self.stop is not None else min(times)
        replies, self._replies = self._replies, []
        return replies

    def _check_end(self) -> None:
        """Step G; of an elastic job, L."""
        if self.spec.is_elastic:
            self._check_elastic_end()
            return
        states = {member.state for member in self._of_role["worker"]}
        policy, lost = self.spec.roles["worker"].on_loss, _lost_members(self._members)
        final = any(member.is_final for member in lost)
        has_absent = self._is_restarted and any(member.state is MemberState.ABSENT for member in self._members.values())
        if states - {MemberState.LEFT, MemberState.LOST} or has_absent:  # servers that come back are to hear of it, too
            self._awaited_until = NEVER
        elif final or (MemberState.LEFT not in states and policy is LossPolicy.CONTINUE):
            exit_code = WORKERS_LOST_EXIT_CODE if lost[0].role == "worker" else 1
            self._end(JobEnded(exit_code, "; ".join(str(member.loss) for member in lost)))
        elif states == {MemberState.LEFT}:
            self._end(JobEnded(0, "all workers have left"))
        elif policy is LossPolicy.CONTINUE:
            self._end(JobEnded(0, "all workers have left, but for those that were lost"))
        else:
            self._awaited_until = min(self._awaited_until, self._now + self.spec.return_seconds)

    def _check_elastic_end(self) -> None:
        """Step L."""
        states = {member.state for member in self._of_role["worker"]}
        lost = [member for member in _lost_members(self._members) if member.is_final]
        present = [one for one in self._of_role["worker"] if one.state is MemberState.PRESENT]
        num_come = sum(not one.has_died for one in present)
        num_come += sum(one.state is MemberState.LEFT for one in self._of_role["worker"])
        is_complete = self._is_open and not self._unheard
        has_absent = any(server.state is MemberState.ABSENT for server in self._of_role["server"])
        if not self._has_opened and is_complete and num_come >= self.first_workers:
            self._has_opened = True
            self._announce(_make_roster(self._of_role["worker"], is_open=self._has_opened))
        if lost:
            self._end(JobEnded(1, "; ".join(str(member.loss) for member in lost)))
        elif MemberState.PRESENT in states or not self._has_opened or has_absent:
            self._awaited_until = NEVER
        elif self._has_left_last:
            self._end(JobEnded(0, "all workers have left"))
        else:
            self._awaited_until = min(self._awaited_until, self._now + self.spec.return_seconds)

    def _end(self, stop: JobEnded) -> None:
        self._announce(stop)
        self.stop = stop
        for member in self._members.values():
            if member.replacement is not None:
                self._refuse(member.replacement[0], f"the job is over: {stop.reason}")
                member.replacement = None
        while self._waiting:
            self._refuse(self._waiting.popitem()[0], f"the job is over: {stop.reason}")

    def validate(self) -> None:
        """Assert what must hold between two events."""
        for owner, member in self._member_of.items():
            assert member.owner == owner
            assert self._members[member.role, member.number] is member
        for member in self._members.values():
            assert member.owner is None or self._member_of[member.owner] is member
            assert (member.state is MemberState.LOST) == (member.loss is not None)
            assert member.replacement is None or (member.state is MemberState.PRESENT and member.owner is not None)
            assert member.state is not MemberState.ABSENT or member.owner is None
        assert not self._replies
        if self.stop is None:
            assert self._deadlines.earliest() == min(member.until for member in self._members.values())
        assert not self._duplicate_connections.keys() & self._member_of.keys()


class GroupTable:
    """Jobs of ranks by the names under which they meet, each with a table of its own."""

    def __init__(self) -> None:
        self._tables: dict[str, MembershipTable] = {}
        self._table_of: dict[ConnectionId, MembershipTable] = {}

    def handle(self, owner: ConnectionId, message: MemberMessage, now: float) -> OutgoingReplies:
        """Handle a connection's message; see `MembershipTable.handle`."""
        if (table := self._table_of.get(owner)) is not None:
            return table.handle(owner, message, now)
        if not isinstance(message, RegisterMember):
            return []
        if problem := self._problem(message):
            return [(owner, MemberRefused(problem))]
        table = self._tables.get(message.group) or MembershipTable(rank_job(message.counts["rank"]))
        replies = table.handle(owner, message, now)
        if table.is_begun:  # else the process was refused: it makes no job
            if message.group not in self._tables and len(self._tables) >= MAX_GROUPS:
                # the oldest one that no rank is in any more makes space
                del self._tables[next(name for name, one in self._tables.items() if one.is_empty)]
            self._tables[message.group] = self._table_of[owner] = table
        return replies

    def ended(self, owner: ConnectionId, now: float, *, silent: bool = False) -> OutgoingReplies:
        """Handle the end of a connection; see `MembershipTable.ended`."""
        table = self._table_of.pop(owner, None)
        return [] if table is None else table.ended(owner, now, silent=silent)

    def due(self) -> float | None:
        """Return the time at which to call `tick`; None: an event must come first."""
        return min((due for table in self._tables.values() if (due := table.due()) is not None), default=None)

    def tick(self, now: float) -> OutgoingReplies:
        """Handle the passing of time; returns replies."""
        return [reply for table in self._tables.values() if table.due() is not None for reply in table.tick(now)]

    def flush(self) -> OutgoingReplies:
        """Return the events that are held: the service ends."""
        return [reply for table in self._tables.values() for reply in table.flush()]

    def validate(self) -> None:
        """Assert what must hold between two events."""
        for table in self._tables.values():
            table.validate()

    def _problem(self, message: RegisterMember) -> str:
        size = message.counts.get("rank", 0)
        if len(message.group.encode(errors="replace")) > MAX_NAME_BYTES:
            return f"a name is longer than {MAX_NAME_BYTES} bytes"
        if set(message.counts) != {"rank"} or message.role != "rank" or not 0 <= message.number < size <= MAX_SIZE:
            return f"there is no {message.role} {message.number} among {size}"
        if message.is_known or message.left or message.lost or message.saved or message.barriers:
            return "ranks do not come back"
        is_full = len(self._tables) >= MAX_GROUPS and not any(table.is_empty for table in self._tables.values())
        return f"there are {MAX_GROUPS} jobs already" if is_full and message.group not in self._tables else ""


def _lost_members(members: Mapping[tuple[MemberRole, int], Member]) -> list[Member]:
    """Return the members that are lost; the first of them is the reason for others."""
    return sorted((one for one in members.values() if one.loss is not None), key=lambda one: one.lost_at)


def _explain_absence(spec: JobSpec, workers: tuple[int, ...], servers: tuple[int, ...]) -> JobEnded:
    """Step B: the time for the start is over."""
    reason = (
        f"{format_members(workers=workers, servers=servers)} did not come in time: after the first process, "
        f"servers are waited for {spec.roles['server'].start_seconds:g} s (REIGEN_START_TIMEOUT), workers "
        f"{spec.roles['worker'].start_seconds:g} s (REIGEN_DEADLINE)"
    )
    return JobEnded(1, reason, is_late=True, workers=workers)


def _needed_numbers(workers: Sequence[Member]) -> list[int]:
    return [member.number for member in workers if member.is_needed]


def _make_roster(workers: Sequence[Member], *, is_open: bool) -> WorkerRoster:
    """Step L: list the workers that are there, in the order in which they have joined."""
    present = sorted((one for one in workers if one.state is MemberState.PRESENT), key=lambda one: one.joined)
    return WorkerRoster(tuple(one.number for one in present), is_open, tuple(one.incarnation for one in present))


def _drop_connections(connections: dict[ConnectionId, Member], member: Member) -> None:
    for owner in [owner for owner, each in connections.items() if each is member]:
        del connections[owner]


def _truncate_abort(abort: AbortMessage) -> AbortMessage:
    reason = abort.reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
    return structs.replace(abort, reason=reason, kind=abort.kind[:64], ranks=abort.ranks[:MAX_SIZE])
