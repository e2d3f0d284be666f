"""Requests of workers on a server, from their arrival to their answer, and the connections that they come by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ReigenError, WireError
from reigen.files import Buffer
from reigen.kv.connection import KVConnection
from reigen.kv.consistency.state_machine import ConsistencyEvent, PullRequested, PushReceived, RequestToken
from reigen.kv.protocol import (
    INLINE_BYTES,
    PUSH_KINDS,
    REMOTE_ERROR_CODEC,
    KVHello,
    MessageFlag,
    MessageHeader,
    MessageKind,
    RemoteError,
)
from reigen.kv.server.buffers import BufferPool, ValueAllocator, ValueBuffer
from reigen.kv.server.reduction import PushData
from reigen.kv.shm_arena import PeerShmArena

if TYPE_CHECKING:
    from reigen.kv.server.shard import Shard

# As plain numbers, since enumerations are slow.
_PUSHPULL, _DONE, _VALUE, _ERROR = map(
    int, (MessageKind.PUSHPULL, MessageKind.DONE, MessageKind.VALUE, MessageKind.ERROR)
)
_IN_MEMORY, _ANSWER_IN_MEMORY = int(MessageFlag.IN_MEMORY), int(MessageFlag.ANSWER_IN_MEMORY)


@dataclass(eq=False, slots=True)
class WorkerRequest:
    """Request of a worker. It is its own token for `reigen.kv.consistency.state_machine`.

    Attributes:
        since: when it came, on the clock of ``time.monotonic()``.
        shard: that it is about, if any.
        contribution: what it gives to that, until it has been used.
        buffer: the received body, whose memory is given back then.
        rows: numbers of the rows that it asks for.
        pull_half: the token of its second half, where it is a PUSHPULL.
        parts: of a batch that was split, by their ids, the requests for its keys that are not answered.
        batch: that this is a part of, if any.
        num_unreleased_parts: how many parts of the batch need its body; 1 for a part that does.
    """

    connection: WorkerConnection
    header: MessageHeader
    since: float
    shard: Shard | None = None
    contribution: PushData | None = None
    buffer: NDArray[np.uint8] | None = None
    rows: NDArray[np.int64] | None = None
    pull_half: PullHalf | None = None
    parts: dict[int, WorkerRequest] | None = None
    batch: WorkerRequest | None = None
    num_unreleased_parts: int = 0
    is_answered: bool = False

    def events(self) -> list[ConsistencyEvent]:
        """Return the push, the pull, or both, for the engine of its shard."""
        header, worker = self.header, self.connection.worker
        if header.kind not in PUSH_KINDS:
            return [PullRequested(worker, header.round, self)]
        events: list[ConsistencyEvent] = [PushReceived(worker, header.round, self)]
        if header.kind == _PUSHPULL:
            self.pull_half = PullHalf(self)
            events.append(PullRequested(worker, header.round, self.pull_half))
        return events

    def release_body(self, buffers: BufferPool) -> None:
        """Give back the memory of its body; that of a batch goes with the last of its parts."""
        if self.buffer is not None:
            self.connection.num_held_bytes -= self.buffer.nbytes
            buffers.give(self.buffer)
        self.contribution = self.buffer = None
        if self.num_unreleased_parts:
            self.num_unreleased_parts = 0
            if self.batch is not None:
                self.batch.num_unreleased_parts -= 1
                if not self.batch.num_unreleased_parts:
                    self.batch.release_body(buffers)


@dataclass(slots=True, eq=False)
class PullHalf:
    """Token of the pull in a PUSHPULL request; the request itself is the token of the push."""

    request: WorkerRequest


def request_of(token: RequestToken) -> WorkerRequest:
    """Return the request of a token."""
    request = token.request if isinstance(token, PullHalf) else token
    assert isinstance(request, WorkerRequest)
    return request


@dataclass(eq=False)
class WorkerConnection:
    """Connection of a worker to one store of a server.

    Attributes:
        peer: the worker's arena, if it can be read here.
        open_requests: by id, those without an answer.
        must_flush: something was queued since the last flush.
        num_held_bytes: of received bodies that are in use (`reigen.kv.server.flow_control`).
    """

    hello: KVHello
    store: int
    line: KVConnection
    memory: ValueAllocator
    peer: PeerShmArena | None = None
    open_requests: dict[int, WorkerRequest] = field(default_factory=dict)
    is_open: bool = True
    must_flush: bool = False
    num_held_bytes: int = 0
    #: memory that the worker reads, or the kernel has not sent, by the request that it answers
    _leases: dict[int, list[ValueBuffer]] = field(default_factory=dict)
    #: the requests whose answers wait for the kernel
    _sending: set[int] = field(default_factory=set)

    @property
    def worker(self) -> int:
        return self.hello.number

    def unanswered(self) -> Iterator[WorkerRequest]:
        """Requests without an answer; of batches that were split, their parts."""
        for request in self.open_requests.values():
            if request.parts is None:
                yield request
            else:
                yield from request.parts.values()

    def is_busy_with(self, request: int) -> bool:
        """Return whether a request is not answered, or its answer has not left: if it comes again, it is ignored."""
        return request in self.open_requests or request in self._sending

    def body_of(self, header: MessageHeader, received: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a request's body: received bytes, or a part of the worker's arena; WireError if it is not there."""
        if not header.flags & _IN_MEMORY:
            return received
        if self.peer is None:
            raise WireError(f"{self.line.name}: a body in memory that is not shared")
        return self.peer.view(header.offset, header.memory_bytes)

    def send(self, header: MessageHeader, body: Buffer = b"", priority: int = 0) -> None:
        """Queue a message, if the connection is still there."""
        if self.is_open:
            self.line.send(header, memoryview(body), priority=priority)
            self.must_flush = True

    def answer(
        self, request: WorkerRequest, kind: int = _DONE, body: Buffer = b"", flags: int = 0, dtype: int = 0
    ) -> None:
        """Answer a request with bytes that do not change. Of several answers only the first is sent."""
        if self._finish(request):
            asked = request.header
            self.send(asked.answer(kind, flags, dtype, len(body)), body, asked.priority)

    def answer_value(self, request: WorkerRequest, value: ValueBuffer, dtype: int) -> None:
        """Answer a request with memory that must not change until the worker, or the kernel, has it."""
        asked, nbytes = request.header, value.array.nbytes
        if nbytes < INLINE_BYTES:
            self.answer(request, _VALUE, value.array.tobytes(), dtype=dtype)
            return
        if not self._finish(request) or not self.is_open:
            return
        self.memory.lease(value)
        self._leases.setdefault(asked.request, []).append(value)
        self.must_flush = True
        if value.block is not None and self.peer is not None and asked.flags & _ANSWER_IN_MEMORY:
            header = asked.answer(_VALUE, _IN_MEMORY, dtype, 0, value.block.offset, nbytes)
            self.line.send(header, priority=asked.priority)
            return
        self._sending.add(asked.request)

        def on_sent() -> None:
            self._sending.discard(asked.request)
            self.release(asked.request, value)

        header = asked.answer(_VALUE, 0, dtype, nbytes)
        self.line.send(header, value.array.data, priority=asked.priority, on_sent=on_sent)

    def refuse(self, request: WorkerRequest, problem: RemoteError | ReigenError, key: int | str | None = None) -> None:
        """Answer a request with an error."""
        if isinstance(problem, ReigenError):
            problem = RemoteError.of(problem, key)
        self.answer(request, _ERROR, REMOTE_ERROR_CODEC.encode(problem))

    def release(self, request: int, value: ValueBuffer | None = None) -> None:
        """End the leases of an answer that the worker has copied, or of ``value``, which the kernel has."""
        leased = self._leases.get(request, [])
        for one in [value] if value is not None else list(leased):
            if one in leased:
                leased.remove(one)
                self.memory.release(one)
        if not leased:
            self._leases.pop(request, None)

    def end(self) -> None:
        """Close the connection: nothing is read any more. May be called twice."""
        self.is_open = False
        self.line.close()
        for request in list(self._leases):
            self.release(request)
        for batch in self.open_requests.values():
            batch.parts = None  # which refer to it
        self.open_requests.clear()
        if self.peer is not None:
            self.peer.close()

    def _finish(self, request: WorkerRequest) -> bool:
        """Return whether a request had no answer until now."""
        if request.is_answered:
            return False
        request.is_answered = True
        request.pull_half = None  # which refers to the request
        batch = request.batch
        if batch is None:
            self._close(request)
        elif batch.parts is not None:
            batch.parts.pop(request.header.request, None)
            if not batch.parts:
                self._close(batch)
        return True

    def _close(self, request: WorkerRequest) -> None:
        """Forget a request that is answered, or a batch all of whose parts are."""
        self.open_requests.pop(request.header.request, None)
        if request.parts is not None:
            request.is_answered, request.parts = True, None  # parts refer to the batch
