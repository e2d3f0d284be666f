"""A job's nodes and its scheduler under random schedules: connections that break, processes that die, stop for a while,
and are replaced, a scheduler that is started again. `cluster.membership.table` on one side,
`cluster.membership.view` on the other are the real ones; time is made up. Workers pass barriers, one after the other,
and leave.

In durable jobs servers have disks, and save each push before they acknowledge it. There anybody may be killed at any
time, in any order, and is started again; what was acknowledged must be known to every later process of the server.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from reigen.cluster.membership.members import JobSpec, LossPolicy, parameter_server_job
from reigen.cluster.membership.messages import (
    MEMBER_CODEC,
    MEMBERSHIP_REPLY_CODEC,
    BarrierOver,
    EnterBarrier,
    JobEnded,
    LeaveJob,
    MemberHeartbeat,
    MemberLeft,
    MemberLost,
    MemberMessage,
    MemberRefused,
    MembershipNews,
    RegisterMember,
    SavedJob,
)
from reigen.cluster.membership.table import MembershipTable
from reigen.cluster.membership.view import JobView

MOST_STEPS = 20_000
BEAT_SECONDS = 2.0
#: No message is on its way for longer, so that a connection is made again before it counts as a loss.
LONGEST_TRAVEL_SECONDS = 0.3
RECONNECT_SECONDS = 0.1
KNOWN_FIRST_SECONDS = 15.0


@dataclass(frozen=True)
class Plan:
    """What one seed stands for."""

    terms: JobSpec
    #: names of barriers, in the order in which every worker passes them
    barriers: tuple[str, ...]
    faults: dict[str, int]
    pace: float
    hurry: int
    #: nodes are told their numbers
    numbered: bool
    #: how likely it is that a worker at a barrier loses its patience with the next heartbeat
    haste: float
    #: everybody who is killed is started again, and servers have disks
    durable: bool = False
    #: a launcher has made the secret for this job: its number follows from it
    launched: bool = True

    @property
    def policy(self) -> LossPolicy:
        """What becomes of the others when a worker is lost."""
        return self.terms.roles["worker"].on_loss


def make_plan(rng: random.Random) -> Plan:
    """Draw a schedule's parameters."""
    terms = parameter_server_job(
        rng.choice((1, 2, 2, 3, 4)),
        rng.choice((1, 1, 2, 3)),
        policy=rng.choice((LossPolicy.ABORT, LossPolicy.CONTINUE, LossPolicy.WAIT)),
        servers_return=rng.random() < 0.7,
        deadline_seconds=60.0,
    )
    restarts = rng.random() < 0.4
    faults = {
        "cut": rng.choice((0, 0, 2, 4)),
        "freeze": rng.choice((0, 0, 0, 1)),
        "kill": 0 if restarts else rng.choice((0, 1, 1, 2, 3)),
        "crash": rng.choice((1, 1, 2)) if restarts else 0,
    }
    return Plan(
        terms,
        tuple(rng.choice("abc") for _ in range(rng.randint(0, 8))),
        faults,
        pace=rng.choice((0.1, 0.03, 0.01)),
        hurry=rng.choice((1, 5, 20)),
        numbered=rng.random() < 0.7,
        haste=rng.choice((0.0, 0.1, 0.5)),
    )


def make_durable_plan(rng: random.Random) -> Plan:
    """Draw the parameters of a durable job's schedule."""
    terms = parameter_server_job(
        rng.choice((1, 2, 2, 3)),
        rng.choice((1, 2, 2)),
        policy=LossPolicy.WAIT,
        servers_return=True,
        deadline_seconds=60.0,
    )
    faults = {
        "cut": rng.choice((0, 0, 2)),
        "freeze": rng.choice((0, 0, 1)),
        "kill": rng.choice((0, 1, 2, 4)),
        "crash": rng.choice((0, 1, 2, 3)),
        "massacre": rng.choice((0, 1, 1, 2)),
    }
    return Plan(
        terms,
        tuple(rng.choice("abc") for _ in range(rng.randint(1, 12))),
        faults,
        pace=rng.choice((0.1, 0.03, 0.01)),
        hurry=rng.choice((1, 5, 20)),
        numbered=rng.random() < 0.7,
        haste=0.02,
        durable=True,
        launched=rng.random() < 0.6,
    )


@dataclass
class Node:
    """A process, its connection, and what it says on it."""

    standing: JobView
    #: number of its connection, 0 while there is none
    link: int = 0
    alive: bool = True
    frozen_until: float = 0.0
    #: when it does what it does next: connects, or says that it lives
    next: float = 0.0
    #: what comes next in its program; None: not begun
    step: int | None = None
    entry: tuple[str, int] | None = None
    has_given_up: bool = False
    #: pushes that a server knows; None: it does not serve yet
    pushes: set[int] | None = None

    @property
    def is_over(self) -> bool:
        return self.standing.failure is not None


@dataclass
class Message:
    """On its way; ``payload`` None: the connection has ended."""

    at: float
    payload: bytes | None


@dataclass
class Simulator:
    """One schedule."""

    seed: int
    durable: bool = False
    log: list[str] | None = None
    seen: Counter[str] = field(default_factory=Counter)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.plan = (make_durable_plan if self.durable else make_plan)(self.rng)
        self.left = dict(self.plan.faults)
        self.roster = self._new_roster(is_first=True)
        #: (job, worker): those of which servers have acknowledged something
        self.heard: set[tuple[int, int]] = set()
        #: (job, number): what servers have saved, and acknowledged; and of each job, who has left, as servers saved it
        self.disks: dict[tuple[int, int], set[int]] = {}
        self.acknowledged: dict[tuple[int, int], set[int]] = {}
        self.saved_left: dict[int, set[int]] = {}
        self.num_pushes = 0
        #: the scheduler has just said how a barrier ended
        self.is_telling = False
        #: how each barrier ended, as workers were told: by their incarnations, whether it is broken
        self.outcomes: dict[tuple[str, int], dict[int, bool]] = {}
        self.nodes: list[Node] = []
        #: by connection: to the scheduler, and to the node
        self.up: dict[int, deque[Message]] = {}
        self.down: dict[int, deque[Message]] = {}
        self.owners: dict[int, Node] = {}
        #: connections that have ended, or will when their last messages have been read
        self.broken: set[int] = set()
        self.links = self.incarnations = 0
        #: (when, role, number): processes that are to be started
        self.births: list[tuple[float, Any, int, bool]] = []
        self.lost_workers: set[int] = set()
        #: nothing has happened from which the job cannot recover
        self.is_harmless = True
        terms = self.plan.terms
        places: list[tuple[Any, int]] = [("worker", n) for n in range(terms.counts["worker"])]
        places += [("server", n) for n in range(terms.counts["server"])]
        for role, number in places:
            told = number if self.plan.numbered else -1
            self.births.append((self.now + self.rng.random() * (2 if self.durable else 20), role, told, False))

    def _new_roster(self, *, is_first: bool) -> MembershipTable:
        """A scheduler; whether it is the first one, only a launcher tells."""
        if not self.plan.durable:
            return MembershipTable(self.plan.terms, 1 if is_first else 1 + self.rng.getrandbits(62))
        if self.plan.launched:
            return MembershipTable(self.plan.terms, 1, -1.0 if is_first else self.now + KNOWN_FIRST_SECONDS)
        return MembershipTable(self.plan.terms, 1 + self.rng.getrandbits(62), self.now + KNOWN_FIRST_SECONDS)

    def note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.append(" ".join([f"{self.now:.2f}", *map(str, parts)]))

    # -- the run

    def run(self) -> None:
        self.note(self.plan)
        for _ in range(MOST_STEPS):
            if self._is_finished():
                break
            self._step()
        else:
            raise AssertionError("it does not end")
        self._check_end()

    def _is_finished(self) -> bool:
        return self.roster.stop is not None and not any(self.up.values()) and not any(self.down.values())

    def _step(self) -> None:
        may_crash = self.plan.durable or self._here()
        faults = [kind for kind, count in self.left.items() if count and (kind != "crash" or may_crash)]
        if "crash" in faults and self.is_telling and self.rng.random() < 0.2:  # some may have heard, others not
            self._fault("crash")
            return
        self.is_telling = False
        if faults and self.rng.random() < self.plan.pace and self.roster.stop is None:
            self._fault(self.rng.choice(faults))
            return
        lines = [(line, False) for line, messages in self.up.items() if messages]
        lines += [(line, True) for line, messages in self.down.items() if messages and self._reads(line)]
        oldest = min(((self.down if is_down else self.up)[line][0].at for line, is_down in lines), default=self.now)
        if lines and (self.rng.randrange(self.plan.hurry + 1) or self.now - oldest > LONGEST_TRAVEL_SECONDS - 0.1):
            self._deliver(*self.rng.choice(lines))
        else:
            self._pass(self.rng.choice((0.01, 0.05, 0.1)) if lines else 0.1)

    def _reads(self, line: int) -> bool:
        node = self.owners[line]
        return not (node.alive and node.frozen_until > self.now)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        due = self.roster.due()
        if due is not None and due <= self.now:
            self._carry(self.roster.tick(self.now))
        for birth in [birth for birth in self.births if birth[0] <= self.now]:
            self.births.remove(birth)
            self._start(*birth[1:])
        for node in self.nodes:
            if node.alive and not node.is_over and node.next <= self.now and node.frozen_until <= self.now:
                if not node.link:
                    self._connect(node)
                elif node.standing.is_assigned:
                    self._say(node, MemberHeartbeat())
                self._lose_patience(node)
                node.next = self.now + BEAT_SECONDS

    def _start(self, role: Any, number: int, is_restart: bool) -> None:
        if self.roster.stop is not None:
            return
        self.incarnations += 1
        terms = self.plan.terms
        address = f"h:{self.incarnations}" if role == "server" else ""
        me = RegisterMember(role, number, "h", self.incarnations, terms.counts, address, is_restart=is_restart)
        self.nodes.append(Node(JobView(me, is_loss_fatal=self.plan.policy is LossPolicy.ABORT), next=self.now))

    def _lose_patience(self, node: Node, *, at_once: bool = False) -> None:
        if node.entry is not None and not node.has_given_up and (at_once or self.rng.random() < self.plan.haste):
            node.has_given_up = True
            self._say(node, node.standing.give_up(node.entry))
            self.seen["given up"] += 1

    # -- connections

    def _connect(self, node: Node) -> None:
        self.links += 1
        node.link = self.links
        self.up[node.link], self.down[node.link], self.owners[node.link] = deque(), deque(), node
        jobs = sorted({job for job, _ in self.disks}, reverse=True)
        saved = tuple(SavedJob(job, tuple(sorted(self.saved_left.get(job, ())))) for job in jobs)
        self._say(node, node.standing.registration(saved if node.standing.registration().role == "server" else ()))

    def _say(self, node: Node, call: MemberMessage) -> None:
        if node.link:
            self.up[node.link].append(Message(self.now, MEMBER_CODEC.encode(call)))

    def _deliver(self, line: int, is_down: bool) -> None:
        message = (self.down if is_down else self.up)[line].popleft()
        node = self.owners[line]
        if is_down:
            if node.link == line and node.alive:
                self._read(node, message)
            return
        if message.payload is None:
            self.note("ended", line, node.standing.name)
            self._carry(self.roster.ended(line, self.now))
        else:
            call = MEMBER_CODEC.decode(message.payload)
            if not isinstance(call, MemberHeartbeat):
                self.note(line, call)
            self._carry(self.roster.handle(line, call, self.now))

    def _carry(self, instructions: Any) -> None:
        self.roster.validate()
        for line, answer in instructions:
            self.note("   ->", line, answer)
            self.is_telling = self.is_telling or isinstance(answer, BarrierOver)
            if isinstance(answer, MembershipNews):
                lost = [event for event in answer.events if isinstance(event, MemberLost)]
                self.lost_workers.update(event.number for event in lost if event.role == "worker")
            if line in self.down:
                self.down[line].append(Message(self.now, MEMBERSHIP_REPLY_CODEC.encode(answer)))
                if isinstance(answer, MemberRefused):
                    self.down[line].append(Message(self.now, None))
                    self.up[line].clear()
                    self.up[line].append(Message(self.now, None))

    def _read(self, node: Node, message: Message) -> None:
        if message.payload is None:
            node.link, node.next = 0, self.now + RECONNECT_SECONDS
            return
        for call in node.standing.take(MEMBERSHIP_REPLY_CODEC.decode(message.payload)):
            self._say(node, call)
        if node.is_over:
            self._give_up(node)
        elif node.standing.registration().role == "server" and node.standing.is_assigned:
            self._serve(node)
        elif node.standing.number >= 0 and (node.standing.servers or node.standing.fatal_loss()):
            self._work(node)

    def _give_up(self, node: Node) -> None:
        """A process raises, or ends with its job; one that found its place taken is started again."""
        node.alive = False
        self._hang_up(node)
        standing = node.standing
        if self.durable and not self.plan.faults["freeze"]:
            assert "serves another job" not in str(standing.failure), "others did not wait for it"
        if not standing.is_assigned and self.roster.stop is None and "there already" in str(standing.failure):
            role, number = standing.registration().role, standing.number
            self.births.append((self.now + 1.0, role, number, standing.registration().is_restart))

    def _hang_up(self, node: Node) -> None:
        if node.link:
            self.up[node.link].append(Message(self.now, None))
            self.down[node.link].clear()
            node.link = 0

    # -- servers and their disks

    def _serve(self, server: Node) -> None:
        """A server begins with what is on its disk; what was acknowledged is there."""
        standing = server.standing
        place = standing.job, standing.number
        if server.pushes is None:
            server.pushes = set(self.disks.get(place, ()))
            if server.pushes:
                assert standing.is_recovery, "others are told that a server has moved"
                self.seen["restored"] += 1
            lost = self.acknowledged.get(place, set()) - server.pushes
            assert not lost, f"{standing.name} of job {standing.job} has lost {lost}"
        if self.disks.get(place):
            self.saved_left.setdefault(standing.job, set()).update(standing.left)

    def _push(self, worker: Node) -> None:
        """A worker pushes to every server that it finds; each saves, then acknowledges."""
        for number, peer in worker.standing.servers.items():
            for server in self.nodes:
                me = server.standing.registration()
                if (me.role, me.incarnation) == ("server", peer.incarnation) and server.alive and not server.is_over:
                    if server.pushes is None or server.frozen_until > self.now:
                        continue
                    assert server.standing.job == worker.standing.job
                    place, self.num_pushes = (worker.standing.job, number), self.num_pushes + 1
                    server.pushes.add(self.num_pushes)
                    self.disks[place] = set(server.pushes)
                    self.acknowledged.setdefault(place, set()).add(self.num_pushes)
                    lost = self.acknowledged[place] - server.pushes
                    assert not lost, f"server {number} of job {place[0]} has lost {lost}"
                    self.heard.add((worker.standing.job, worker.standing.number))
                    self.seen["push"] += 1

    # -- a worker's program

    def _work(self, node: Node) -> None:
        standing = node.standing
        if standing.registration().role != "worker" or standing.has_left:
            return
        if standing.fatal_loss() is not None:
            node.alive = False  # it raises
            self._hang_up(node)
            return
        if node.step is None:  # a replacement goes on where the others are
            is_new = not standing.is_recovery and self._has_its_place(standing)
            assert not is_new or (standing.job, standing.number) not in self.heard, "it begins anew"
            node.step = min(sum(standing._entered.values()), len(self.plan.barriers))
        if node.entry is not None and (outcome := standing.outcome(node.entry)) is not None:
            self.outcomes.setdefault(node.entry, {})[standing.registration().incarnation] = outcome.is_broken
            if not outcome.is_broken:
                self._check_barrier(node, node.entry)
            standing.forget(node.entry)
            node.entry, node.has_given_up = None, False
            node.step += 1
        if self.plan.durable:
            self._push(node)
        if node.entry is None and node.step < len(self.plan.barriers):
            node.entry = standing.enter(self.plan.barriers[node.step])
            self._say(node, EnterBarrier(*node.entry))
        elif node.entry is None:
            standing.has_left = True
            if self.plan.durable:  # servers were told before, and have saved it
                self.saved_left.setdefault(standing.job, set()).add(standing.number)
            self._say(node, LeaveJob())
            if self.rng.random() < 0.5 and node.link not in self.broken:  # else nobody would hear it
                node.alive = False
                self._hang_up(node)

    def _has_its_place(self, standing: JobView) -> bool:
        """Whether a worker is not one that another has replaced, which it will hear soon."""
        return self.roster._members["worker", standing.number].incarnation == standing.registration().incarnation

    def _check_barrier(self, node: Node, entry: tuple[str, int]) -> None:
        """All workers have come as far, or have left; or the others go on without them."""
        self.seen["barrier"] += 1
        for number in range(self.plan.terms.counts["worker"]):
            lives = [
                n for n in self.nodes if n.standing.registration().role == "worker" and n.standing.number == number
            ]
            came = any(n.standing._entered[entry[0]] >= entry[1] or n.standing.has_left for n in lives)
            missed = self.plan.policy is LossPolicy.CONTINUE and number in self.lost_workers
            assert came or missed, f"{node.standing.name} passes {entry} without worker {number}"

    # -- faults

    def _fault(self, kind: str) -> None:
        self.left[kind] -= 1
        nodes = [node for node in self.nodes if node.alive and node.link and not node.is_over]
        if kind == "crash":
            self._crash()
        elif kind == "massacre":
            self._massacre()
        elif nodes:
            node = self.rng.choice(nodes)
            self.note(kind, node.standing.name, node.link)
            if kind == "cut":
                self.broken.add(node.link)
                self.up[node.link].append(Message(self.now, None))
                self.down[node.link].append(Message(self.now, None))
            elif kind == "freeze":
                node.frozen_until = self.now + self.rng.choice((5.0, 25.0, 40.0))
            else:
                self._kill(node)
        self.seen[kind] += 1
        self.is_harmless = self.is_harmless and kind in {"cut", "crash"} and not self.plan.durable

    def _massacre(self) -> None:
        """The scheduler and some of the others are killed in any order, perhaps all."""
        here = [node for node in self.nodes if node.alive and not node.is_over]
        count = self.rng.choice((min(1, len(here)), len(here), self.rng.randint(0, len(here))))
        victims = self.rng.sample(here, count)
        when = self.rng.randint(0, len(victims))
        for node in victims[:when]:
            self._kill(node)
        self._crash()
        for node in victims[when:]:
            self._kill(node)

    def _kill(self, node: Node) -> None:
        self.note("kill", node.standing.name)
        node.alive = False
        self._hang_up(node)
        if self.plan.durable:
            for told in self.outcomes.values():  # what it knew, nobody knows
                told.pop(node.standing.registration().incarnation, None)
        role, number = node.standing.registration().role, node.standing.number
        is_awaited = self.plan.durable or (role == "worker" and self.plan.policy is LossPolicy.WAIT)
        if (is_awaited or self.rng.random() < 0.8) and not node.standing.has_left:
            told = number if self.plan.numbered else -1
            delay = self.rng.choice((0.1, 1.0, 5.0, 28.0))
            self.births.append((self.now + delay, role, told, self.plan.durable and self.plan.launched))

    def _here(self) -> list[Node]:
        """All nodes, once all are there: before, another scheduler could not tell who comes for the first time."""
        here = [node for node in self.nodes if node.standing.servers and (node.alive or node.standing.has_left)]
        terms = self.plan.terms
        all_are_here = self.roster.stop is None and len(here) >= terms.counts["worker"] + terms.counts["server"]
        return here if all_are_here else []

    def _crash(self) -> None:
        self.note("crash")
        here = self._here()
        gone = [node.standing for node in self.nodes if not node.alive or node.standing.has_left]
        for told in self.outcomes.values():  # nobody waits for what processes know that have left
            for standing in gone:
                told.pop(standing.registration().incarnation, None)
        self.roster = self._new_roster(is_first=False)
        for line, node in self.owners.items():
            if any(message.payload for message in self.up[line]) and not node.alive:
                self.is_harmless = False  # it has left, and nobody will ever know
            for message in self.down[line]:
                answer = None if message.payload is None else MEMBERSHIP_REPLY_CODEC.decode(message.payload)
                if isinstance(answer, MembershipNews) and any(isinstance(event, MemberLeft) for event in answer.events):
                    self.is_harmless = False  # nor may they know of this one
            self.up[line].clear()
            self.down[line].clear()
            if node.link == line:
                self.down[line].append(Message(self.now, None))
        if self.plan.haste:
            for node in self.rng.sample(here, len(here) // 2):  # their deadlines come while there is no scheduler
                self._lose_patience(node, at_once=True)

    # -- what must be true in the end

    def _check_end(self) -> None:
        stop, faults = self.roster.stop, self.plan.faults
        assert stop is not None
        for entry, told in self.outcomes.items():
            assert len(set(told.values())) <= 1, f"{entry} was passed by some and broken for others"
            if True in told.values():
                self.seen["broken barrier"] += 1
        if self.is_harmless:
            assert stop.exit_code == 0, stop
        if stop.exit_code == 0:
            self.seen["good end"] += 1
            workers = [node for node in self.nodes if node.standing.registration().role == "worker"]
            left = {node.standing.number for node in workers if node.standing.has_left}
            missing = set(range(self.plan.terms.counts["worker"])) - left
            assert not missing or self.plan.policy is LossPolicy.CONTINUE, missing
        else:
            self.seen["bad end"] += 1
        for node in self.nodes:
            told = [event for event in node.standing.events if isinstance(event, JobEnded)]
            assert told or not node.alive or faults["freeze"] or faults["crash"] or not node.link, node


def play(seed: int, *, durable: bool = False) -> Simulator:
    """Run the schedule of a seed; an AssertionError tells its story."""
    simulator = Simulator(seed, durable)
    try:
        simulator.run()
    except AssertionError as error:
        again = Simulator(seed, durable, log=[])
        try:
            again.run()
        except AssertionError:
            story = "\n".join(again.log or [])
            raise AssertionError(f"seed {seed}: {error}\n{story[-20_000:]}") from error
        raise
    return simulator
