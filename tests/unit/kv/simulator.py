"""A store's rounds under random schedules: messages that are late, lost, or sent again, workers that are killed,
replaced, or only thought to be lost, workers that leave, connections that break, servers that restart.

The engines are the real ones (`reigen.kv.consistency.state_machine`), one on each server, for one key of several
shards. Around them are small twins of a server (requests, the value, snapshots) and of a worker (operations of a shard
in order, requests sent again). What is true is kept beside them, by identity: which (worker, round) has gone into which
value.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import msgspec

from reigen.cluster.membership.members import LossPolicy
from reigen.kv.consistency.state_machine import (
    AcknowledgePush,
    AnswerPull,
    ApplyPush,
    CombineRound,
    ConsistencyEngine,
    ConsistencyEvent,
    ConsistencyState,
    DropRequest,
    FailRequest,
    PullRequested,
    PushReceived,
    RepeatAcknowledgement,
    RoundRecovered,
    RoundsForgotten,
    WorkerDisconnected,
    WorkerLeft,
    WorkerLost,
    WorkerReappeared,
    WorkerResumed,
    WorkerReturned,
)

MOST_STEPS = 20_000
#: Copies of a request that are on their way at once.
MOST_COPIES = 2


@dataclass(frozen=True)
class Plan:
    """What one seed stands for."""

    staleness: float
    shards: int
    #: how often each worker pushes before it leaves
    rounds: tuple[int, ...]
    policy: LossPolicy
    #: "never": servers do not restart; "always": before each acknowledgement; "sometimes"
    snapshots: str
    #: how many faults of each kind there may be
    faults: dict[str, int]
    #: how likely each kind of step is
    weights: dict[str, int]
    #: how likely a fault is at every step
    pace: float
    #: every how many-th pull is left out
    lazy: int
    #: pushes are pulls, too
    together: bool
    #: a worker that is resuming sends what it waits for at once, and not after the answer
    hasty: bool

    @property
    def workers(self) -> int:
        return len(self.rounds)


def make_plan(rng: random.Random) -> Plan:
    """Draw a schedule's parameters."""
    workers = rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 5))
    rounds = rng.randint(1, 5)
    uneven = rng.random() < 0.4
    faulty = rng.random() < 0.8
    snapshots = rng.choice(("never", "never", "always", "always", "sometimes"))
    faults = {
        "kill": rng.choice((0, 0, 1, 1, 2, 3)) if faulty else 0,
        "suspect": rng.choice((0, 0, 0, 1, 2)) if faulty else 0,
        "cut": rng.choice((0, 0, 1, 3)) if faulty else 0,
        "crash": 0 if snapshots == "never" or not faulty else rng.choice((0, 1, 1, 2, 3)),
        "drop": rng.choice((0, 0, 3, 10)),
    }
    return Plan(
        staleness=rng.choice((0, 0, 0, 0, 1, 1, 2, 3, math.inf)),
        shards=rng.choice((1, 1, 2, 2, 3)),
        rounds=tuple(rng.randint(0, 6) if uneven else rounds for _ in range(workers)),
        policy=rng.choice((LossPolicy.ABORT, LossPolicy.CONTINUE, LossPolicy.WAIT)),
        snapshots=snapshots,
        faults=faults,
        weights={kind: rng.choice((1, 2, 6)) for kind in ("deliver", "resend", "snapshot", "replace", "tell")},
        pace=rng.choice((0.3, 0.1, 0.1, 0.03, 0.03)),
        lazy=rng.choice((0, 0, 0, 2, 3)),
        together=rng.random() < 0.3,
        hasty=rng.random() < 0.5,
    )


# -- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """On its way between a worker and a server.

    Attributes:
        link: number of the connection; what travels on one that has ended is lost.
        request: number of the request, unique in its worker.
        about: the worker's round.
        reply: to the worker.
    """

    kind: str
    worker: int
    shard: int
    link: int
    request: int
    about: int
    reply: bool = False
    details: Any = None

    def __str__(self) -> str:
        arrow = "<-" if self.reply else "->"
        about = f"{self.kind} {self.about} (#{self.request}, link {self.link}) {self.details}"
        return f"w{self.worker} {arrow} s{self.shard} {about}"


@dataclass(frozen=True)
class Word:
    """What the scheduler tells a server of a worker's process."""

    kind: str
    worker: int
    shard: int
    incarnation: int


@dataclass(frozen=True)
class Request:
    """A server's token."""

    number: int
    message: Message

    def __repr__(self) -> str:
        return f"{self.message.kind}{self.number}"


# -- a server ---------------------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """A value, and what has gone into it."""

    value: Fraction = Fraction(1)
    applied: frozenset[tuple[int, int]] = frozenset()
    #: rounds that count as over without having been applied: for a worker, or (None) for all
    forgotten: frozenset[tuple[int | None, int]] = frozenset()


class Server:
    """Keeps one shard."""

    def __init__(self, simulator: Simulator, shard: int) -> None:
        self.simulator, self.shard, plan = simulator, shard, simulator.plan
        self.plan = plan
        self.engine = ConsistencyEngine(plan.workers, plan.staleness)
        self.ledger = Ledger()
        self.open: set[Request] = set()
        self.bodies: set[Request] = set()
        #: what this server was told: the newest process of each worker, and who is not waited for
        self.incarnations = [0] * plan.workers
        self.gone: set[int] = set()
        self.lost: set[int] = set()
        #: what is known of them is what the snapshot says
        self.remembered: set[int] = set()
        #: rounds that a worker need not push, since the others went on without it
        self.passed = [0] * plan.workers
        self.snapshot = self._image()
        self.tokens = 0

    def _image(self) -> tuple[bytes, Any]:
        truth = dataclasses.replace(self.ledger), frozenset(self.gone), frozenset(self.lost), tuple(self.passed)
        return msgspec.msgpack.encode(self.engine.state()), truth

    def save(self) -> None:
        self.snapshot = self._image()

    def restart(self) -> None:
        """All is lost but the snapshot."""
        data, truth = self.snapshot
        self.engine = ConsistencyEngine.from_state(msgspec.msgpack.decode(data, type=ConsistencyState))
        ledger, gone, lost, passed = truth
        self.ledger, self.gone, self.lost, self.passed = dataclasses.replace(ledger), set(gone), set(lost), list(passed)
        self.open, self.bodies = set(), set()
        self.remembered = set(range(self.plan.workers))

    def receive(self, message: Message) -> None:
        """A worker says something."""
        worker, about = message.worker, message.about
        if message.kind == "resume":
            event: ConsistencyEvent = WorkerReturned(worker) if about < 0 else WorkerResumed(worker, about)
            if about < 0 or worker in self.remembered:
                self._is_back(worker)
            self.remembered.discard(worker)
            self.handle_events(event, message)
        elif message.kind == "leave":
            self.remembered.discard(worker)
            self._leave(worker)
            self.answer(message, "done")
        else:
            if message.kind != "pull":
                self.bodies.add(token := self._token(message))
                self.handle_events(PushReceived(worker, about, token))
            if message.kind != "push":
                self.handle_events(PullRequested(worker, about, self._token(message)))

    def _token(self, message: Message) -> Request:
        self.tokens += 1
        token = Request(self.tokens, message)
        self.open.add(token)
        return token

    def _is_back(self, worker: int) -> None:
        if worker in self.gone:  # the others went on without it
            newest = max((round for _, round in self.ledger.applied), default=0)
            self.passed[worker] = max(self.passed[worker], newest)
        self.gone.discard(worker)
        self.lost.discard(worker)

    def _pass(self, worker: int, round: int) -> None:
        if self.plan.policy is LossPolicy.CONTINUE and worker in self.simulator.ever_lost:
            self.passed[worker] = max(self.passed[worker], round)

    def hear(self, word: Word) -> None:
        """The scheduler says something; of a process that another has replaced, it is late."""
        worker = word.worker
        if word.incarnation < self.incarnations[worker]:
            return
        if word.kind != "returned":
            self.remembered.discard(worker)
        if word.kind == "lost":
            if worker not in self.gone:
                self.lost.add(worker)
            if self.plan.policy is LossPolicy.CONTINUE:
                self.gone.add(worker)
            self.handle_events(WorkerLost(worker, self.plan.policy))
        elif word.kind == "returned":
            if worker in self.lost:
                self._is_back(worker)
                self.handle_events(WorkerReappeared(worker))
                self._pass(worker, self.engine.done(worker))
        else:
            self._leave(worker)

    def _leave(self, worker: int) -> None:
        self.gone.add(worker)
        self.lost.discard(worker)  # if it was: to be found does not bring it back
        self.handle_events(WorkerLeft(worker))

    def cut(self, worker: int) -> None:
        """A worker's connection has ended."""
        self.handle_events(WorkerDisconnected(worker))

    def handle_events(self, event: ConsistencyEvent, message: Message | None = None) -> None:
        instructions = self.engine.handle(event)
        self.simulator.note("  server", self.shard, event, "->", instructions)
        self.engine.validate()
        for instruction in instructions:
            self._execute_instructions(instruction, message)
        if self.plan.snapshots == "always":  # nothing can go wrong between the answers above and this
            self.save()
        assert self.open >= self.bodies

    def _execute_instructions(self, instruction: Any, message: Message | None) -> None:
        ledger = self.ledger
        match instruction:
            case CombineRound(round, workers, tokens, scale):
                assert self.engine.is_synchronous
                assert list(workers) == sorted(workers)
                assert [(t.message.worker, t.message.about) for t in tokens] == [(w, round) for w in workers]
                self._check_contributors(round, set(workers), scale)
                self._apply(Fraction(scale).limit_denominator(100), *tokens)
            case ApplyPush(worker, round, token):
                assert not self.engine.is_synchronous
                assert (token.message.worker, token.message.about) == (worker, round)
                self._apply(Fraction(1), token)
            case AcknowledgePush(worker, round, token):
                assert (worker, round) in ledger.applied
                assert token not in self.bodies
                self._acknowledge(token)
            case RepeatAcknowledgement(worker, round, token):
                self.bodies.discard(token)
                self._acknowledge(token)
            case AnswerPull(_, token):
                self._check_reading(token.message)
                self._finish(token, "value", ledger.value)
            case FailRequest(token, reason, workers):
                self.bodies.discard(token)
                self._finish(token, "failed", (reason, workers))
            case DropRequest(token):
                self.bodies.discard(token)
                self.open.remove(token)
            case RoundRecovered(worker, round):
                self._pass(worker, round)
                if message is not None:
                    self.answer(message, "recovered", round)
            case RoundsForgotten(first, last, worker):
                assert self.plan.snapshots == "sometimes", "nothing that was acknowledged is lost"
                ledger.forgotten |= {(worker, round) for round in range(first, last + 1)}

    def _apply(self, scale: Fraction, *tokens: Request) -> None:
        for token in tokens:
            identity = token.message.worker, token.message.about
            assert identity not in self.ledger.applied, "applied twice"
            self.bodies.remove(token)
            self.ledger.applied |= {identity}
            self.ledger.value += scale * (token.message.worker + 1)

    def _check_contributors(self, round: int, workers: set[int], scale: float) -> None:
        """All that this server has not been told to go on without; those who left are not made up for."""
        expected = set(range(self.plan.workers)) - self.gone
        assert workers >= expected
        assert workers <= {w for w, rounds in enumerate(self.plan.rounds) if rounds >= round}
        lost = (self.lost if self.plan.policy is LossPolicy.CONTINUE else set()) - workers
        assert math.isclose(scale, (len(workers) + len(lost)) / len(workers))

    def _check_reading(self, pull: Message) -> None:
        """A reader sees its own pushes, and all that its staleness promises."""
        over = self.ledger.applied | {
            (worker, round)
            for who, round in self.ledger.forgotten
            for worker in (range(self.plan.workers) if who is None else (who,))
        }
        worker, need = pull.worker, pull.about - self.plan.staleness
        for other in range(self.plan.workers):
            if other in self.gone and other != worker:
                continue
            upto = pull.about if other == worker else max(0, need)
            for round in range(1, int(upto) + 1):
                is_over = (other, round) in over or round <= self.passed[other]
                assert is_over, f"worker {worker} reads after {pull.about} without round {round} of worker {other}"
        went_on = self.plan.policy is LossPolicy.CONTINUE and worker in self.simulator.ever_lost
        if self.plan.staleness == 0 and worker not in self.gone and not went_on:
            newest = max((round for _, round in self.ledger.applied), default=0)
            assert newest <= self.simulator.workers[worker].newest[self.shard], "a round that its reader has not pushed"

    def _acknowledge(self, token: Request) -> None:
        if token.message.kind == "push":
            self._finish(token, "done")
        else:
            self.open.remove(token)  # that is answered as a pull

    def _finish(self, token: Request, kind: str, details: Any = None) -> None:
        self.open.remove(token)
        self.answer(token.message, kind, details)

    def answer(self, message: Message, kind: str, details: Any = None) -> None:
        self.simulator.send(
            Message(kind, message.worker, self.shard, message.link, message.request, message.about, True, details)
        )


# -- a worker ---------------------------------------------------------------------------------------------------------


@dataclass
class Strand:
    """A worker's operations on one shard, one after the other."""

    #: how many pushes have been acknowledged
    acked: int = 0
    #: what is done next, or waited for: push, pull, leave, done, failed
    stage: str = "push"
    #: the number of the request that is waited for; 0: none
    request: int = 0
    #: the same of a resume; it must be answered before the worker knows where it is (``acked`` < 0)
    resume: int = 0
    #: whom a failure named
    failure: tuple[str, tuple[int, ...]] | None = None


@dataclass
class Worker:
    """A process."""

    number: int
    incarnation: int
    strands: list[Strand]
    alive: bool = True
    #: by shard, the newest round that this number has ever pushed
    newest: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(strand.stage in {"done", "failed"} for strand in self.strands)


class Simulator:
    """One schedule."""

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        self.rng = random.Random(seed)
        self.plan = plan = make_plan(self.rng)
        self.log: list[str] | None = [f"{plan}"] if keep_log else None
        self.seen: Counter[str] = Counter()
        #: messages on their way, in order on each line
        self.air: dict[tuple[int, int, bool], deque[Message]] = {}
        #: what the scheduler says to each server, in order
        self.words: list[deque[Word]] = [deque() for _ in range(plan.shards)]
        self.links = [[0] * plan.shards for _ in range(plan.workers)]
        self.requests = 0
        self.left = dict(plan.faults)
        self.workers = [
            Worker(number, 1, [Strand() for _ in range(plan.shards)], newest=[0] * plan.shards)
            for number in range(plan.workers)
        ]
        self.ever_lost: set[int] = set()
        self.servers = [Server(self, shard) for shard in range(plan.shards)]

    def note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.append(" ".join(map(str, parts)))

    # -- the run

    def run(self) -> None:
        for worker in self.workers:
            for shard in range(self.plan.shards):
                self._go_on(worker, shard)
        for _ in range(MOST_STEPS):
            if not self._step():
                break
        else:
            raise AssertionError("it does not end")
        self._check_end()

    def _step(self) -> bool:
        """Something happens; False: everything has come to its end."""
        choices: dict[str, Any] = {}
        if self.air:
            choices["deliver"] = self._deliver
        talking = [shard for shard, words in enumerate(self.words) if words]
        if talking:
            choices["tell"] = lambda: self._tell(self.rng.choice(talking))
        waiting = self._impatient()
        if waiting:
            choices["resend"] = lambda: self._resend(*self.rng.choice(waiting))
        absent = [w for w in self.workers if not w.alive]
        if absent and self.plan.policy is not LossPolicy.ABORT and not self._may_stay_away(absent):
            choices["replace"] = lambda: self._replace(self.rng.choice(absent))
        if not choices or (not self.air and not talking and not absent and all(w.is_done for w in self.workers)):
            return False
        if self.plan.snapshots == "sometimes":
            choices["snapshot"] = lambda: self.rng.choice(self.servers).save()
        faults = [kind for kind in ("kill", "suspect", "cut", "crash") if self.left[kind]]
        if faults and self.rng.random() < self.plan.pace:
            self._fault(self.rng.choice(faults))
            return True
        kinds = list(choices)
        (kind,) = self.rng.choices(kinds, [self.plan.weights[kind] for kind in kinds])
        choices[kind]()
        return True

    def _impatient(self) -> list[tuple[Worker, int]]:
        """Who waits for an answer, and may ask again."""
        copies = Counter(message.request for messages in self.air.values() for message in messages)
        return [
            (worker, shard)
            for worker in self.workers
            if worker.alive
            for shard, strand in enumerate(worker.strands)
            for request in [strand.resume or strand.request]
            if request and copies[request] < MOST_COPIES
        ]

    def _may_stay_away(self, absent: list[Worker]) -> bool:
        """Under continue, a replacement comes or does not: by the plan's seed, not by a hang."""
        return self.plan.policy is LossPolicy.CONTINUE and self.plan.lazy != 0

    # -- the network

    def send(self, message: Message) -> None:
        self.air.setdefault((message.worker, message.shard, message.reply), deque()).append(message)

    def _deliver(self) -> None:
        line = self.rng.choice(list(self.air))
        message = self.air[line].popleft()
        if not self.air[line]:
            del self.air[line]
        if self.links[message.worker][message.shard] != message.link:
            return
        if self.left["drop"] and self.rng.random() < 0.3:
            self.left["drop"] -= 1
            self.seen["dropped"] += 1
            return
        self.note(message)
        if message.reply:
            self._answered(self.workers[message.worker], message)
        else:
            self.servers[message.shard].receive(message)

    # -- workers

    def _new_request(self) -> int:
        self.requests += 1
        return self.requests

    def _say(self, worker: Worker, shard: int, kind: str, request: int, about: int) -> None:
        self.send(Message(kind, worker.number, shard, self.links[worker.number][shard], request, about))

    def _go_on(self, worker: Worker, shard: int) -> None:
        """Begin the next operation of a shard."""
        strand = worker.strands[shard]
        if strand.stage == "push" and strand.acked >= self.plan.rounds[worker.number]:
            strand.stage = "leave"
        if strand.stage == "leave" and any(other.stage in {"push", "pull"} for other in worker.strands):
            strand.request = 0
            return  # a worker leaves when all its pushes are acknowledged
        for other_shard, other in enumerate(worker.strands):
            if other_shard == shard or (strand.stage == "leave" and other.stage == "leave" and not other.request):
                other.request = self._new_request()
                self._utter(worker, other_shard)

    def _utter(self, worker: Worker, shard: int) -> None:
        strand = worker.strands[shard]
        about = strand.acked + 1 if strand.stage == "push" else strand.acked
        kind = strand.stage
        if kind == "push":
            worker.newest[shard] = max(worker.newest[shard], about)
            kind = "pushpull" if self.plan.together else kind
        self._say(worker, shard, kind, strand.request, about)

    def _resend(self, worker: Worker, shard: int) -> None:
        strand = worker.strands[shard]
        if strand.resume:
            self._say(worker, shard, "resume", strand.resume, strand.acked)
        if strand.request and strand.acked >= 0 and (not strand.resume or self.plan.hasty):
            self._utter(worker, shard)

    def _answered(self, worker: Worker, message: Message) -> None:
        strand = worker.strands[message.shard]
        if message.kind == "recovered":
            if message.request == strand.resume:
                strand.resume = 0
                self._recovered(worker, message.shard, message.details)
        elif message.request != strand.request or strand.stage in {"done", "failed"}:
            return
        elif message.kind == "failed":
            if "must return" in message.details[0] and self.plan.policy is not LossPolicy.ABORT:
                return  # it was given up, and is alive: it asks again
            for each in worker.strands:  # the worker raises
                each.stage, each.request, each.resume, each.failure = "failed", 0, 0, message.details
        else:
            self._next(worker, message.shard)

    def _next(self, worker: Worker, shard: int) -> None:
        strand = worker.strands[shard]
        strand.request = 0
        if strand.stage == "push":
            strand.acked += 1
            lazy = self.plan.lazy and strand.acked % self.plan.lazy == 0
            strand.stage = "push" if lazy or self.plan.together else "pull"
        elif strand.stage == "pull":
            strand.stage = "push"
        elif strand.stage == "leave":
            strand.stage = "done"
            return
        self._go_on(worker, shard)

    def _resume(self, worker: Worker, shard: int) -> None:
        strand = worker.strands[shard]
        strand.resume = self._new_request()
        self._resend(worker, shard)

    def _recovered(self, worker: Worker, shard: int, round: int) -> None:
        """Where the server says that this worker is."""
        strand = worker.strands[shard]
        if strand.acked < 0:
            worker.newest[shard] = max(worker.newest[shard], round)
            strand.acked = -2 - round  # known, while others are not
            if all(other.acked < -1 for other in worker.strands):
                least = min(-2 - other.acked for other in worker.strands)
                for other in worker.strands:
                    other.acked, other.stage = min(least, self.plan.rounds[worker.number]), "push"
                for other_shard, other in enumerate(worker.strands):
                    if not other.request:
                        self._go_on(worker, other_shard)
            return
        if round > strand.acked and strand.stage in {"push", "pull"}:
            strand.acked = min(round, self.plan.rounds[worker.number]) - (strand.stage == "push")
            worker.newest[shard] = max(worker.newest[shard], round)
        if strand.request:
            self._utter(worker, shard)

    # -- faults

    def _fault(self, kind: str) -> None:
        alive = [worker for worker in self.workers if worker.alive and not worker.is_done]
        worker = self.rng.choice(alive) if alive else None
        if kind == "crash":
            self._crash(self.rng.choice(self.servers))
        elif worker is None:
            self.left[kind] -= 1
            return
        elif kind == "kill":
            self._kill(worker)
        elif kind == "suspect":
            if self.plan.policy is not LossPolicy.ABORT:
                self._spread("lost", worker)
                self._spread("returned", worker)
        elif kind == "cut":
            self._cut(worker, self.rng.randrange(self.plan.shards))
        self.left[kind] -= 1
        self.seen[kind] += 1

    def _tell(self, shard: int) -> None:
        word = self.words[shard].popleft()
        self.note(word)
        self.servers[shard].hear(word)

    def _spread(self, kind: str, worker: Worker) -> None:
        """The scheduler tells all servers of a worker's process."""
        self.ever_lost.add(worker.number)
        self.note(kind, worker.number)
        for shard, words in enumerate(self.words):
            words.append(Word(kind, worker.number, shard, worker.incarnation))

    def _kill(self, worker: Worker) -> None:
        worker.alive = False
        if self.rng.random() < 0.5:  # what it has sent is not lost with it, or is
            for shard in range(self.plan.shards):
                self._hang_up(worker, shard)
        self._spread("lost", worker)

    def _hang_up(self, worker: Worker, shard: int) -> None:
        self.links[worker.number][shard] += 1
        self.servers[shard].cut(worker.number)

    def _cut(self, worker: Worker, shard: int) -> None:
        self.note("cut", worker.number, shard)
        self._hang_up(worker, shard)
        if worker.strands[shard].acked >= 0 and worker.strands[shard].stage != "failed":
            self._resume(worker, shard)

    def _replace(self, old: Worker) -> None:
        """Another process takes a lost worker's place; it says so to all servers."""
        self.seen["replaced"] += 1
        new = Worker(
            old.number, old.incarnation + 1, [Strand(acked=-1) for _ in range(self.plan.shards)], newest=old.newest
        )
        self.note("replace", old.number)
        self.workers[old.number] = new
        for shard in range(self.plan.shards):
            self._hang_up(new, shard)
            self.servers[shard].incarnations[old.number] = new.incarnation
            self._resume(new, shard)

    def _crash(self, server: Server) -> None:
        self.note("crash", server.shard)
        server.restart()
        words = self.words[server.shard]
        words.clear()
        for worker in self.workers:
            self.links[worker.number][server.shard] += 1
            strand = worker.strands[server.shard]
            if not worker.alive:
                words.append(Word("lost", worker.number, server.shard, worker.incarnation))
            elif strand.stage == "done":
                words.append(Word("left", worker.number, server.shard, worker.incarnation))
            elif strand.stage != "failed":
                strand.acked = max(strand.acked, -1)
                self._resume(worker, server.shard)

    # -- what must be true in the end

    def _check_end(self) -> None:
        plan = self.plan
        if plan.policy is LossPolicy.ABORT and self.ever_lost:
            for worker in self.workers:
                for strand in worker.strands if worker.alive else ():
                    assert strand.stage in {"done", "failed"}
                    if strand.failure is not None:
                        reason, workers = strand.failure
                        assert set(workers) <= self.ever_lost
                        assert workers
                        assert f"worker {workers[0]} was lost in round" in reason
                        self.seen["aborted"] += 1
            return
        for server in self.servers:
            assert not server.open
            self._check_ledger(server)
        for worker in self.workers:
            assert not worker.alive or all(strand.stage == "done" for strand in worker.strands), worker

    def _check_ledger(self, server: Server) -> None:
        """Everything was applied once; a value is the closed form if nothing was lost on the way."""
        over = server.ledger.applied | {
            (worker, round)
            for who, round in server.ledger.forgotten
            for worker in (range(self.plan.workers) if who is None else (who,))
        }
        everything = {(w, r) for w, rounds in enumerate(self.plan.rounds) for r in range(1, rounds + 1)}
        missing = {identity for identity in everything if identity not in over}
        may_miss = self.ever_lost if self.plan.policy is LossPolicy.CONTINUE else set()
        assert {worker for worker, _ in missing} <= may_miss, missing
        assert server.ledger.applied <= everything
        if server.ledger.applied == everything and not may_miss:
            closed_form = 1 + sum((worker + 1) * rounds for worker, rounds in enumerate(self.plan.rounds))
            assert server.ledger.value == closed_form
            self.seen["closed form"] += 1


def play(seed: int) -> Simulator:
    """Run the schedule of a seed; an AssertionError tells its story."""
    simulator = Simulator(seed)
    try:
        simulator.run()
    except AssertionError as error:
        again = Simulator(seed, keep_log=True)
        try:
            again.run()
        except AssertionError:
            story = "\n".join(again.log or [])
            raise AssertionError(f"seed {seed}: {error}\n{story[-20_000:]}") from error
        raise
    return simulator
