"""Leases of samples under random schedules: workers and servers that are killed at any moment, messages that come late.

The ledger, and what shards decide, are the real ones (`reigen.kv.consistency.sample_leases`). Around them are twins of
servers, which save before they answer, and of workers, which send again what was not answered. What is true is kept
beside them: how often each batch is in each value. A `Rules` with something switched off is a system that is broken.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from reigen.kv.consistency.sample_leases import LedgerBook, NumberSet, SamplePlan, batch_number, select_unapplied

MOST_STEPS = 100_000


@dataclass(frozen=True)
class Rules:
    """Steps of the module that the simulator follows."""

    leaves_out: bool = True  # (B)
    saves_batches: bool = True  # (B): as one with the value
    commits_last: bool = True  # (C)
    saves_first: bool = True  # (A)
    frees: bool = True  # (D)
    floor_is_low: bool = True  # (F)


@dataclass
class ShardTwin:
    """Shard, as it is in memory and, copied, as it is saved."""

    applied: Counter[int] = field(default_factory=Counter)
    batches: NumberSet = field(default_factory=NumberSet)
    #: pushes of each process that are over: no push is applied twice because it is sent again
    done: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass
class ServerTwin:
    shard: ShardTwin
    book: LedgerBook
    saved: tuple[ShardTwin, Any]
    #: answers that wait until the state is saved
    answers: list[tuple[WorkerTwin, int, Any]] = field(default_factory=list)


@dataclass(eq=False)
class WorkerTwin:
    """Process: its requests that are not answered, by server, in order."""

    process: tuple[int, int]
    is_alive: bool = True
    outstanding: dict[int, dict[int, Any]] = field(default_factory=dict)
    #: on their way, by server
    sent: dict[int, deque[tuple[int, Any]]] = field(default_factory=dict)
    num_requests: int = 0
    num_pushes: int = 0
    batch: int | None = None
    commits: int | None = None
    floor: int = 0
    to_push: list[int] = field(default_factory=list)
    is_asking: bool = False
    is_done: bool = False


class Simulation:
    """One schedule.

    Args:
        seed: of everything.
        rules: that are followed.

    Attributes:
        num_repeated: pushes that shards have left out, since they had them.
    """

    def __init__(self, seed: int, rules: Rules = Rules()) -> None:
        self.chance, self.rules = random.Random(seed), rules
        self.num_batches = self.chance.randrange(1, 12)
        self.plan = SamplePlan(num_samples=self.num_batches, batch_size=1)
        self.servers = [self._new_server() for _ in range(self.chance.randrange(1, 4))]
        self.workers = [WorkerTwin((slot, 1)) for slot in range(self.chance.randrange(1, 4))]
        self.kills_left = self.chance.randrange(0, 8)
        #: processes that are gone, or thought to be, of which the ledger has not heard
        self.unheard: list[tuple[int, int]] = []
        self.late: list[WorkerTwin] = []
        self.num_repeated = 0

    def run(self) -> None:
        """Play until all workers are through; AssertionError says what is wrong."""
        for _ in range(MOST_STEPS):
            if all(worker.is_done for worker in self.workers if worker.is_alive) and any(
                worker.is_done for worker in self.workers
            ):
                break
            self.chance.choice(
                [self._step, self._step, self._deliver, self._deliver, self._save, self._hear, self._disturb]
            )()
        else:
            raise AssertionError("it does not end")
        for number, server in enumerate(self.servers):
            assert server.shard.applied == Counter(range(self.num_batches)), f"server {number}"

    # ---- servers

    def _new_server(self) -> ServerTwin:
        return ServerTwin(ShardTwin(), LedgerBook(), (ShardTwin(), ()))

    def _save(self) -> None:
        server = self.chance.choice(self.servers)
        server.saved = copy.deepcopy((server.shard, server.book.state()))
        for worker, request, answer in server.answers:
            self._tell(worker, self.servers.index(server), request, answer)
        server.answers.clear()

    def _deliver(self) -> None:
        """A server takes in the next message of a worker."""
        lines = [(worker, to) for worker in [*self.workers, *self.late] for to in worker.sent if worker.sent[to]]
        if not lines:
            return
        worker, to = self.chance.choice(lines)
        request, message = worker.sent[to].popleft()
        server = self.servers[to]
        take: Any = self._push if message[0] == "push" else self._lease
        answer = take(server, worker, *message[1:])
        if answer is not None:
            if self.rules.saves_first:
                server.answers.append((worker, request, answer))
            else:
                self._tell(worker, to, request, answer)
        else:
            worker.sent[to].append((request, message))  # it waits

    def _push(self, server: ServerTwin, worker: WorkerTwin, batch: int, number: int, floor: int) -> str:
        shard = server.shard
        if number <= shard.done[worker.process]:
            return "done"
        shard.done[worker.process] = number
        shard.batches.add_range(batch_number(0, 0), batch_number(0, floor))
        tag = batch_number(0, batch)
        if self.rules.leaves_out and not select_unapplied([tag], shard.batches):
            self.num_repeated += 1
            return "done"
        shard.batches.add(tag)
        shard.applied[batch] += 1
        return "done"

    def _lease(self, server: ServerTwin, worker: WorkerTwin, commits: int | None) -> tuple[str, int, int] | None:
        _, ledger = server.book.find(self.plan)
        ledger.release(worker.process)
        if commits is not None:
            ledger.commit(commits)
        batch = ledger.lease(worker.process, self.num_batches)
        ledger.validate()
        if batch is not None:
            return "leased", batch, ledger.floor
        return ("over", 0, 0) if ledger.is_over(self.num_batches) else None

    def _hear(self) -> None:
        """The ledger hears of a death, or what it takes for one."""
        if self.unheard:
            process = self.unheard.pop(self.chance.randrange(len(self.unheard)))
            if self.rules.frees:
                self.servers[0].book.release(process)

    # ---- workers

    def _send(self, worker: WorkerTwin, to: int, message: Any) -> None:
        worker.num_requests += 1
        worker.outstanding.setdefault(to, {})[worker.num_requests] = message
        worker.sent.setdefault(to, deque()).append((worker.num_requests, message))

    def _tell(self, worker: WorkerTwin, to: int, request: int, answer: Any) -> None:
        if not worker.is_alive or worker.outstanding.get(to, {}).pop(request, None) is None:
            return
        if answer != "done":
            worker.is_asking = False
            state, batch, worker.floor = answer
            worker.is_done = state == "over"
            if state == "leased":
                worker.batch, worker.to_push = batch, list(range(len(self.servers)))
                worker.num_pushes += 1
                self.chance.shuffle(worker.to_push)

    def _step(self) -> None:
        """A worker goes on: pushes to a shard, commits, or asks."""
        living = [worker for worker in self.workers if worker.is_alive and not (worker.is_done or worker.is_asking)]
        if not living:
            return
        worker = self.chance.choice(living)
        if worker.to_push:
            floor = worker.floor if self.rules.floor_is_low else (worker.batch or 0) + 1
            self._send(worker, worker.to_push.pop(), ("push", worker.batch, worker.num_pushes, floor))
            return
        if self.rules.commits_last and any(worker.outstanding.values()):
            return
        worker.commits, worker.batch = worker.batch, None
        worker.is_asking = True
        self._send(worker, 0, ("lease", worker.commits))

    def _disturb(self) -> None:
        if self.kills_left and self.chance.random() < 0.2:
            self.kills_left -= 1
            self.chance.choice([self._kill_worker, self._kill_worker, self._kill_server, self._suspect])()

    def _kill_worker(self) -> None:
        """A worker is killed, with some messages on their way; another process takes its place."""
        place = self.chance.randrange(len(self.workers))
        worker = self.workers[place]
        worker.is_alive = False
        for queue in worker.sent.values():
            for _ in range(self.chance.randrange(len(queue) + 1)):
                queue.pop()
        # what asks for a lease reaches no server when the ledger has heard of the death: its connection is closed then
        worker.sent = {to: deque(m for m in queue if m[1][0] == "push") for to, queue in worker.sent.items()}
        self.late.append(worker)
        self.unheard.append(worker.process)
        self.workers[place] = WorkerTwin((place, worker.process[1] + 1))

    def _suspect(self) -> None:
        """The ledger takes a worker for dead that is not: it goes on pushing, and asks."""
        self.unheard.append(self.chance.choice(self.workers).process)

    def _kill_server(self) -> None:
        """A server is killed and goes on from what it has saved; workers send again what was not answered."""
        to = self.chance.randrange(len(self.servers))
        shard, states = copy.deepcopy(self.servers[to].saved)
        if not self.rules.saves_batches:
            shard.batches = NumberSet()
        self.servers[to] = ServerTwin(shard, LedgerBook(states), copy.deepcopy((shard, states)))
        for worker in [*self.workers, *self.late]:
            again = worker.outstanding.get(to, {}) if worker.is_alive else {}
            worker.sent[to] = deque(again.items())
        # a server that was away asks who is there
        here = {worker.process for worker in self.workers}
        for ledger in states:
            self.unheard += [(slot, one) for _, slot, one in ledger.leased if (slot, one) not in here]
