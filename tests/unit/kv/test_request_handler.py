"""Whatever a worker that knows the secret sends: a store answers, or ends that worker's connection, and stays sound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reigen.cluster.membership.members import LossPolicy
from reigen.config import WORKER_LOSS_POLICIES
from reigen.errors import WireError
from reigen.kv.protocol import (
    COMMAND_CODEC,
    CONTROL_KINDS,
    DECLARE_CODEC,
    DTYPE_NUMBERS,
    DeclareKey,
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
from reigen.kv.server.buffers import BufferPool, ValueAllocator
from reigen.kv.server.request_handler import RequestHandler
from reigen.kv.server.requests import WorkerConnection
from reigen.kv.server.store import ServerContext, ServerStore
from reigen.kv.server.thread_pool import ComputeThreads
from reigen.kv.values import key_id
from reigen.optim import SGD

pytestmark = pytest.mark.slow

DENSE, ROWS, OTHER = key_id("dense"), key_id("rows"), key_id("other")
FLOAT = DTYPE_NUMBERS["float32"]


class Line:
    """Keeps what is sent."""

    def __init__(self, name):
        self.name, self.sent = name, []

    def send(self, header, body=b"", *, priority=0, on_sent=None):
        assert unpack_header(header.pack()) == header, "a message that nobody would take"
        assert header.body_bytes == len(body)
        self.sent.append(header)

    def close(self):
        pass


class Scene:
    """A store with two keys and two workers, without sockets."""

    def __init__(self, staleness=0.0, policy="abort", has_optimizer=False):
        self.workers = ComputeThreads(1)
        around = ServerContext(
            0, 2, ValueAllocator(None), BufferPool(), self.workers, policy=LossPolicy(policy), acknowledges=True
        )
        self.store = ServerStore(0, staleness, around)
        self.handler = RequestHandler(self.store)
        self.connections = [self.connect(number) for number in range(2)]
        for key, facts in [
            (DENSE, KeySpec("dense", (4,), "float32", "default", 0)),
            (ROWS, KeySpec("rows", (3, 2), "float32", "row_sparse", 0)),
            (OTHER, KeySpec("other", (2,), "float32", "default", 0)),
        ]:
            size = int(np.prod(facts.shape))
            self.store.plan_shards(key, facts, (ShardRange(0, 0, size, 0), ShardRange(1, size, size, 1)))
            header = MessageHeader(MessageKind.INIT, 1 << 40 | len(self.store.shards), key, body_bytes=4 * size)
            self.handler.arrived(self.connections[0], header, np.zeros(4 * size, np.uint8))
        if has_optimizer:
            body = COMMAND_CODEC.encode(StoreCommand("set_optimizer", {"spec": SGD(learning_rate=0.5).to_spec()}))
            for connection in self.connections:
                self.handler.arrived(
                    connection, MessageHeader(MessageKind.COMMAND, 1 << 41, body_bytes=len(body)), _bytes(body)
                )
        self.num_rounds = 0

    def push(self):
        """Worker 0 does as it should."""
        self.num_rounds += 1
        for key, size in ((DENSE, 4), (ROWS, 6)):
            request = (1 << 42) + 2 * self.num_rounds + (key == ROWS)
            header = MessageHeader(MessageKind.PUSHPULL, request, key, 0, self.num_rounds, body_bytes=4 * size)
            self.handler.arrived(self.connections[0], header, np.ones(4 * size, np.uint8))

    def push_together(self):
        """The same, with a batch."""
        self.num_rounds += 1
        keys = [DENSE, OTHER]
        body = np.array([keys, [self.num_rounds] * 2], np.uint64).tobytes() + bytes(24)
        request = (1 << 43) + self.num_rounds
        header = MessageHeader(
            MessageKind.PUSHPULL, request, 0, 2, 0, int(MessageFlag.BATCH), FLOAT, body_bytes=len(body)
        )
        self.handler.arrived(self.connections[0], header, _bytes(body).copy())

    def connect(self, number, incarnation=1):
        connection = WorkerConnection(
            KVHello(number, incarnation, "host"), 0, Line(f"worker {number}"), ValueAllocator(None)
        )
        self.store.connected(connection)
        return connection

    def close(self):
        self.workers.close()

    def check(self):
        for shard in self.store.shards.values():
            shard.engine.validate()
            assert not shard.queue
        assert self.store.broken is None


def _bytes(body):
    return np.frombuffer(body, np.uint8)


BODIES = st.one_of(
    st.binary(max_size=64),
    st.sampled_from([0, 4, 8, 16, 24, 48]).map(bytes),
    st.lists(st.integers(-2, 4), max_size=3).map(
        lambda rows: np.array(rows, np.int64).tobytes() + bytes(8 * len(rows))
    ),
    st.builds(
        lambda name, shape, dtype, stype, generation, ready: DECLARE_CODEC.encode(
            DeclareKey(KeySpec(name, shape, dtype, stype, generation), (ShardRange(0, 0, 4, 0),), ready)
        ),
        st.sampled_from(["dense", "rows", "new", 5]),
        st.sampled_from([(4,), (3, 2), ()]),
        st.sampled_from(["float32", "float16", "rubbish"]),
        st.sampled_from(["default", "row_sparse"]),
        st.integers(0, 2),
        st.booleans(),
    ),
    st.sampled_from(
        [
            ("set_optimizer", {"spec": SGD(learning_rate=0.5).to_spec()}),
            ("set_optimizer", {"spec": {"name": "sgd", "momentum": "much"}}),
            ("set_optimizer", {}),
            ("set_gradient_compression", {"params": {"type": "2bit"}}),
            ("set_gradient_compression", {"params": {"type": "2bit", "threshold": "low"}}),
            ("set_learning_rate", {"learning_rate": 2}),
            ("set_learning_rate", {"learning_rate": "fast"}),
            ("rubbish", {}),
        ]
    ).map(lambda command: COMMAND_CODEC.encode(StoreCommand(*command))),
    st.lists(
        st.tuples(st.sampled_from([DENSE, ROWS, 5]), st.integers(0, 1), st.sampled_from([0, 1, 3, 2**64 - 1]))
    ).map(pack_counts),
    st.builds(
        lambda keys, rounds, size: np.array([keys, rounds[: len(keys)]], np.uint64).tobytes() + bytes(size),
        st.lists(st.sampled_from([DENSE, OTHER, OTHER, ROWS, 5]), min_size=1, max_size=3),
        st.lists(st.sampled_from([0, 1, 1, 2, 2**64 - 1]), min_size=3, max_size=3),
        st.sampled_from([0, 8, 16, 24, 28]),
    ),
)
MESSAGES = st.builds(
    lambda kind, request, key, shard, round_, flags, dtype, about, body, where: (
        MessageHeader(kind, request, key, shard, round_, flags, dtype, about, 0, 0, len(body), *where),
        body,
    ),
    st.sampled_from(list(MessageKind)),
    st.integers(0, 6),
    st.sampled_from([DENSE, ROWS, key_id("new"), 5]),
    st.integers(0, 2),
    st.sampled_from([0, 1, 2, 3, 4, 200, 2**64 - 1]),
    st.sampled_from(
        [
            0,
            MessageFlag.BATCH,
            MessageFlag.HOME,
            MessageFlag.ENCODED,
            MessageFlag.ENCODE_ANSWER,
            MessageFlag.ANSWER_IN_MEMORY,
            MessageFlag.RESENT,
            255 & ~1,
        ]
    ),
    st.sampled_from([0, 0, 0, FLOAT, 5, 6]),
    st.sampled_from([0, *MessageKind]),
    BODIES,
    st.sampled_from([(0, 0), (0, 8), (1 << 60, 1 << 60)]),
)
#: what is nearly right
PUSHES = st.builds(
    lambda kind, request, key, round_, flags, body: (
        MessageHeader(kind, request, key, 0, round_, flags, body_bytes=len(body)),
        body,
    ),
    st.sampled_from([MessageKind.PUSH, MessageKind.PUSHPULL, MessageKind.ROW_PUSH]),
    st.integers(7, 100),
    st.sampled_from([DENSE, ROWS]),
    st.integers(1, 4),
    st.sampled_from([0, 0, 0, MessageFlag.ENCODED, MessageFlag.ENCODE_ANSWER]),
    st.one_of(
        st.sampled_from([0, 4, 8, 12, 16, 20, 24]).map(bytes),
        st.lists(st.integers(-1, 3), max_size=3).map(
            lambda rows: np.array(rows, np.int64).tobytes() + bytes(8 * len(rows))
        ),
    ),
)


def _batch(kind, request, keys, rounds, num_more):
    num_bytes = 0 if kind == MessageKind.PULL else sum({DENSE: 16, OTHER: 8, ROWS: 24}[key] for key in keys) + num_more
    body = np.array([keys, rounds[: len(keys)]], np.uint64).tobytes() + bytes(num_bytes)
    return MessageHeader(kind, request, 0, len(keys), 0, MessageFlag.BATCH, FLOAT, body_bytes=len(body)), body


BATCHS = st.builds(
    _batch,
    st.sampled_from([MessageKind.PUSH, MessageKind.PUSHPULL, MessageKind.PULL]),
    st.integers(7, 100),
    st.lists(st.sampled_from([DENSE, OTHER, DENSE, OTHER, ROWS]), min_size=1, max_size=2, unique=True),
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    st.sampled_from([0, 0, 0, 0, 4]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.one_of(MESSAGES, PUSHES, PUSHES, BATCHS)),
        st.tuples(st.sampled_from(["push", "push", "push together", "again", "lose", "return"]), st.none()),
    ),
    max_size=25,
)


@pytest.mark.parametrize("staleness", [0.0, 2.0, float("inf")])
@pytest.mark.parametrize("policy", WORKER_LOSS_POLICIES)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS, has_optimizer=st.booleans())
def test_nothing_that_a_worker_sends_harms_a_store(staleness, policy, steps, has_optimizer):
    scene = Scene(staleness, policy, has_optimizer)
    try:
        for what, message in steps:
            connection = scene.connections[1]
            if what == "send":
                header, body = message
                try:
                    unpack_header(header.pack())
                    place = scene.handler.place(header)
                    assert len(place) == header.body_bytes
                    place[:] = _bytes(body)
                    scene.handler.arrived(connection, header, place)
                except WireError:
                    scene.store.disconnected(connection)
                    scene.connections[1] = scene.connect(1)
            elif what == "push":
                scene.push()
            elif what == "push together":
                scene.push_together()
            elif what == "again":
                scene.connections[1] = scene.connect(1)
            elif what == "lose":
                scene.store.lost(1, "host", "the test wants it")
            else:
                scene.store.found(1, "host")
            scene.check()
        scene.store.expire()
    finally:
        scene.close()


def test_all_that_is_no_request_of_a_worker_ends_the_connection():
    scene = Scene()
    try:
        for kind in MessageKind:
            if kind >= MessageKind.WELCOME or kind == MessageKind.HELLO:
                with pytest.raises(WireError, match="which no worker sends"):
                    scene.handler.arrived(scene.connections[0], MessageHeader(kind, 1), np.empty(0, np.uint8))
        assert all(
            kind in CONTROL_KINDS
            for kind in (MessageKind.RELEASE, MessageKind.RESUME, MessageKind.COMMAND, MessageKind.DECLARE)
        )
    finally:
        scene.close()


def test_rows_whose_difference_overflows_are_not_ascending():
    scene = Scene()
    try:
        body = np.array([2**63 - 1, -2], np.int64).tobytes() + bytes(16)
        header = MessageHeader(MessageKind.ROW_PUSH, 7, ROWS, 0, 1, body_bytes=len(body))
        with pytest.raises(WireError, match="not ascending"):
            scene.handler.arrived(scene.connections[1], header, _bytes(body).copy())
        scene.check()
    finally:
        scene.close()
