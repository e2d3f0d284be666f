"""Who is in a job with parameter servers, as its scheduler keeps it: messages go in, what to tell whom comes out.

No I/O, no clock. The words of the messages stand in `reigen.kv.registry`, those of the events in `reigen.kv.nodes`.

The protocol
------------
A. *Numbers.* A node says its number where it was given one (its task number), and gets it; else the lowest that nobody
   has had, in the order of arrival. What makes no sense is refused.
B. *Start.* When all servers have come for the first time, every node that is there is told where they are, and every
   one that comes later at once. A process that is lost (C) before that is forgotten, as if it had not come. Servers
   that do not come, and later workers, end the job when the time for it is over. No time counts for anything in which
   the scheduler itself did not run: what others said meanwhile is still to be read.
C. *Loss.* A connection that ends without Leave may be made again; after `GRACE_SECONDS` the node counts as lost, and at
   once if another process comes for its number. A node that says nothing for the heartbeat's timeout counts as lost,
   too. All are told (`NodeLost`).
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
   that was lost first, else 1. All are told (`Stop`), and whoever comes later is refused.
   After a restart (H) that waits for those who have not come back: they are to be told, too.
H. *Restart of the scheduler.* Nodes connect again and say what they were told before (`Register.is_known`): their
   numbers, and which workers have left; how often they have entered which barriers, and how these ended. That is all
   there is to know. Who has not come ``return_seconds`` after the first of them counts as lost, and barriers are not
   given up before. Processes that are not known then take places of lost ones: that one comes for the first time,
   nobody can tell.
I. *Other jobs.* A job has a number: it follows from its secret, where a launcher made that for it alone; else its first
   scheduler chose it. Of the latter kind, a scheduler to which a known process comes first goes on with that one's job;
   one to which an unknown process comes first has a new job (`kv.scheduler` lets known ones come first where it can
   tell that there are some). Processes of any other job
   are refused. Where a job goes on, and servers cannot return, an unknown server is refused, too: what it comes for is
   a new job on the same port and with the same secret, while processes of the old one still run.
"""

from __future__ import annotations

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from reigen.kv.barriers import MAX_BARRIERS, Barriers
from reigen.kv.events import LossPolicy
from reigen.kv.nodes import Event, NodeLeft, NodeLost, NodeReturned, Role, ServerMoved, Stop
from reigen.kv.registry import (
    MAX_NAME_BYTES,
    Answer,
    Assigned,
    Call,
    EnterBarrier,
    GiveUp,
    Leave,
    Missing,
    News,
    Refused,
    Register,
    Silent,
    Welcome,
    WhoIsMissing,
    WhoIsSilent,
    name_nodes,
)
from reigen.kv.seats import NEVER, Node, Owner, State, Terms

#: How long a node may take to connect again; and how late a `tick` may come before others get their time anew.
GRACE_SECONDS = 1.0
Place = tuple[Role, int]
Instructions = list[tuple[Owner, Answer]]


class Roster:
    """The scheduler's knowledge. An owner names a connection; times are of any steady clock, in seconds.

    Args:
        terms: what the job was started with.
        job: its number, if it is a new one; not 0.

    Attributes:
        job: its number.
        stop: the job is over; None while it is not.
    """

    def __init__(self, terms: Terms, job: int) -> None:
        self.terms, self.job = terms, job
        self.stop: Stop | None = None
        self._nodes: dict[Place, Node] = {
            (role, number): Node(role, number) for role in ("worker", "server") for number in range(terms.count(role))
        }
        self._node_of: dict[Owner, Node] = {}
        #: other connections of processes that have made several
        self._spare: dict[Owner, Node] = {}
        #: somebody has been here (B); all servers have (B); some node had been told its number before (H)
        self._is_begun = self._is_open = self._is_restarted = False
        #: and all servers had come by then (I)
        self._goes_on = False
        self._barriers = Barriers()
        #: incarnations of processes to which this scheduler, and none before it, has given their places
        self._seated: set[int] = set()
        #: since all workers have left or are lost, some of them awaited: until when
        self._awaited_until = NEVER
        self._now = -NEVER
        self._due = NEVER
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
        return None if self._due == NEVER else self._due

    def connected(self) -> int:
        """How many nodes have a connection."""
        return len(self._node_of)

    # -- registering --------------------------------------------------------------------------------------------------

    def _register(self, owner: Owner, message: Register) -> None:
        """Steps A, D, H, I."""
        if message.is_known and not self._is_begun:
            self.job = message.job
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
        if self._node_of.get(owner) is node and node.role == "worker":
            for one in message.barriers:
                self._meet(owner, one)

    def _choose(self, owner: Owner, message: Register) -> tuple[Node | None, str]:
        """The place that a process asks for, or why it cannot have any."""
        terms, role = self.terms, message.role
        if self.stop is not None:
            return None, f"the job is over: {self.stop.reason}"
        if message.is_known and message.job != self.job:
            return None, "the scheduler that it has found serves another job, on the same port and with the same secret"
        if (
            owner in self._node_of
            or owner in self._spare
            or any(node.claimant and node.claimant[0] == owner for node in self._nodes.values())
        ):
            return None, "this connection has registered before"
        if (message.num_workers, message.num_servers) != (terms.num_workers, terms.num_servers):
            return None, (
                f"it expects {message.num_workers} worker(s) and {message.num_servers} server(s), but this job has "
                f"{terms.num_workers} and {terms.num_servers} (DMLC_NUM_WORKER, DMLC_NUM_SERVER)"
            )
        if message.number >= terms.count(role):
            return None, f"there is no {role} {message.number} among {terms.count(role)}"
        if self._goes_on and not message.is_known and role == "server" and not terms.servers_return:
            return None, (
                "this scheduler goes on with a job that has its servers, since a process of it came first, and servers "
                "without snapshots cannot be replaced. For a new job, end the processes of the old one "
                f"({', '.join(sorted(f'{one.name} on host {one.host}' for one in self._node_of.values()))}), or take "
                "another DMLC_PS_ROOT_PORT"
            )
        if message.number >= 0:
            return self._nodes[role, message.number], ""
        mine = [self._nodes[role, number] for number in range(terms.count(role))]
        free = [node for node in mine if node.state is State.ABSENT]
        free += [node for node in mine if node.state is State.LOST]
        free += [node for node in mine if node.state is State.HERE and node.owner is None]
        return (free[0], "") if free else (None, f"all {len(mine)} {role}(s) of this job are there already")

    def _learn(self, message: Register) -> None:
        """Step H: a node knows of the time before this scheduler."""
        self._goes_on = self._goes_on or message.is_open
        if not self._is_restarted:
            self._is_restarted = True
            for node in self._nodes.values():
                if node.state is State.ABSENT:
                    node.until = self._now + self.terms.return_seconds
        for number in message.left:
            left = self._nodes.get(("worker", number))
            if left is not None and left.state is State.ABSENT:
                left.state, left.until = State.LEFT, NEVER

    def _succeed(self, owner: Owner, node: Node, message: Register) -> None:
        """Another process comes for a place that somebody has, or had."""
        if node.state is State.LEFT:
            self._say(owner, Refused(f"{node.name} has left this job before; it cannot come back"))
        elif node.owner is not None and node.state is State.HERE:
            if node.claimant is not None or self.terms.heartbeat_timeout_seconds == NEVER:
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
        barriers = () if message.is_known or not is_recovery else self._barriers.over()
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
        self._say(owner, Assigned(node.number, node.is_recovery, self.job))  # so that it says again what it waits for
        self._introduce(owner)

    def _place(self, owner: Owner, node: Node, message: Register, barriers: tuple[tuple[str, int], ...]) -> None:
        node.owner, node.host, node.address = owner, message.host, message.address
        node.until = NEVER if node.state is State.LEFT else self._silent_at()
        node.heard_at = self._now
        self._node_of[owner] = node
        self._say(owner, Assigned(node.number, node.is_recovery, self.job, barriers))

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
            node.state, node.until = State.LEFT, NEVER
            self._announce(self._left(node))
        elif isinstance(message, EnterBarrier | GiveUp) and node.role == "worker":
            self._meet(owner, message)
        elif isinstance(message, WhoIsMissing):
            self._say(owner, Missing(*self.absent()))
        elif isinstance(message, WhoIsSilent):
            self._say(owner, Silent(message.seconds, self._num_silent(message.seconds)))

    def _revive(self, node: Node) -> None:
        """Something was heard of the process that has the place."""
        node.heard_at = self._now
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
        node.until = self._now + self.terms.return_seconds if will_return and node.role == "server" else NEVER
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
            reason = "all workers have left or are lost, and nobody came in their place"
            self._end(Stop(WORKERS_LOST_EXIT_CODE, reason))
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
                self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """Step B: the time for the start is over."""
        workers, servers = self.absent()
        reason = (
            f"{name_nodes(workers, servers)} did not come in time: after the first process, servers are waited for "
            f"{self.terms.start_seconds:g} s (REIGEN_START_TIMEOUT), workers {self.terms.deadline_seconds:g} s "
            "(REIGEN_DEADLINE)"
        )
        self._end(Stop(1, reason, is_late=True, workers=workers))

    def _is_final(self, node: Node) -> bool:
        """Step D: whether the place of a lost node stays empty."""
        if node.loss is None or (node.role == "worker" and self.terms.policy is LossPolicy.CONTINUE):
            return False
        return not node.loss.will_return

    # -- barriers -----------------------------------------------------------------------------------------------------

    def _meet(self, owner: Owner, message: EnterBarrier | GiveUp) -> None:
        """Step F."""
        name = message.name
        if len(name.encode(errors="replace")) > MAX_NAME_BYTES or not self._barriers.accepts(name):
            reason = f"more than {MAX_BARRIERS} barriers, or a name of more than {MAX_NAME_BYTES} bytes"
            self._say(owner, Refused(reason))
        else:
            self._barriers.hear(self._node_of[owner].number, message, self._needed())

    def _needed(self) -> list[int]:
        """Workers without which no barrier is done."""
        return [
            number
            for number, node in ((n, self._nodes["worker", n]) for n in range(self.terms.num_workers))
            if node.state is not State.LEFT
            and not (node.state is State.LOST and self.terms.policy is LossPolicy.CONTINUE)
        ]

    def _complete(self) -> None:
        """Barriers that are over now: all have come, or somebody has given up."""
        workers = [node for node in self._nodes.values() if node.role == "worker"]
        all_known = not self._is_restarted or all(node.state is not State.ABSENT for node in workers)
        for number, outcome in self._barriers.complete(self._needed(), all_known=all_known):
            owner = self._nodes["worker", number].owner
            if owner is not None:
                self._say(owner, outcome)

    def absent(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Workers and servers that have not come yet, or are lost."""
        absent = [node for node in self._nodes.values() if node.state in {State.ABSENT, State.LOST}]
        workers = tuple(node.number for node in absent if node.role == "worker")
        return workers, tuple(node.number for node in absent if node.role == "server")

    def _num_silent(self, seconds: float) -> int:
        """How many nodes are lost, or were not heard of for so long."""
        return sum(
            node.state is State.LOST or (node.state is State.HERE and self._now - node.heard_at > seconds)
            for node in self._nodes.values()
        )

    # -- time, and what everybody is told -----------------------------------------------------------------------------

    def _pass(self, now: float) -> None:
        if now > self._due + GRACE_SECONDS:  # this process did not run
            lost_seconds, fresh = now - self._due, now + self.terms.heartbeat_timeout_seconds
            self._awaited_until += lost_seconds
            for node in self._nodes.values():
                node.until += lost_seconds
                if node.owner is not None:
                    node.heard_at = now
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
        self._due = NEVER if self.stop is not None else min(times)
        said, self._said = self._said, []
        return said

    def _see_the_end(self) -> None:
        """Step G."""
        states = {node.state for node in self._nodes.values() if node.role == "worker"}
        lost = [node for node in self._nodes.values() if node.loss is not None]
        lost.sort(key=lambda node: node.lost_at)  # the first is the reason
        final = any(self._is_final(node) for node in self._nodes.values())
        is_unheard = self._is_restarted and any(node.state is State.ABSENT for node in self._nodes.values())
        if states - {State.LEFT, State.LOST} or is_unheard:  # servers that come back are to be told the end, too
            self._awaited_until = NEVER
        elif final or (State.LEFT not in states and self.terms.policy is LossPolicy.CONTINUE):
            exit_code = WORKERS_LOST_EXIT_CODE if lost[0].role == "worker" else 1
            self._end(Stop(exit_code, "; ".join(str(node.loss) for node in lost)))
        elif states == {State.LEFT}:
            self._end(Stop(0, "all workers have left"))
        elif self.terms.policy is LossPolicy.CONTINUE:
            self._end(Stop(0, "all workers have left, but for those that were lost"))
        else:
            self._awaited_until = min(self._awaited_until, self._now + self.terms.return_seconds)

    def _end(self, stop: Stop) -> None:
        self._announce(stop)
        self.stop = stop
        for node in self._nodes.values():
            if node.claimant is not None:
                self._say(node.claimant[0], Refused(f"the job is over: {stop.reason}"))
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
