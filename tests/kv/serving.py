"""A server in a thread, a membership without a scheduler, and a worker that speaks the protocol by hand."""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time

import numpy as np

from reigen.cluster.membership.messages import JobEnded
from reigen.config import Config
from reigen.kv.connection import KVConnection
from reigen.kv.membership.scheduler_client import EventFeed
from reigen.kv.protocol import (
    COMMAND_CODEC,
    DECLARE_CODEC,
    DECLARED_CODEC,
    HELLO_CODEC,
    NOTICE_CODEC,
    PURPOSE,
    REMOTE_ERROR_CODEC,
    RESULT_CODEC,
    DeclareKey,
    KeySpec,
    KVHello,
    MessageFlag,
    MessageHeader,
    MessageKind,
    ShardRange,
    StoreCommand,
)
from reigen.kv.server.server import KVServer
from reigen.kv.shm_arena import PeerShmArena, ShmArena
from reigen.kv.values import key_id
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection
from reigen.net.listener import open_listening_socket

SECRET = b"k" * 32
SECONDS = 40.0


class FakeMember:
    """A server's place in a job whose scheduler is the test."""

    role = "server"
    tls = None
    host = "here"

    def __init__(self, number=0, num_workers=2, *, is_recovery=False, incarnation=1, secret=SECRET, job=1):
        self.number, self.num_workers, self.num_servers, self.job = number, num_workers, 1, job
        self.is_recovery, self.incarnation, self.secret = is_recovery, incarnation, secret
        self._lock = threading.Lock()
        self._feed = EventFeed(self._lock)

    def tell(self, event):
        with self._lock:
            if self._feed.fileno() >= 0:
                self._feed.put([event])

    def feed(self):
        return self._feed

    def report_keys(self, text):
        self.keys = text

    def close(self):
        self._feed.close()


class Serving:
    """A server in a thread of its own, until ``stop``."""

    def __init__(self, num_workers=2, config=None, **facts):
        self.member = FakeMember(num_workers=num_workers, **facts)
        listener, self.address = open_listening_socket("127.0.0.1")
        self.exit_code = None
        try:
            self.server = KVServer(self.member, config or Config(), listener)
        except BaseException:
            listener.close()
            self.member.close()
            raise
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        self.exit_code = self.server.serve()

    def stop(self, exit_code=0):
        if self._thread.is_alive():
            self.member.tell(JobEnded(exit_code, "the test is over"))
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"
        self.member.close()

    def worker(self, number, **facts):
        return RawWorker(self.address, number, secret=self.member.secret, **facts)


class RawWorker:
    """One worker's connection to one server. Everything waits at most ``SECONDS``."""

    def __init__(
        self, address, number, *, store=0, staleness=0, shares=False, incarnation=1, secret=SECRET, host_id=""
    ):
        host, _, port = address.rpartition(":")
        me = Identity(ProcessRole.RANK, number, PURPOSE)
        stream = open_connection((host, int(port)), secret, me, 1 << 12, time.monotonic() + SECONDS)
        self.line = KVConnection(*stream.detach(), self, f"server of {number}")
        self.number, self.store, self.messages, self.notices = number, store, {}, []
        self.ids = itertools.count(1)
        self.arena = ShmArena("reigen-test-worker") if shares else None
        self.peer = None
        segment = self.arena.segment if shares else None
        facts = (host_id, os.getpid(), segment.fd, segment.inode) if shares else ()
        hello = HELLO_CODEC.encode(KVHello(number, incarnation, "there", *facts, staleness=staleness))
        self.welcome = None
        self.line.send(MessageHeader(MessageKind.HELLO, store=store, body_bytes=len(hello)), hello)
        try:
            self.until(lambda: self.welcome or self.notices)
        except BaseException:
            self.close()
            raise
        if shares and self.welcome:
            self.peer, _ = PeerShmArena.open(self.welcome, host_id)

    # -- the receiver of the line

    def place(self, line, header):
        return memoryview(bytearray(header.body_bytes))

    def arrived(self, line, header, body):
        if header.kind == MessageKind.WELCOME:
            self.welcome = HELLO_CODEC.decode(bytes(body))
        elif header.kind == MessageKind.NOTICE:
            self.notices.append(NOTICE_CODEC.decode(bytes(body)))
        else:
            if header.flags & MessageFlag.IN_MEMORY:
                body = memoryview(self.peer.view(header.offset, header.memory_bytes)).tobytes()
            self.messages.setdefault(header.request, []).append((header, bytes(body)))

    # -- requests

    def begin(self, kind, *, key=0, shard=0, round=0, body=b"", flags=0, request=None, about=0, priority=0):
        """Send a request; returns its id."""
        request = next(self.ids) if request is None else request
        body = body.tobytes() if isinstance(body, np.ndarray) else bytes(body)
        facts = {"key": _id(key), "shard": shard, "round": round, "flags": flags, "store": self.store}
        facts |= {"about": about, "priority": priority}
        if self.arena is not None and len(body) >= 1 << 16:
            block = self.arena.allocate(len(body))
            block.array[:] = np.frombuffer(body, np.uint8)
            facts["flags"] |= MessageFlag.IN_MEMORY
            self.line.send(MessageHeader(kind, request, offset=block.offset, memory_bytes=len(body), **facts))
        else:
            self.line.send(MessageHeader(kind, request, body_bytes=len(body), **facts), body)
        self.line.advance_sends()
        return request

    def end(self, request, kind=None):
        """Wait for the answer to a request: its header and body, or the error it is. Receipts do not count."""
        self.until(lambda: self.messages.get(request))
        header, body = self.messages[request].pop(0)
        if not self.messages[request]:
            del self.messages[request]
        if header.kind == MessageKind.RECEIVED != kind:
            return self.end(request, kind)
        if header.kind == MessageKind.ERROR:
            raise REMOTE_ERROR_CODEC.decode(body).raised()
        assert kind is None or header.kind == kind, MessageKind(header.kind)
        return header, body

    def ask(self, kind, **facts):
        return self.end(self.begin(kind, **facts))

    def declare(self, name, shape, dtype="float32", places=None, *, wait=True, home=True, **facts):
        """The DECLARE of a worker; of worker 0 with all that follows, in a job of one server."""
        if self.number == 0 and places is None:
            places = (ShardRange(0, 0, int(np.prod(shape)), 0),)
        spec = {field: facts.pop(field) for field in ("stype", "generation") if field in facts}
        body = DECLARE_CODEC.encode(DeclareKey(KeySpec(name, tuple(shape), dtype, **spec), places, **facts))
        request = self.begin(MessageKind.DECLARE, key=name, body=body, flags=MessageFlag.HOME if home else 0)
        return DECLARED_CODEC.decode(self.end(request, MessageKind.DECLARED)[1]) if wait else request

    def initialise(self, name, value, places, dtype=None, **facts):
        """Worker 0's INIT of all shards, and the DECLARE that ends the initialisation."""
        flat = value.reshape(-1)
        for place in places:
            self.ask(MessageKind.INIT, key=name, shard=place.index, body=flat[place.begin : place.end])
        return self.declare(name, value.shape, dtype or value.dtype.name, places, is_initialised=True, **facts)

    def command(self, name, wait=True, **arguments):
        request = self.begin(MessageKind.COMMAND, body=COMMAND_CODEC.encode(StoreCommand(name, arguments)))
        return RESULT_CODEC.decode(self.end(request, MessageKind.DONE)[1]).value if wait else request

    def value(self, request, dtype=np.float32):
        return np.frombuffer(self.end(request, MessageKind.VALUE)[1], dtype)

    def pull(self, name, round, dtype=np.float32, shard=0, flags=0):
        return self.value(self.begin(MessageKind.PULL, key=name, round=round, shard=shard, flags=flags), dtype)

    # -- the socket

    def until(self, condition):
        deadline = time.monotonic() + SECONDS
        while not condition():
            self.line.advance_sends()
            if not self.line.receive() and not condition():
                left = deadline - time.monotonic()
                assert left > 0, f"worker {self.number}: nothing happened for {SECONDS} s"
                select.select([self.line], [self.line] if self.line.wants_to_send else [], [], left)

    def close(self):
        self.line.close()
        if self.arena is not None:
            self.arena.close()
        if self.peer is not None:
            self.peer.close()


def _id(key):
    return key if isinstance(key, int) and key == 0 else key_id(key)


def start(workers, name, value, places=None, dtype=None, **facts):
    """All workers declare a key and worker 0 gives it its value."""
    dtype = dtype or value.dtype.name
    places = places or (ShardRange(0, 0, value.size, 0),)
    asked = [
        worker.declare(name, value.shape, dtype, places if worker.number == 0 else None, wait=False, **facts)
        for worker in workers
    ]
    workers[0].end(asked[0], MessageKind.DECLARED)
    workers[0].initialise(name, value, places, dtype, **facts)
    for worker, request in zip(workers[1:], asked[1:], strict=True):
        worker.end(request, MessageKind.DECLARED)


def refused_connection(address):
    """Whether nobody listens there any more."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return True
    return False
