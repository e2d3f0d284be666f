"""Batches make no difference: a store that is sent batches, and one that is sent the same requests key by key."""

from __future__ import annotations

import gc
import os
import random
import select
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from reigen import optim
from reigen.cluster.membership.members import LossPolicy
from reigen.errors import WireError
from reigen.kv.protocol import (
    COMMAND_CODEC,
    DTYPE_NUMBERS,
    MAX_BATCH_KEYS,
    REMOTE_ERROR_CODEC,
    KeySpec,
    KVHello,
    MessageFlag,
    MessageHeader,
    MessageKind,
    ShardRange,
    StoreCommand,
    pack_counts,
    unpack_header,
)
from reigen.kv.server import store
from reigen.kv.server.batching import BatchHandler, KeyBatch
from reigen.kv.server.buffers import BufferPool, ValueAllocator
from reigen.kv.server.request_handler import RequestHandler
from reigen.kv.server.requests import WorkerConnection
from reigen.kv.server.shard import Shard
from reigen.kv.server.store import ServerContext, ServerStore
from reigen.kv.server.thread_pool import ComputeThreads
from reigen.kv.shm_arena import PeerShmArena, ShmArena

FLOAT = DTYPE_NUMBERS["float32"]
#: Lengths of the keys, which are their own ids.
SIZES = {1: 1, 2: 33, 3: 0, 4: 500, 5: 20_000, 6: 7}
#: What workers usually push together.
USUAL = (1, 2, 3, 4, 5)
KINDS = {"push": MessageKind.PUSH, "pull": MessageKind.PULL, "pushpull": MessageKind.PUSHPULL}


class Line:
    """Keeps what is sent, and is never slow."""

    name = "line"

    def __init__(self, memory: PeerShmArena) -> None:
        self.answers: dict[int, tuple[int, Any]] = {}
        #: answers in the server's memory that were not given back: where they are, and what they were
        self.unreleased: dict[int, tuple[Any, bytes]] = {}
        self._memory = memory

    def send(self, header: MessageHeader, body: Any = b"", *, priority: int = 0, on_sent: Any = None) -> None:
        assert unpack_header(header.pack()) == header
        assert header.request not in self.answers, "two answers"
        if header.request:
            assert header.kind != MessageKind.RECEIVED
            if header.flags & MessageFlag.IN_MEMORY:
                body = self._memory.view(header.offset, header.memory_bytes)
                self.unreleased[header.request] = body, bytes(body)
            is_error = header.kind == MessageKind.ERROR
            self.answers[header.request] = (
                header.kind,
                REMOTE_ERROR_CODEC.decode(bytes(body)) if is_error else bytes(body),
            )
        if on_sent is not None:
            on_sent()

    def close(self) -> None:
        self._memory.close()


class Side:
    """A store with its workers' connections."""

    def __init__(self, num_workers: int, staleness: float, policy: str, optimizer: optim.Optimizer | None) -> None:
        self.workers, self.arena, self.num_workers = ComputeThreads(3), ShmArena("test"), num_workers
        around = ServerContext(
            0, num_workers, ValueAllocator(self.arena), BufferPool(), self.workers, policy=LossPolicy(policy)
        )
        self.store = ServerStore(0, staleness, around)
        self.handler = RequestHandler(self.store)
        self.lines: list[Line] = []
        self.connections = [self.connect(worker) for worker in range(num_workers)]
        for key, size in SIZES.items():
            self.store.plan_shards(key, KeySpec(key, (size,), "float32", "default", 0), (ShardRange(0, 0, size, 0),))
            self.send(0, MessageHeader(MessageKind.INIT, 1 << 40 | key, key), np.full(size, key, np.float32).tobytes())
        if optimizer is not None:
            body = COMMAND_CODEC.encode(StoreCommand("set_optimizer", {"spec": optimizer.to_spec()}))
            for worker in range(num_workers):
                self.send(worker, MessageHeader(MessageKind.COMMAND, 1 << 41), body)

    def connect(self, worker: int) -> WorkerConnection:
        segment = self.arena.segment
        hello = KVHello(worker, 1, f"host{worker}", "here", os.getpid(), segment.fd, segment.inode)
        memory, peer = (PeerShmArena.open(hello, "here")[0] for _ in range(2))
        assert memory is not None
        self.lines[worker : worker + 1] = [Line(memory)]
        line: Any = self.lines[worker]
        connection = WorkerConnection(hello, 0, line, self.store.context.memory, peer)
        self.store.connected(connection)
        return connection

    def send(self, worker: int, header: MessageHeader, body: bytes) -> None:
        header = MessageHeader(
            header.kind, header.request, header.key, header.shard, header.round, header.flags, header.dtype,
            body_bytes=len(body),
        )  # fmt: skip
        place = self.handler.place(header)
        place[:] = np.frombuffer(body, np.uint8)
        self.handler.arrived(self.connections[worker], header, place)

    def handle_events(self, what: str, worker: int) -> None:
        host = f"host{worker}"
        if what == "reconnect":
            self.connections[worker] = self.connect(worker)
        elif what == "lose":
            self.store.lost(worker, host, "the test wants it")
        elif what == "find":
            self.store.found(worker, host)
        elif what == "leave":
            self.store.has_left(worker, host)
        else:
            for connection in self.connections:
                for request in [*connection.unanswered(), *connection.open_requests.values()]:
                    request.since = -1e9
            self.store.expire()

    def settle(self) -> None:
        """What threads compute is there, and workers have copied what they were given."""
        while self.workers.num_running:
            select.select([self.workers], [], [])
            self.workers.collect()
        for worker, line in enumerate(self.lines):
            assert all(bytes(view) == given for view, given in line.unreleased.values()), "it changed while it was read"
            self.send(worker, MessageHeader(MessageKind.RELEASE), np.array(list(line.unreleased), np.uint64).tobytes())
            line.unreleased.clear()

    def values(self) -> dict[int, tuple[bytes, list[int]]]:
        shards = self.store.shards.values()
        return {
            shard.key: (shard.array.tobytes(), [shard.engine.done(one) for one in range(self.num_workers)])
            for shard in shards
        }

    def close(self) -> None:
        self.workers.close()
        for connection in self.connections:
            connection.end()
        self.arena.close()


@dataclass
class Asked:
    """A call of a worker for several keys: its id where it is a batch, and each key's, behind that."""

    kind: MessageKind
    keys: tuple[int, ...]
    numbers: tuple[int, ...]
    values: dict[int, np.ndarray[Any, Any]]
    batch: int
    singles: dict[int, int]

    def body(self, keys: tuple[int, ...]) -> bytes:
        return b"".join(self.values[key].tobytes() for key in keys if self.kind != MessageKind.PULL)


@dataclass
class Player:
    """A worker, as both stores see it."""

    rounds: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))
    open: list[Asked] = field(default_factory=list)
    has_left: bool = False


class Game:
    """The same happens to two stores; one is sent batches."""

    def __init__(self, seed: int, num_workers: int | None = None) -> None:
        self.chance = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        num_workers = num_workers or self.chance.choice([1, 2, 2, 3])
        staleness = self.chance.choice([0.0, 0.0, 0.0, 1.0, float("inf")])
        policy = self.chance.choice(["abort", "continue", "wait"])
        optimizer = optim.create("sgd", learning_rate=0.1, momentum=0.9)
        chosen = optimizer if staleness or self.chance.random() < 0.3 else None
        self.batched, self.single = (Side(num_workers, staleness, policy, chosen) for _ in range(2))
        self.players = [Player() for _ in range(num_workers)]
        self.num_requests = 0
        #: what all workers do, in the same order, and how much of it each has done
        self.plan: list[tuple[str, tuple[int, ...]]] = []
        self.places = [0] * num_workers
        #: how often a worker sends keys in other selections than the others
        self.unevenness = self.chance.choice([0.0, 0.1, 0.5])
        self.mischief = self.chance.choice([0.0, 0.02, 0.1])
        #: how often it is waited for what threads compute
        self.patience = self.chance.choice([0.3, 1.0])

    def play(self, num_steps: int) -> None:
        try:
            for _ in range(num_steps):
                if self.chance.random() < self.mischief:
                    self.compare()  # workers know which of their pushes have failed, before and after
                    self.handle_events(
                        self.chance.choice(["reconnect", "reconnect", "lose", "find", "leave", "expire"])
                    )
                    self.compare()
                else:
                    self.go_on(self.chance.randrange(len(self.players)))
                if self.chance.random() < self.patience:
                    self.compare()
            self.handle_events("expire")
            self.compare()
        finally:
            self.batched.close()
            self.single.close()

    def go_on(self, worker: int) -> None:
        """A worker does what comes next; it is not far ahead of the others."""
        place = self.places[worker]
        if place > min(self.places) + 2:
            return
        self.places[worker] += 1
        if place == len(self.plan):
            keys = (
                USUAL
                if self.chance.random() < 0.8
                else tuple(self.chance.sample(list(SIZES), self.chance.randint(1, 3)))
            )
            self.plan.append((self.chance.choice(["pushpull", "pushpull", "push", "push then pull"]), keys))
        what, keys = self.plan[place]
        selections = [keys]
        if self.chance.random() < self.unevenness:
            cut = self.chance.randrange(len(keys))
            mixed = self.chance.sample(keys, len(keys))
            selections = [tuple(one) for one in (mixed[:cut], mixed[cut:]) if one]
        for kind in what.split(" then "):
            for selection in selections:
                self.ask(worker, kind, selection)

    def ask(self, worker: int, kind: str, keys: tuple[int, ...]) -> None:
        player = self.players[worker]
        if player.has_left:
            kind = "pull"
        if kind != "pull":
            for key in keys:
                player.rounds[key] += 1
        first = self.num_requests + 1
        self.num_requests += 1 + len(keys)
        asked = Asked(
            KINDS[kind],
            keys,
            tuple(player.rounds[key] for key in keys),
            {key: self.numbers.standard_normal(SIZES[key], np.float32) for key in keys},
            first,
            {key: first + 1 + place for place, key in enumerate(keys)},
        )
        player.open.append(asked)
        self.send(worker, asked)

    def send(self, worker: int, asked: Asked) -> None:
        for key, number in zip(asked.keys, asked.numbers, strict=True):
            header = MessageHeader(
                asked.kind, asked.singles[key], key, 0, number, int(MessageFlag.ANSWER_IN_MEMORY), FLOAT
            )
            for side in (self.single, self.batched)[: 2 if len(asked.keys) == 1 else 1]:
                side.send(worker, header, asked.body((key,)))
        if len(asked.keys) == 1:
            return
        about = np.array([asked.keys, asked.numbers], np.uint64).tobytes()
        header = MessageHeader(
            asked.kind,
            asked.batch,
            0,
            len(asked.keys),
            0,
            int(MessageFlag.BATCH | MessageFlag.ANSWER_IN_MEMORY),
            FLOAT,
        )
        self.batched.send(worker, header, about + asked.body(asked.keys))

    def handle_events(self, what: str) -> None:
        worker = self.chance.randrange(len(self.players))
        player = self.players[worker]
        if (what == "leave" and player.open) or (what == "lose" and player.has_left):
            return
        player.has_left |= what == "leave"
        for side in (self.batched, self.single):
            side.handle_events(what, worker)
        if what == "reconnect":
            self.num_requests += 1
            body = pack_counts((key, 0, self.single.store.shards[key, 0].engine.done(worker)) for key in SIZES)
            for side in (self.batched, self.single):
                side.send(worker, MessageHeader(MessageKind.RESUME, self.num_requests), body)
            for asked in player.open:
                self.send(worker, asked)

    def compare(self) -> None:
        for side in (self.batched, self.single):
            side.settle()
        assert self.batched.values() == self.single.values()
        assert self.batched.arena.num_used_bytes == self.single.arena.num_used_bytes
        for side in (self.batched, self.single):
            assert side.store.broken is None
            held = [sum(1 for held in shard.engine._held if held) for shard in side.store.shards.values()]
            waiting = any(shard.waiting for shard in side.store.shards.values())
            assert any(held) or waiting or not any(one.num_held_bytes for one in side.connections)
            for shard in side.store.shards.values():
                shard.engine.validate()
                assert not shard.queue
        for worker, player in enumerate(self.players):
            player.open = [asked for asked in player.open if not self.is_over(worker, asked)]

    def is_over(self, worker: int, asked: Asked) -> bool:
        """Whether a call has been answered, in both stores or in none, and alike."""
        found, expected = self.batched.lines[worker].answers, self.single.lines[worker].answers
        together = found.get(asked.batch)
        begin, is_over, player = 0, True, self.players[worker]
        for key, number in zip(asked.keys, asked.numbers, strict=True):
            answer, end = found.get(asked.singles[key]), begin + 4 * SIZES[key]
            if together is not None:
                assert answer is None
                answer = together[0], together[1] if asked.kind == MessageKind.PUSH else together[1][begin:end]
            begin = end
            assert answer == expected.get(asked.singles[key]), key
            is_over &= answer is not None
            if answer is not None and answer[0] == MessageKind.ERROR and asked.kind != MessageKind.PULL:
                # it counts on from what was done, as `KeyState.last_round` does
                player.rounds[key] = min(player.rounds[key], number - 1)
        return is_over


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(10, 60, 10))])
def test_batches_make_no_difference(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"together": 0, "opened": 0}

    def counted(name: str, of: type, method: str) -> None:
        original = getattr(of, method)

        def count(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(of, method, count)

    # a round of the usual keys takes more
    monkeypatch.setattr(store, "_SMALL_BYTES", 1 << 16 if first % 20 else 1 << 30)
    counted("together", BatchHandler, "_complete")
    counted("opened", KeyBatch, "split")
    for seed in range(first, first + 10):
        Game(seed).play(120)
    assert counts["together"] > 15, "the plain case has been tried"
    assert counts["opened"] > 5, "and what is not"


def test_rounds_overtake_each_other_where_priorities_differ() -> None:
    for seed in range(60):
        game = Game(seed, num_workers=2)
        calls: list[tuple[int, Asked]] = []
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(game, "send", lambda *call: calls.append(call))  # noqa: B023
                for worker in (0, 1, 0, 1, 0, 1):
                    game.ask(worker, "push", USUAL)
            for worker, asked in game.chance.sample(calls, len(calls)):
                game.send(worker, asked)
                assert game.batched.values() == game.single.values()
            game.compare()
            assert not any(player.open for player in game.players)
        finally:
            game.batched.close()
            game.single.close()


def test_a_push_that_comes_twice_counts_once() -> None:
    side = Side(2, 0.0, "abort", None)
    try:
        body = np.array([(1, 2), (1, 1)], np.uint64).tobytes() + np.ones(34, np.float32).tobytes()
        for worker, request in ((0, 10), (0, 20), (1, 30)):
            side.send(worker, MessageHeader(MessageKind.PUSH, request, 0, 2, 0, int(MessageFlag.BATCH), FLOAT), body)
        assert set(side.store.shards[2, 0].array.tolist()) == {2.0}
        assert [set(line.answers) - {1 << 40 | key for key in SIZES} for line in side.lines] == [{21, 22}, {31, 32}]
        assert all(connection.num_held_bytes < 1000 for connection in side.connections), (
            "one batch is dropped, not kept"
        )
    finally:
        side.close()


@pytest.mark.parametrize("size", [3, 5])
def test_a_push_that_waits_in_a_batch_does_not_reach_a_key_that_was_declared_anew(size: int) -> None:
    side = Side(2, 0.0, "abort", None)
    try:
        body = np.array([(2, 6), (1, 1)], np.uint64).tobytes() + np.ones(40, np.float32).tobytes()
        side.send(0, MessageHeader(MessageKind.PUSH, 10, 0, 2, 0, int(MessageFlag.BATCH), FLOAT), body)
        side.store.plan_shards(6, KeySpec(6, (size,), "float32", generation=1), (ShardRange(0, 0, size, 0),))
        side.send(0, MessageHeader(MessageKind.INIT, 20, 6), np.zeros(size, np.float32).tobytes())
        side.send(1, MessageHeader(MessageKind.PUSH, 30, 2, 0, 1, 0, FLOAT), np.ones(33, np.float32).tobytes())
        assert side.lines[0].answers[11] == (MessageKind.DONE, b"")
        kind, problem = side.lines[0].answers[12]
        assert (kind, problem.error, problem.key) == (MessageKind.ERROR, "ArgumentError", 6)
        assert set(side.store.shards[2, 0].array.tolist()) == {2.0}
        assert set(side.store.shards[6, 0].array.tolist()) == {0.0}
        assert not side.connections[0].open_requests
        assert side.connections[0].num_held_bytes == 0
    finally:
        side.close()


@pytest.mark.parametrize("staleness", [0.0, float("inf")])
def test_batches_that_were_opened_leave_no_cycles(staleness: float) -> None:
    """Servers look for cycles rarely (`reigen.kv.run_role`)."""
    side = Side(2, staleness, "abort", optim.create("sgd", learning_rate=1.0))
    try:
        gc.collect()
        gc.disable()
        for number, key in enumerate((1, 2), 1):  # in a synchronous store, single pushes open what waits
            body = np.array([(1, 2), (number, number)], np.uint64).tobytes() + bytes(4 * 34)
            side.send(0, MessageHeader(MessageKind.PUSHPULL, 10 * number, 0, 2, 0, int(MessageFlag.BATCH), FLOAT), body)
            for single in (key, 3 - key) if not staleness else ():
                header = MessageHeader(MessageKind.PUSH, 1000 * number + single, single, 0, number, 0, FLOAT)
                side.send(1, header, bytes(4 * SIZES[single]))
            assert not side.connections[0].open_requests
            assert {10 * number + 1, 10 * number + 2} <= set(side.lines[0].answers)
        assert gc.collect() == 0
    finally:
        gc.enable()
        side.close()


def test_an_update_that_fails_is_that_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Shard.change

    def change(shard: Shard, *arguments: Any) -> None:
        if shard.key == 4:
            raise MemoryError("no memory")
        original(shard, *arguments)

    monkeypatch.setattr(Shard, "change", change)
    side = Side(1, 0.0, "abort", optim.create("sgd", learning_rate=1.0))
    try:
        body = np.array([USUAL, [1] * len(USUAL)], np.uint64).tobytes() + bytes(4 * sum(SIZES[key] for key in USUAL))
        side.send(0, MessageHeader(MessageKind.PUSH, 10, 0, len(USUAL), 0, int(MessageFlag.BATCH), FLOAT), body)
        assert side.store.broken is not None
        assert side.store.broken.key == 4
        assert side.lines[0].answers[10][0] == MessageKind.ERROR
    finally:
        side.close()


def test_a_round_that_is_plain_takes_no_more_memory_than_the_values() -> None:
    side = Side(2, 0.0, "abort", None)
    try:
        before = side.arena.num_used_bytes
        for number in range(1, 5):
            for worker in range(2):
                about = np.array([USUAL, [number] * len(USUAL)], np.uint64).tobytes()
                body = about + b"".join(np.full(SIZES[key], worker + 1, np.float32).tobytes() for key in USUAL)
                side.send(
                    worker,
                    MessageHeader(MessageKind.PUSHPULL, number, 0, len(USUAL), 0, int(MessageFlag.BATCH), FLOAT),
                    body,
                )
        assert {value for key in USUAL for value in side.store.shards[key, 0].array.tolist()} == {3.0}
        assert side.arena.num_used_bytes == before
        assert all(connection.num_held_bytes == 0 for connection in side.connections)
    finally:
        side.close()


@pytest.mark.parametrize(
    ("keys", "numbers", "extra", "flags", "dtype", "says"),
    [
        ((), (), 0, 0, FLOAT, "a batch of 0 keys"),
        ((1, 2), (1, 1), 4, 0, FLOAT, "bytes of elements"),
        ((1, 2), (1, 0), 0, 0, FLOAT, "a push without a round"),
        ((1, 1), (1, 2), 0, 0, FLOAT, "the same key twice"),
        ((1, 2), (1, 1), 0, int(MessageFlag.ENCODED), FLOAT, "with flags"),
        ((1, 2), (1, 1), 0, 0, DTYPE_NUMBERS["float16"], "in a batch of others"),
    ],
)
def test_what_no_worker_sends_ends_its_connection(
    keys: tuple[int, ...], numbers: tuple[int, ...], extra: int, flags: int, dtype: int, says: str
) -> None:
    side = Side(2, 0.0, "abort", None)
    try:
        body = np.array([keys, numbers], np.uint64).tobytes() + bytes(4 * sum(SIZES[key] for key in keys) + extra)
        header = MessageHeader(MessageKind.PUSHPULL, 1, 0, len(keys), 0, int(MessageFlag.BATCH) | flags, dtype)
        with pytest.raises(WireError, match=says):
            side.send(0, header, body)
        for request, count in enumerate((0, MAX_BATCH_KEYS + 1, (1 << 32) - 1), 10):
            with pytest.raises(WireError, match="a batch of"):
                side.send(
                    0, MessageHeader(MessageKind.PUSH, request, 0, count, 0, int(MessageFlag.BATCH), FLOAT), bytes(64)
                )
        with pytest.raises(WireError, match="which no worker sends"):
            side.send(0, MessageHeader(MessageKind.INIT, 3, 1, 1, 0, int(MessageFlag.BATCH), FLOAT), bytes(20))
    finally:
        side.close()


def test_a_key_that_is_not_there_is_an_error_of_the_batch_and_changes_nothing() -> None:
    side = Side(1, 0.0, "abort", None)
    try:
        before = side.values()
        about = np.array([[1, 99], [1, 1]], np.uint64).tobytes()
        side.send(0, MessageHeader(MessageKind.PUSH, 1, 0, 2, 0, int(MessageFlag.BATCH), FLOAT), about + bytes(8))
        kind, problem = side.lines[0].answers[1]
        assert kind == MessageKind.ERROR
        assert "there is no key 99" in problem.reason
        assert side.values() == before
    finally:
        side.close()
