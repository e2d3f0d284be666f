"""Who is in a job with parameter servers, as its scheduler keeps it: messages go in, what to tell whom comes out.

No I/O, no clock. The words of the messages stand in `reigen.kv.registry`, those of the events in `reigen.kv.nodes`.

The protocol
------------
A. *Numbers.* A node says its number where it was given one (its task number), and gets it; else the lowest that nobody
   has had, in the order of arrival. What makes no sense is refused.
B. *Start.* When all servers have come for the first time, every node that is there is told where they are, and every
   one that comes later at once. A process that is lost (C) before that is forgotten, as if it had not come. Servers
   that do not come, and later workers, end the job when the time for it is over.
C. *Loss.* A connection that ends without Leave may be made again; after `GRACE_SECONDS` the node counts as lost, and at
   once if another process comes for its number. A node that says nothing for the heartbeat's timeout counts as lost,
   too, but not for the time in which the scheduler itself did not run. All are told (`NodeLost`).
D. *Return.* A lost node that says something is there again, the same process; another process that registers for the
   number of a lost one takes its place (``is_recovery``) and goes on with barriers where the others are. All are told:
   `NodeReturned`, or `ServerMoved`. But where a loss is final (a worker under abort, a server that nobody starts again,
   or not in time) it is refused. While the process that has the number is connected, and may be dead without
   anybody's knowing, another that comes for it waits for a sign of life, or the end, of the first.
E. *Leaving.* All are told of a node that leaves (`NodeLeft`). It is not waited for any more, and does not come back.
F. *Barriers.* A barrier is done for the n-th time when every worker has entered it n times, but those that have left or
   are lost and not awaited. Entering again is answered again.
G. *End.* When all workers have left, the job is over with exit code 0; when all have left or are lost, and nobody came
   in their place, with 1 (under continue: if none has left). All are told (`Stop`), and whoever comes later is refused.
H. *Restart of the scheduler.* Nodes connect again and say what they were told before (`Register.is_known`): their
   numbers, and which workers have left; and how often they have entered which barriers. That is all there is
   to know. Who has not come ``return_seconds`` after the first of them counts as lost. Processes that are not known
   then take places of lost ones: that one comes for the first time, nobody can tell.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto

from reigen.kv.barriers import MAX_BARRIERS, Barriers
from reigen.kv.events import LossPolicy
from reigen.kv.nodes import Event, NodeLeft, NodeLost, NodeReturned, Peer, Role, ServerMoved, Stop
from reigen.kv.registry import (
    MAX_NAME_BYTES,
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
    WhoIsMissing,
    name_nodes,
)

#: How long a node may take to connect again; and how late a `tick` may come before others get their time anew.
GRACE_SECONDS = 1.0
_NEVER = math.inf

Owner = Hashable
Place = tuple[Role, int]
Instructions = list[tuple[Owner, Answer]]


@dataclass(frozen=True)
class Terms:
    """What a job was started with.

    Attributes:
        num_workers: how many.
        num_servers: how many.
        policy: what becomes of the others if a worker is lost.
        servers_return: somebody starts a server again that is lost, and it has snapshots to go on from.
        heartbeat_timeout_seconds: how long a node may be silent; infinite if nodes send no heartbeats.
        return_seconds: how long others wait for a process in place of a lost server; of a lost worker, where no other
            is left; and for the nodes after a restart of the scheduler.
        start_seconds: how long, from the first node's coming, for all servers.
        deadline_seconds: and for all workers.
    """

    num_workers: int
    num_servers: int
    policy: LossPolicy = LossPolicy.ABORT
    servers_return: bool = False
    heartbeat_timeout_seconds: float = 20.0
    return_seconds: float = 30.0
    start_seconds: float = 30.0
    deadline_seconds: float = 600.0

    def count(self, role: Role) -> int:
        """How many nodes of this role there are."""
        return self.num_workers if role == "worker" else self.num_servers


class State(Enum):
    """What is known of a node."""

    #: has not come yet
    ABSENT = auto()
    #: connected, or may connect again
    HERE = auto()
    LOST = auto()
    LEFT = auto()


@dataclass
class Node:
    """A place in the job, and the process that has it.

    Attributes:
        owner: its connection, None where there is none.
        until: when something follows from its silence, whatever state it is in.
        loss: what was told of it, in state LOST.
        lost_at: since when it is.
        claimant: another process that has come for the place.
    """

    role: Role
    number: int
    state: State = State.ABSENT
    owner: Owner | None = None
    host: str = ""
    address: str = ""
    incarnation: int = 0
    is_recovery: bool = False
    until: float = _NEVER
    loss: NodeLost | None = None
    lost_at: float = 0.0
    claimant: tuple[Owner, Register] | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role} {self.number}"

    @property
    def peer(self) -> Peer:
        """A server as workers need to know it."""
        return Peer(self.number, self.address, self.incarnation, self.host)


class Roster:
    """The scheduler's knowledge. An owner names a connection; times are of any steady clock, in seconds.

    Attributes:
        stop: the job is over; None while it is not.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.stop: Stop | None = None
        self._nodes: dict[Place, Node] = {
            (role, number): Node(role, number) for role in ("worker", "server") for number in range(terms.count(role))
        }
        self._node_of: dict[Owner, Node] = {}
        #: other connections of processes that have made several
        self._spare: dict[Owner, Node] = {}
        #: somebody has been here (B); all servers have (B); some node had been told its number before (H)
        self._is_begun = self._is_open = self._is_restarted = False
        self._barriers = Barriers()
        #: incarnations of processes to which this scheduler, and none before it, has given their places
        self._seated: set[int] = set()
        #: since all workers have left or are lost, some of them awaited: until when
        self._awaited_until = _NEVER
        self._now = -_NEVER
        self._due = _NEVER
        self._said: Instructions = []

    # -- what happens -------------------------------------------------------------------------------------------------

    def handle(self, owner: Owner, message: Call, now: float) -> Instructions:
        """Take in what a connection says; returns who is to be told what, in this order.

        A connection that is told `Refused` is to be closed then.
        """
        self._pass(now)
        if isinstance(message, Register):
            self._register(owner, message)
        elif self.stop is None:
            if owner in self._spare:
                self._go_over_to(owner)
            if owner in self._node_of:
                self._hear(owner, message)
        return self._settle()

    def ended(self, owner: Owner, now: float) -> Instructions:
        """A connection has ended."""
        self._pass(now)
        for node in self._nodes.values():
            if node.claimant is not None and node.claimant[0] == owner:
                node.claimant = None
        self._spare.pop(owner, None)
        gone = self._node_of.pop(owner, None)
        if gone is not None:
            gone.owner = None
            spare = next((other for other, node in reversed(self._spare.items()) if node is gone), None)
            if spare is not None and self.stop is None:
                self._go_over_to(spare)
            elif self.stop is None and gone.state is State.HERE:
                if gone.claimant is not None:
                    self._lose(gone, "its process ended")
                else:
                    gone.until = now + GRACE_SECONDS
        return self._settle()

    def tick(self, now: float) -> Instructions:
        """Time has passed; returns who is to be told what. What has come meanwhile is to be handled before."""
        self._pass(now)
        self._expire(now)
        return self._settle()

    def due(self) -> float | None:
        """When to call `tick`; None: something else must happen first."""
        return None if self._due == _NEVER else self._due

    def connected(self) -> int:
        """How many nodes have a connection."""
        return len(self._node_of)

    # -- registering --------------------------------------------------------------------------------------------------

    def _register(self, owner: Owner, message: Register) -> None:
        """Steps A, D, H."""
        node, problem = self._choose(owner, message)
        if node is None:
            self._say(owner, Refused(problem))
            return
        if message.is_known and message.incarnation not in self._seated:
            self._learn(message)
        if self._is_final(node) and not node.incarnation:
            self._say(owner, Refused(f"{node.name} was given up: {node.loss.reason if node.loss else ''}"))
        elif node.state is State.ABSENT or (message.is_known and not node.incarnation):
            recovers = message.is_recovery if message.is_known else self._is_restarted
            self._seat(owner, node, message, is_recovery=recovers)
        elif node.incarnation == message.incarnation:
            self._connect_again(owner, node, message)
        elif message.is_known:
            self._say(owner, Refused(f"another process has become {node.name}"))
        else:
            self._succeed(owner, node, message)

    def _choose(self, owner: Owner, message: Register) -> tuple[Node | None, str]:
        """The place that a process asks for, or why it cannot have any."""
        terms, role = self.terms, message.role
        if self.stop is not None:
            return None, f"the job is over: {self.stop.reason}"
        if owner in self._node_of or any(node.claimant and node.claimant[0] == owner for node in self._nodes.values()):
            return None, "this connection has registered before"
        if (message.num_workers, message.num_servers) != (terms.num_workers, terms.num_servers):
            return None, (
                f"it expects {message.num_workers} worker(s) and {message.num_servers} server(s), but this job has "
                f"{terms.num_workers} and {terms.num_servers} (DMLC_NUM_WORKER, DMLC_NUM_SERVER)"
            )
        if message.number >= terms.count(role):
            return None, f"there is no {role} {message.number} among {terms.count(role)}"
        if message.number >= 0:
            return self._nodes[role, message.number], ""
        mine = [self._nodes[role, number] for number in range(terms.count(role))]
        free = [node for node in mine if node.state is State.ABSENT]
        free += [node for node in mine if node.state is State.LOST]
        free += [node for node in mine if node.state is State.HERE and node.owner is None]
        return (free[0], "") if free else (None, f"all {len(mine)} {role}(s) of this job are there already")

    def _learn(self, message: Register) -> None:
        """Step H: a node knows of the time before this scheduler."""
        if not self._is_restarted:
            self._is_restarted = True
            for node in self._nodes.values():
                if node.state is State.ABSENT:
                    node.until = self._now + self.terms.return_seconds
        for number in message.left:
            left = self._nodes.get(("worker", number))
            if left is not None and left.state is State.ABSENT:
                left.state, left.until = State.LEFT, _NEVER

    def _succeed(self, owner: Owner, node: Node, message: Register) -> None:
        """Another process comes for a place that somebody has, or had."""
        if node.state is State.LEFT:
            self._say(owner, Refused(f"{node.name} has left this job before; it cannot come back"))
        elif node.owner is not None and node.state is State.HERE:
            if node.claimant is not None or self.terms.heartbeat_timeout_seconds == _NEVER:
                self._say(owner, Refused(f"{node.name} is there already, on host {node.host}"))
            else:
                node.claimant = owner, message
        else:
            node.claimant = owner, message
            self._lose(node, "its process ended")

    def _seat(self, owner: Owner, node: Node, message: Register, *, is_recovery: bool) -> None:
        """A process gets a place."""
        is_news = node.state is State.LOST or (is_recovery and not message.is_known)
        if node.owner is not None:  # a process that is silent; whatever it says now, it is too late
            self._node_of.pop(node.owner)
            self._say(node.owner, Refused(f"another process has become {node.name}"))
        node.state, node.loss, node.is_recovery = State.HERE, None, is_recovery
        node.incarnation = message.incarnation
        self._spare = {other: each for other, each in self._spare.items() if each is not node}
        if not message.is_known:
            self._seated.add(message.incarnation)
        barriers = () if message.is_known or not is_recovery else self._barriers.done()
        self._place(owner, node, message, barriers)
        if is_news:
            self._announce(self._return(node))
        self._introduce(owner)

    def _connect_again(self, owner: Owner, node: Node, message: Register) -> None:
        """The process that has the place has a new connection."""
        if self._is_final(node):
            self._say(owner, Refused(f"it was given up: {node.loss.reason if node.loss else ''}"))
            return
        if node.owner is not None:
            self._spare[node.owner] = self._node_of.pop(node.owner)
        self._place(owner, node, message, ())
        self._revive(node)
        self._introduce(owner)

    def _go_over_to(self, owner: Owner) -> None:
        """Another connection of a process turns out to be the one that it uses: what it said on two came disordered."""
        node = self._spare.pop(owner)
        if node.owner is not None:
            self._spare[node.owner] = self._node_of.pop(node.owner)
        node.owner = owner
        self._node_of[owner] = node
        self._say(owner, Assigned(node.number, node.is_recovery))  # so that it says again what it waits for
        self._introduce(owner)

    def _place(self, owner: Owner, node: Node, message: Register, barriers: tuple[tuple[str, int], ...]) -> None:
        node.owner, node.host, node.address = owner, message.host, message.address
        node.until = _NEVER if node.state is State.LEFT else self._silent_at()
        self._node_of[owner] = node
        self._say(owner, Assigned(node.number, node.is_recovery, barriers))

    def _introduce(self, newcomer: Owner) -> None:
        """Step B: tell one node, or everybody, where the servers are; and one what has happened before."""
        servers = [self._nodes["server", number] for number in range(self.terms.num_servers)]
        told = [newcomer] if self._is_open else []
        if not self._is_open and all(server.incarnation for server in servers):
            self._is_open, told = True, list(self._node_of)
        for owner in told:
            self._say(owner, Welcome(tuple(server.peer for server in servers)))
        past: list[Event] = [node.loss for node in self._nodes.values() if node.loss is not None]
        past += [self._left(node) for node in self._nodes.values() if node.state is State.LEFT]
        if past:
            self._say(newcomer, News(tuple(past)))

    # -- signs of life, and their absence -----------------------------------------------------------------------------

    def _hear(self, owner: Owner, message: Call) -> None:
        node = self._node_of[owner]
        if self._is_final(node):
            self._say(owner, Refused(f"it was given up: {node.loss.reason if node.loss else ''}"))
            return
        self._revive(node)
        if isinstance(message, Leave) and node.state is not State.LEFT:
            node.state, node.until = State.LEFT, _NEVER
            self._announce(self._left(node))
        elif isinstance(message, EnterBarrier) and node.role == "worker":
            self._enter(owner, node, message)
        elif isinstance(message, WhoIsMissing):
            self._say(owner, self._missing(message))

    def _revive(self, node: Node) -> None:
        """Something was heard of the process that has the place."""
        if node.claimant is not None:
            claimant, node.claimant = node.claimant[0], None
            self._say(claimant, Refused(f"{node.name} is there already, on host {node.host}"))
        if node.state is State.LOST:
            node.state, node.loss = State.HERE, None
            self._announce(self._return(node))
        if node.state is State.HERE:
            node.until = self._silent_at()

    def _lose(self, node: Node, reason: str) -> None:
        """Steps B, C, D: the process that has the place is gone, or as good as."""
        claimant, node.claimant = node.claimant, None
        if node.state is State.HERE and not self._is_open and not self._is_restarted:
            self._forget(node)
        elif node.state is not State.LOST:
            node.state, node.lost_at = State.LOST, self._now
            self._tell_loss(node, reason, node.role == "server" and self.terms.servers_return)
        if claimant is not None and self._is_final(node):
            self._say(claimant[0], Refused(f"{node.loss}; this job does not go on without it"))
        elif claimant is not None:
            owner, message = claimant
            self._seat(owner, node, message, is_recovery=node.state is State.LOST)

    def _tell_loss(self, node: Node, reason: str, will_return: bool) -> None:
        will_return = will_return or (node.role == "worker" and self.terms.policy is LossPolicy.WAIT)
        node.loss = NodeLost(node.role, node.number, node.host, reason, will_return, node.incarnation)
        node.until = self._now + self.terms.return_seconds if will_return and node.role == "server" else _NEVER
        self._announce(node.loss)

    def _forget(self, node: Node) -> None:
        """Step B: as if it had not come."""
        if node.owner is not None:
            self._node_of.pop(node.owner)
            self._say(node.owner, Refused("nothing was heard of it"))
        if node.role == "worker":
            self._barriers.forget(node.number)
        node.state, node.owner, node.incarnation = State.ABSENT, None, 0
        node.until = self._now + self._patience(node.role)

    def _patience(self, role: Role) -> float:
        """How long to wait for one who has not come."""
        return self.terms.start_seconds if role == "server" else self.terms.deadline_seconds

    def _expire(self, now: float) -> None:
        """What follows from silence."""
        if self.stop is None and self._awaited_until <= now:
            self._end(1, "all workers have left or are lost, and nobody came in their place")
        for node in list(self._nodes.values()):
            if self.stop is not None or node.until > now:
                continue
            if node.state is State.HERE and node.owner is None:
                self._lose(node, "its process ended")
            elif node.state is State.HERE:
                self._lose(node, f"nothing was heard of it for {self.terms.heartbeat_timeout_seconds:g} s")
            elif node.state is State.LOST:
                self._tell_loss(node, f"nobody came in its place within {self.terms.return_seconds:g} s", False)
            elif self._is_restarted:
                self._lose(node, f"it did not come back within {self.terms.return_seconds:g} s")
            else:
                missing = self._missing(WhoIsMissing())
                self._end(1, f"{name_nodes(missing.workers, missing.servers)} did not come in time")

    def _is_final(self, node: Node) -> bool:
        """Step D: whether the place of a lost node stays empty."""
        if node.loss is None or (node.role == "worker" and self.terms.policy is LossPolicy.CONTINUE):
            return False
        return not node.loss.will_return

    # -- barriers -----------------------------------------------------------------------------------------------------

    def _enter(self, owner: Owner, node: Node, message: EnterBarrier) -> None:
        """Step F."""
        too_long = len(message.name.encode(errors="replace")) > MAX_NAME_BYTES
        if too_long or not self._barriers.enter(message.name, node.number, message.sequence):
            reason = f"more than {MAX_BARRIERS} barriers, or a name of more than {MAX_NAME_BYTES} bytes"
            self._say(owner, Refused(reason))

    def _needed(self) -> list[int]:
        """Workers without which no barrier is done."""
        return [
            number
            for number, node in ((n, self._nodes["worker", n]) for n in range(self.terms.num_workers))
            if node.state is not State.LEFT
            and not (node.state is State.LOST and self.terms.policy is LossPolicy.CONTINUE)
        ]

    def _complete(self) -> None:
        """Barriers that are done now."""
        for number, name, sequence in self._barriers.complete(self._needed()):
            owner = self._nodes["worker", number].owner
            if owner is not None:
                self._say(owner, BarrierDone(name, sequence))

    def absent(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Workers and servers that have not come yet, or are lost."""
        absent = [node for node in self._nodes.values() if node.state in {State.ABSENT, State.LOST}]
        workers = tuple(node.number for node in absent if node.role == "worker")
        return workers, tuple(node.number for node in absent if node.role == "server")

    def _missing(self, message: WhoIsMissing) -> Missing:
        workers, servers = self.absent()
        if message.barrier:
            workers, servers = self._barriers.missing(message.barrier, message.sequence, self._needed()), ()
        return Missing(message.barrier, message.sequence, workers, servers)

    # -- time, and what everybody is told -----------------------------------------------------------------------------

    def _pass(self, now: float) -> None:
        if now > self._due + GRACE_SECONDS:  # this process did not run: what others said meanwhile may be on its way
            fresh = now + self.terms.heartbeat_timeout_seconds
            for node in self._node_of.values():
                node.until = max(node.until, fresh) if node.state is State.HERE else node.until
        self._now = now

    def _silent_at(self) -> float:
        return self._now + self.terms.heartbeat_timeout_seconds

    def _settle(self) -> Instructions:
        """What follows for all from what has just happened."""
        if not self._is_begun and self._node_of:
            self._is_begun = True
            for node in self._nodes.values():
                if node.state is State.ABSENT and not self._is_restarted:
                    node.until = self._now + self._patience(node.role)
        if self.stop is None:
            self._complete()
            self._see_the_end()
        times = [self._awaited_until, *(node.until for node in self._nodes.values())]
        self._due = _NEVER if self.stop is not None else min(times)
        said, self._said = self._said, []
        return said

    def _see_the_end(self) -> None:
        """Step G."""
        states = {node.state for node in self._nodes.values() if node.role == "worker"}
        lost = [node for node in self._nodes.values() if node.loss is not None]
        losses = [str(node.loss) for node in sorted(lost, key=lambda node: node.lost_at)]  # the first is the reason
        final = any(self._is_final(node) for node in self._nodes.values())
        if states - {State.LEFT, State.LOST}:
            self._awaited_until = _NEVER
        elif final or (State.LEFT not in states and self.terms.policy is LossPolicy.CONTINUE):
            self._end(1, "; ".join(losses))
        elif states == {State.LEFT}:
            self._end(0, "all workers have left")
        elif self.terms.policy is LossPolicy.CONTINUE:
            self._end(0, "all workers have left, but for those that were lost")
        else:
            self._awaited_until = min(self._awaited_until, self._now + self.terms.return_seconds)

    def _end(self, exit_code: int, reason: str) -> None:
        self._announce(Stop(exit_code, reason))
        self.stop = Stop(exit_code, reason)
        for node in self._nodes.values():
            if node.claimant is not None:
                self._say(node.claimant[0], Refused(f"the job is over: {reason}"))
                node.claimant = None

    def _announce(self, event: Event) -> None:
        self._said += [(owner, News((event,))) for owner in self._node_of]

    def _say(self, owner: Owner, answer: Answer) -> None:
        self._said.append((owner, answer))

    def _return(self, node: Node) -> Event:
        if node.role == "server":
            return ServerMoved(node.peer)
        return NodeReturned(node.role, node.number, node.host, node.incarnation)

    def _left(self, node: Node) -> NodeLeft:
        return NodeLeft(node.role, node.number, node.host)

    def validate(self) -> None:
        """Assert what must hold between two events."""
        for owner, node in self._node_of.items():
            assert node.owner == owner
            assert self._nodes[node.role, node.number] is node
        for node in self._nodes.values():
            assert node.owner is None or self._node_of[node.owner] is node
            assert (node.state is State.LOST) == (node.loss is not None)
            assert node.claimant is None or (node.state is State.HERE and node.owner is not None)
            assert node.state is not State.ABSENT or node.owner is None
        assert not self._said
        assert not self._spare.keys() & self._node_of.keys()
