"""Who is in a job with parameter servers, as its scheduler keeps it: messages go in, what to tell whom comes out.

No I/O, no clock. The words of the messages stand in `reigen.kv.membership.messages`, those of the events in
`reigen.kv.membership.nodes`.

The protocol
------------
A. *Numbers.* A node says its number where it was given one (its task number), and gets it; else the lowest that nobody
   has had, in the order of arrival. What makes no sense is refused.
B. *Start.* When all servers have come for the first time, every node that is there is told where they are, and every
   one that comes later at once. A process that is lost (C) before that is forgotten, as if it had not come. Servers
   that do not come, and later workers, end the job when the time for it is over. No time counts for anything in which
   the scheduler itself did not run: what others said meanwhile is still to be read.
C. *Loss.* A connection that ends without Leave may be made again; after `RECONNECT_GRACE_SECONDS` the node counts as
   lost, and at once if another process comes for its number. A node that says nothing for the heartbeat's timeout
   counts as lost, too. All are told (`NodeLost`).
D. *Return.* A lost node that says something is there again, the same process; another process that registers for the
   number of a lost one takes its place (``is_recovery``) and goes on with barriers where the others are. All are told:
   `NodeReturned`, or `ServerMoved`. But where a loss is final (a worker under abort, a server that nobody starts again,
   or not in time) it is refused. While the process that has the number is connected, and may be dead without
   anybody's knowing, another that comes for it waits for a sign of life, or the end, of the first.
E. *Leaving.* All are told of a node that leaves (`NodeLeft`). It is not waited for any more, and does not come back.
F. *Barriers.* A barrier is done for the n-th time when every worker has entered it n times, but those that have left or
   are lost and not awaited. If one of them gives it up before, it is broken for that time, and all are told so that
   are there, or come to it later: nobody passes a barrier at which another has failed. Entering again is answered
   again.
G. *End.* When all workers have left, the job is over with exit code 0; when all have left or are lost, and nobody came
   in their place, with another one (under continue: if none has left): `WORKERS_LOST_EXIT_CODE` if it was a worker
   that was lost first, else 1. All are told (`JobEnded`), and whoever comes later is refused.
   After a restart (H) that waits for those who have not come back: they are to be told, too.
H. *Restart of the scheduler.* Nodes connect again and say what they were told before (`RegisterNode.is_known`): their
   numbers, and which workers have left; how often they have entered which barriers, and how these ended. A server that
   is started again, too, says what its snapshots tell (`RegisterNode.saved`). That is all there is to know. Who has not
   come ``return_seconds`` after the first of them counts as lost, and barriers are not given up before. Processes that
   are not known then take places of lost ones: that one comes for the first time, nobody can tell. (That one does not,
   its launcher can: `RegisterNode.is_restart`.)
   Where there may be nodes that know the job, unknown processes wait for the first of those, until
   ``known_first_until``: they would be taken for the first ones of a new job. They do not wait when unknown ones have
   come for all places: nobody is left who knows. One that was told no number waits until it is clear which are free.
I. *Other jobs.* A job has a number: it follows from its secret, where a launcher made that for it alone; else its first
   scheduler chose it. Of the latter kind, a scheduler to which a known process comes first goes on with that one's job;
   one to which an unknown process comes first, that need not wait (H), has a new job, whatever was saved of earlier
   ones. Processes of any other job are refused. Where a job goes on, and servers cannot return, an unknown server is
   refused, too: what it comes for is a new job on the same port and with the same secret, while processes of the old
   one still run.
"""

from __future__ import annotations

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from reigen.kv.consistency.events import LossPolicy
from reigen.kv.membership.barriers import MAX_BARRIERS, BarrierTable
from reigen.kv.membership.messages import (
    MAX_BARRIER_NAME_BYTES,
    AbandonBarrier,
    EnterBarrier,
    LeaveJob,
    MembershipNews,
    MissingQuery,
    MissingReply,
    NodeAssigned,
    NodeMessage,
    NodeRefused,
    RegisterNode,
    SchedulerMessage,
    ServerList,
    SilentQuery,
    SilentReply,
    format_nodes,
)
from reigen.kv.membership.node_state import NEVER, ConnectionId, JobSpec, NodeEntry, NodeState
from reigen.kv.membership.nodes import (
    JobEnded,
    MembershipEvent,
    NodeLeft,
    NodeLost,
    NodeReturned,
    NodeRole,
    ServerMoved,
)

#: How long a node may take to connect again; and how late a `tick` may come before others get their time anew.
RECONNECT_GRACE_SECONDS = 1.0
NodeKey = tuple[NodeRole, int]
OutgoingMessages = list[tuple[ConnectionId, SchedulerMessage]]


class MembershipTable:
    """The scheduler's knowledge. An owner names a connection; times are of any steady clock, in seconds.

    Args:
        terms: what the job was started with.
        job: its number, if it is a new one, or the only one with its secret; not 0.
        known_first_until: until when those who know the job may come first (H).

    Attributes:
        job: its number.
        stop: the job is over; None while it is not.
    """

    def __init__(self, terms: JobSpec, job: int, known_first_until: float = -NEVER) -> None:
        self.terms, self.job = terms, job
        self._known_first_until = known_first_until
        #: unknown processes that wait for others (H), in the order of arrival
        self._held: dict[ConnectionId, RegisterNode] = {}
        self.stop: JobEnded | None = None
        self._nodes: dict[NodeKey, NodeEntry] = {
            (role, number): NodeEntry(role, number)
            for role in ("worker", "server")
            for number in range(terms.count(role))
        }
        self._node_of: dict[ConnectionId, NodeEntry] = {}
        #: other connections of processes that have made several
        self._duplicate_connections: dict[ConnectionId, NodeEntry] = {}
        #: somebody has been here (B); all servers have (B); some node had been told its number before (H)
        self._is_begun = self._is_open = self._is_restarted = False
        #: and all servers had come by then (I)
        self._goes_on = False
        self._barriers = BarrierTable()
        #: incarnations of processes to which this scheduler, and none before it, has given their places
        self._assigned: set[int] = set()
        #: since all workers have left or are lost, some of them awaited: until when
        self._awaited_until = NEVER
        self._now = -NEVER
        self._due = NEVER
        self._said: OutgoingMessages = []

    # -- what happens -------------------------------------------------------------------------------------------------

    def handle(self, owner: ConnectionId, message: NodeMessage, now: float) -> OutgoingMessages:
        """Take in what a connection says; returns who is to be told what, in this order.

        A connection that is told `NodeRefused` is to be closed then.
        """
        self._pass(now)
        if isinstance(message, RegisterNode):
            self._register(owner, message)
        elif self.stop is None:
            if owner in self._duplicate_connections:
                self._go_over_to(owner)
            if owner in self._node_of:
                self._hear(owner, message)
        return self._settle()

    def ended(self, owner: ConnectionId, now: float) -> OutgoingMessages:
        """A connection has ended."""
        self._pass(now)
        for node in self._nodes.values():
            if node.replacement is not None and node.replacement[0] == owner:
                node.replacement = None
        self._duplicate_connections.pop(owner, None)
        self._held.pop(owner, None)
        gone = self._node_of.pop(owner, None)
        if gone is not None:
            gone.owner = None
            spare = next((other for other, node in reversed(self._duplicate_connections.items()) if node is gone), None)
            if spare is not None and self.stop is None:
                self._go_over_to(spare)
            elif self.stop is None and gone.state is NodeState.HERE:
                if gone.replacement is not None:
                    self._lose(gone, "its process ended")
                else:
                    gone.until = now + RECONNECT_GRACE_SECONDS
        return self._settle()

    def tick(self, now: float) -> OutgoingMessages:
        """Time has passed; returns who is to be told what. What has come meanwhile is to be handled before."""
        self._pass(now)
        self._expire(now)
        return self._settle()

    def due(self) -> float | None:
        """When to call `tick`; None: something else must happen first."""
        return None if self._due == NEVER else self._due

    def connected(self) -> int:
        """How many nodes have a connection."""
        return len(self._node_of)

    # -- registering --------------------------------------------------------------------------------------------------

    def _register(self, owner: ConnectionId, message: RegisterNode) -> None:
        """Steps A, D, H, I."""
        if message.is_known and not self._is_begun:
            self.job = message.job
        if problem := self._problem(owner, message):
            self._say(owner, NodeRefused(problem))
        elif message.is_known:
            self._admit(owner, message)
        else:
            self._held[owner] = message

    def _must_wait(self, message: RegisterNode) -> bool:
        """Step H: whether those who know the job may still come, or whose place a process may have is not clear."""
        if not self._is_begun and self._now < self._known_first_until:
            return len(self._held) + 1 < self.terms.num_workers + self.terms.num_servers
        if message.number >= 0 or not self._is_restarted:
            return False
        mine = [node for node in self._nodes.values() if node.role == message.role]
        num_absent = sum(node.state is NodeState.ABSENT for node in mine)
        num_others = sum(one.role == message.role and one.number < 0 for one in self._held.values())
        return num_others + 1 < num_absent and all(node.state is not NodeState.LOST for node in mine)

    def _let_in(self) -> None:
        """Step H: whoever need not wait any more. Servers come first: they may know that the job is not a new one."""
        for owner in sorted(self._held, key=lambda one: not self._held[one].saved):
            message = self._held.pop(owner)
            if self._must_wait(message):
                self._held[owner] = message
            else:
                self._admit(owner, message)

    def _admit(self, owner: ConnectionId, message: RegisterNode) -> None:
        node = self._choose(message)
        if node is None:
            num = self.terms.count(message.role)
            self._say(owner, NodeRefused(f"all {num} {message.role}(s) of this job are there already"))
            return
        if message.is_known and message.incarnation not in self._assigned:
            self._learn(message.left, goes_on=message.is_open)
        if not self._is_open:  # else the snapshots are of this scheduler's time
            for saved in (one for one in message.saved if one.job == self.job):
                self._learn(saved.left, goes_on=True)
        if self._is_final(node) and not node.incarnation:
            self._say(owner, NodeRefused(f"{node.name} was given up: {node.loss.reason if node.loss else ''}"))
        elif node.state is NodeState.ABSENT or (message.is_known and not node.incarnation):
            recovers = message.is_recovery if message.is_known else self._is_restarted or message.is_restart
            self._seat(owner, node, message, is_recovery=recovers)
        elif node.incarnation == message.incarnation:
            self._connect_again(owner, node, message)
        elif message.is_known:
            self._say(owner, NodeRefused(f"another process has become {node.name}"))
        else:
            self._succeed(owner, node, message)
        if self._node_of.get(owner) is node and node.role == "worker":
            for one in message.barriers:
                self._meet(owner, one)

    def _problem(self, owner: ConnectionId, message: RegisterNode) -> str:
        """Why a process cannot be in the job; empty if it can."""
        terms, role = self.terms, message.role
        if self.stop is not None:
            return f"the job is over: {self.stop.reason}"
        if message.is_known and message.job != self.job:
            return "the scheduler that it has found serves another job, on the same port and with the same secret"
        if (
            owner in self._node_of
            or owner in self._duplicate_connections
            or owner in self._held
            or any(node.replacement and node.replacement[0] == owner for node in self._nodes.values())
        ):
            return "this connection has registered before"
        if (message.num_workers, message.num_servers) != (terms.num_workers, terms.num_servers):
            return (
                f"it expects {message.num_workers} worker(s) and {message.num_servers} server(s), but this job has "
                f"{terms.num_workers} and {terms.num_servers} (DMLC_NUM_WORKER, DMLC_NUM_SERVER)"
            )
        if message.number >= terms.count(role):
            return f"there is no {role} {message.number} among {terms.count(role)}"
        if self._goes_on and not message.is_known and role == "server" and not terms.servers_return:
            return (
                "this scheduler goes on with a job that has its servers, since a process of it came first, and servers "
                "without snapshots cannot be replaced. For a new job, end the processes of the old one "
                f"({', '.join(sorted(f'{one.name} on host {one.host}' for one in self._node_of.values()))}), or take "
                "another DMLC_PS_ROOT_PORT"
            )
        return ""

    def _choose(self, message: RegisterNode) -> NodeEntry | None:
        """The place that a process asks for, or gets; None: all are taken."""
        role = message.role
        if message.number >= 0:
            return self._nodes[role, message.number]
        mine = [self._nodes[role, number] for number in range(self.terms.count(role))]
        free = [node for node in mine if node.state is NodeState.ABSENT]
        free += [node for node in mine if node.state is NodeState.LOST]
        free += [node for node in mine if node.state is NodeState.HERE and node.owner is None]
        return free[0] if free else None

    def _learn(self, workers_left: tuple[int, ...], *, goes_on: bool) -> None:
        """Step H: a node knows of the time before this scheduler, or its snapshots do."""
        self._goes_on = self._goes_on or goes_on
        if not self._is_restarted:
            self._is_restarted = True
            for node in self._nodes.values():
                if node.state is NodeState.ABSENT:
                    node.until = self._now + self.terms.return_seconds
        for number in workers_left:
            left = self._nodes.get(("worker", number))
            if left is not None and left.state is NodeState.ABSENT:
                left.state, left.until = NodeState.LEFT, NEVER

    def _succeed(self, owner: ConnectionId, node: NodeEntry, message: RegisterNode) -> None:
        """Another process comes for a place that somebody has, or had."""
        if node.state is NodeState.LEFT:
            self._say(owner, NodeRefused(f"{node.name} has left this job before; it cannot come back"))
        elif node.owner is not None and node.state is NodeState.HERE:
            if node.replacement is not None or self.terms.heartbeat_timeout_seconds == NEVER:
                self._say(owner, NodeRefused(f"{node.name} is there already, on host {node.host}"))
            else:
                node.replacement = owner, message
        else:
            node.replacement = owner, message
            self._lose(node, "its process ended")

    def _seat(self, owner: ConnectionId, node: NodeEntry, message: RegisterNode, *, is_recovery: bool) -> None:
        """A process gets a place."""
        is_news = node.state is NodeState.LOST or (is_recovery and not message.is_known)
        if node.owner is not None:  # a process that is silent; whatever it says now, it is too late
            self._node_of.pop(node.owner)
            self._say(node.owner, NodeRefused(f"another process has become {node.name}"))
        node.state, node.loss, node.is_recovery = NodeState.HERE, None, is_recovery
        node.incarnation = message.incarnation
        self._duplicate_connections = {
            other: each for other, each in self._duplicate_connections.items() if each is not node
        }
        if not message.is_known:
            self._assigned.add(message.incarnation)
        barriers = () if message.is_known or not is_recovery else self._barriers.over()
        self._place(owner, node, message, barriers)
        if is_news:
            self._announce(self._return(node))
        self._introduce(owner)

    def _connect_again(self, owner: ConnectionId, node: NodeEntry, message: RegisterNode) -> None:
        """The process that has the place has a new connection."""
        if self._is_final(node):
            self._say(owner, NodeRefused(f"it was given up: {node.loss.reason if node.loss else ''}"))
            return
        if node.owner is not None:
            self._duplicate_connections[node.owner] = self._node_of.pop(node.owner)
        self._place(owner, node, message, ())
        self._revive(node)
        self._introduce(owner)

    def _go_over_to(self, owner: ConnectionId) -> None:
        """Another connection of a process turns out to be the one that it uses: what it said on two came disordered."""
        node = self._duplicate_connections.pop(owner)
        if node.owner is not None:
            self._duplicate_connections[node.owner] = self._node_of.pop(node.owner)
        node.owner = owner
        self._node_of[owner] = node
        self._say(
            owner, NodeAssigned(node.number, node.is_recovery, self.job)
        )  # so that it says again what it waits for
        self._introduce(owner)

    def _place(
        self, owner: ConnectionId, node: NodeEntry, message: RegisterNode, barriers: tuple[tuple[str, int], ...]
    ) -> None:
        node.owner, node.host, node.address = owner, message.host, message.address
        node.until = NEVER if node.state is NodeState.LEFT else self._silent_at()
        node.heard_at = self._now
        self._node_of[owner] = node
        if not self._is_begun:
            self._begin()
        self._say(owner, NodeAssigned(node.number, node.is_recovery, self.job, barriers))

    def _begin(self) -> None:
        """Step B: the first process is there; the others have so much time."""
        self._is_begun = True
        for node in self._nodes.values():
            if node.state is NodeState.ABSENT and not self._is_restarted:
                node.until = self._now + self._patience(node.role)

    def _introduce(self, newcomer: ConnectionId) -> None:
        """Step B: tell one node, or everybody, where the servers are; and one what has happened before."""
        servers = [self._nodes["server", number] for number in range(self.terms.num_servers)]
        told = [newcomer] if self._is_open else []
        if not self._is_open and all(server.incarnation for server in servers):
            self._is_open, told = True, list(self._node_of)
        for owner in told:
            self._say(owner, ServerList(tuple(server.peer for server in servers)))
        past: list[MembershipEvent] = [node.loss for node in self._nodes.values() if node.loss is not None]
        past += [self._left(node) for node in self._nodes.values() if node.state is NodeState.LEFT]
        if past:
            self._say(newcomer, MembershipNews(tuple(past)))

    # -- signs of life, and their absence -----------------------------------------------------------------------------

    def _hear(self, owner: ConnectionId, message: NodeMessage) -> None:
        node = self._node_of[owner]
        if self._is_final(node):
            self._say(owner, NodeRefused(f"it was given up: {node.loss.reason if node.loss else ''}"))
            return
        self._revive(node)
        if isinstance(message, LeaveJob) and node.state is not NodeState.LEFT:
            node.state, node.until = NodeState.LEFT, NEVER
            self._announce(self._left(node))
        elif isinstance(message, EnterBarrier | AbandonBarrier) and node.role == "worker":
            self._meet(owner, message)
        elif isinstance(message, MissingQuery):
            self._say(owner, MissingReply(*self.absent()))
        elif isinstance(message, SilentQuery):
            self._say(owner, SilentReply(message.seconds, self._num_silent(message.seconds)))

    def _revive(self, node: NodeEntry) -> None:
        """Something was heard of the process that has the place."""
        node.heard_at = self._now
        if node.replacement is not None:
            claimant, node.replacement = node.replacement[0], None
            self._say(claimant, NodeRefused(f"{node.name} is there already, on host {node.host}"))
        if node.state is NodeState.LOST:
            node.state, node.loss = NodeState.HERE, None
            self._announce(self._return(node))
        if node.state is NodeState.HERE:
            node.until = self._silent_at()

    def _lose(self, node: NodeEntry, reason: str) -> None:
        """Steps B, C, D: the process that has the place is gone, or as good as."""
        claimant, node.replacement = node.replacement, None
        if node.state is NodeState.HERE and not self._is_open and not self._is_restarted:
            self._forget(node)
        elif node.state is not NodeState.LOST:
            node.state, node.lost_at = NodeState.LOST, self._now
            self._tell_loss(node, reason, node.role == "server" and self.terms.servers_return)
        if claimant is not None and self._is_final(node):
            self._say(claimant[0], NodeRefused(f"{node.loss}; this job does not go on without it"))
        elif claimant is not None:
            owner, message = claimant
            self._seat(owner, node, message, is_recovery=node.state is NodeState.LOST or message.is_restart)

    def _tell_loss(self, node: NodeEntry, reason: str, will_return: bool) -> None:
        will_return = will_return or (node.role == "worker" and self.terms.policy is LossPolicy.WAIT)
        node.loss = NodeLost(node.role, node.number, node.host, reason, will_return, node.incarnation)
        node.until = self._now + self.terms.return_seconds if will_return and node.role == "server" else NEVER
        self._announce(node.loss)

    def _forget(self, node: NodeEntry) -> None:
        """Step B: as if it had not come."""
        if node.owner is not None:
            self._node_of.pop(node.owner)
            self._say(node.owner, NodeRefused("nothing was heard of it"))
        if node.role == "worker":
            self._barriers.forget(node.number)
        node.state, node.owner, node.incarnation = NodeState.ABSENT, None, 0
        node.until = self._now + self._patience(node.role)

    def _patience(self, role: NodeRole) -> float:
        """How long to wait for one who has not come."""
        return self.terms.start_seconds if role == "server" else self.terms.deadline_seconds

    def _expire(self, now: float) -> None:
        """What follows from silence."""
        if self.stop is None and self._awaited_until <= now:
            reason = "all workers have left or are lost, and nobody came in their place"
            self._end(JobEnded(WORKERS_LOST_EXIT_CODE, reason))
        for node in list(self._nodes.values()):
            if self.stop is not None or node.until > now:
                continue
            if node.state is NodeState.HERE and node.owner is None:
                self._lose(node, "its process ended")
            elif node.state is NodeState.HERE:
                self._lose(node, f"nothing was heard of it for {self.terms.heartbeat_timeout_seconds:g} s")
            elif node.state is NodeState.LOST:
                self._tell_loss(node, f"nobody came in its place within {self.terms.return_seconds:g} s", False)
            elif self._is_restarted:
                self._lose(node, f"it did not come back within {self.terms.return_seconds:g} s")
            else:
                self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """Step B: the time for the start is over."""
        workers, servers = self.absent()
        reason = (
            f"{format_nodes(workers, servers)} did not come in time: after the first process, servers are waited for "
            f"{self.terms.start_seconds:g} s (REIGEN_START_TIMEOUT), workers {self.terms.deadline_seconds:g} s "
            "(REIGEN_DEADLINE)"
        )
        self._end(JobEnded(1, reason, is_late=True, workers=workers))

    def _is_final(self, node: NodeEntry) -> bool:
        """Step D: whether the place of a lost node stays empty."""
        if node.loss is None or (node.role == "worker" and self.terms.policy is LossPolicy.CONTINUE):
            return False
        return not node.loss.will_return

    # -- barriers -----------------------------------------------------------------------------------------------------

    def _meet(self, owner: ConnectionId, message: EnterBarrier | AbandonBarrier) -> None:
        """Step F."""
        name = message.name
        if len(name.encode(errors="replace")) > MAX_BARRIER_NAME_BYTES or not self._barriers.accepts(name):
            reason = f"more than {MAX_BARRIERS} barriers, or a name of more than {MAX_BARRIER_NAME_BYTES} bytes"
            self._say(owner, NodeRefused(reason))
        else:
            self._barriers.hear(self._node_of[owner].number, message, self._needed())

    def _needed(self) -> list[int]:
        """Workers without which no barrier is done."""
        return [
            number
            for number, node in ((n, self._nodes["worker", n]) for n in range(self.terms.num_workers))
            if node.state is not NodeState.LEFT
            and not (node.state is NodeState.LOST and self.terms.policy is LossPolicy.CONTINUE)
        ]

    def _complete(self) -> None:
        """Barriers that are over now: all have come, or somebody has given up."""
        workers = [node for node in self._nodes.values() if node.role == "worker"]
        all_known = not self._is_restarted or all(node.state is not NodeState.ABSENT for node in workers)
        for number, outcome in self._barriers.complete(self._needed(), all_known=all_known):
            owner = self._nodes["worker", number].owner
            if owner is not None:
                self._say(owner, outcome)

    def absent(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Workers and servers that have not come yet, or are lost."""
        absent = [node for node in self._nodes.values() if node.state in {NodeState.ABSENT, NodeState.LOST}]
        workers = tuple(node.number for node in absent if node.role == "worker")
        return workers, tuple(node.number for node in absent if node.role == "server")

    def _num_silent(self, seconds: float) -> int:
        """How many nodes are lost, or were not heard of for so long."""
        return sum(
            node.state is NodeState.LOST or (node.state is NodeState.HERE and self._now - node.heard_at > seconds)
            for node in self._nodes.values()
        )

    # -- time, and what everybody is told -----------------------------------------------------------------------------

    def _pass(self, now: float) -> None:
        if now > self._due + RECONNECT_GRACE_SECONDS:  # this process did not run
            lost_seconds, fresh = now - self._due, now + self.terms.heartbeat_timeout_seconds
            self._awaited_until += lost_seconds
            self._known_first_until += lost_seconds
            for node in self._nodes.values():
                node.until += lost_seconds
                if node.owner is not None:
                    node.heard_at = now
                    node.until = max(node.until, fresh) if node.state is NodeState.HERE else node.until
        self._now = now

    def _silent_at(self) -> float:
        return self._now + self.terms.heartbeat_timeout_seconds

    def _settle(self) -> OutgoingMessages:
        """What follows for all from what has just happened."""
        if self._held and self.stop is None:
            self._let_in()
        if self.stop is None:
            self._complete()
            self._see_the_end()
        times = [self._awaited_until, *(node.until for node in self._nodes.values())]
        if self._held and not self._is_begun:
            times.append(self._known_first_until)
        self._due = NEVER if self.stop is not None else min(times)
        said, self._said = self._said, []
        return said

    def _see_the_end(self) -> None:
        """Step G."""
        states = {node.state for node in self._nodes.values() if node.role == "worker"}
        lost = [node for node in self._nodes.values() if node.loss is not None]
        lost.sort(key=lambda node: node.lost_at)  # the first is the reason
        final = any(self._is_final(node) for node in self._nodes.values())
        is_unheard = self._is_restarted and any(node.state is NodeState.ABSENT for node in self._nodes.values())
        if (
            states - {NodeState.LEFT, NodeState.LOST} or is_unheard
        ):  # servers that come back are to be told the end, too
            self._awaited_until = NEVER
        elif final or (NodeState.LEFT not in states and self.terms.policy is LossPolicy.CONTINUE):
            exit_code = WORKERS_LOST_EXIT_CODE if lost[0].role == "worker" else 1
            self._end(JobEnded(exit_code, "; ".join(str(node.loss) for node in lost)))
        elif states == {NodeState.LEFT}:
            self._end(JobEnded(0, "all workers have left"))
        elif self.terms.policy is LossPolicy.CONTINUE:
            self._end(JobEnded(0, "all workers have left, but for those that were lost"))
        else:
            self._awaited_until = min(self._awaited_until, self._now + self.terms.return_seconds)

    def _end(self, stop: JobEnded) -> None:
        self._announce(stop)
        self.stop = stop
        for node in self._nodes.values():
            if node.replacement is not None:
                self._say(node.replacement[0], NodeRefused(f"the job is over: {stop.reason}"))
                node.replacement = None
        for owner in self._held:
            self._say(owner, NodeRefused(f"the job is over: {stop.reason}"))
        self._held.clear()

    def _announce(self, event: MembershipEvent) -> None:
        self._said += [(owner, MembershipNews((event,))) for owner in self._node_of]

    def _say(self, owner: ConnectionId, answer: SchedulerMessage) -> None:
        self._said.append((owner, answer))

    def _return(self, node: NodeEntry) -> MembershipEvent:
        if node.role == "server":
            return ServerMoved(node.peer)
        return NodeReturned(node.role, node.number, node.host, node.incarnation)

    def _left(self, node: NodeEntry) -> NodeLeft:
        return NodeLeft(node.role, node.number, node.host)

    def validate(self) -> None:
        """Assert what must hold between two events."""
        for owner, node in self._node_of.items():
            assert node.owner == owner
            assert self._nodes[node.role, node.number] is node
        for node in self._nodes.values():
            assert node.owner is None or self._node_of[node.owner] is node
            assert (node.state is NodeState.LOST) == (node.loss is not None)
            assert node.replacement is None or (node.state is NodeState.HERE and node.owner is not None)
            assert node.state is not NodeState.ABSENT or node.owner is None
        assert not self._said
        assert not self._duplicate_connections.keys() & self._node_of.keys()
