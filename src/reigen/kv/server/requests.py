"""A worker's request on a server, from its arrival to its answer, and the connection that it came by."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ReigenError, WireError
from reigen.kv.connection import KVConnection
from reigen.kv.protocol import (
    INLINE_BYTES,
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

_log = logging.getLogger(__name__)
# as plain numbers, since this is done for every request
_IN_MEMORY, _ANSWER_IN_MEMORY = int(MessageFlag.IN_MEMORY), int(MessageFlag.ANSWER_IN_MEMORY)
_ENCODE_ANSWER = int(MessageFlag.ENCODE_ANSWER)


@dataclass(eq=False, slots=True)
class WorkerRequest:
    """A request. It is its own token for `reigen.kv.consistency.state_machine`.

    Attributes:
        connection: whom to answer.
        header: what was asked.
        since: when it came, on the clock of ``time.monotonic()``.
        shard: that it is about, if any.
        contribution: what it gives to that, until it has been used.
        buffer: the received body, whose memory is given back then.
        numbers: of the rows that it asks for.
        reading: the token of its second half, where it is a PUSHPULL.
        parts: of a bundle that was opened, by their ids, the requests for its keys that are not answered.
        bundle: that this is a part of, if any.
        num_holding: how many parts of the bundle need its body; 1 for a part that does.
        is_answered: nothing more is said about it.
    """

    connection: WorkerConnection
    header: MessageHeader
    since: float
    shard: Shard | None = None
    contribution: PushData | None = None
    buffer: NDArray[np.uint8] | None = None
    numbers: NDArray[np.int64] | None = None
    reading: PullHalf | None = None
    parts: dict[int, WorkerRequest] | None = None
    bundle: WorkerRequest | None = None
    num_unreleased_parts: int = 0
    is_answered: bool = False

    @property
    def accepts_encoded(self) -> bool:
        """Whether the answer may be encoded."""
        return bool(self.header.flags & _ENCODE_ANSWER)

    def used(self, buffers: BufferPool) -> None:
        """Its body is not needed any more. That of a bundle is as long as one of its parts has not said so."""
        if self.buffer is not None:
            self.connection.num_held_bytes -= self.buffer.nbytes
            buffers.give(self.buffer)
        self.contribution = self.buffer = None
        if self.num_unreleased_parts:
            self.num_unreleased_parts = 0
            if self.bundle is not None:
                self.bundle.num_unreleased_parts -= 1
                if not self.bundle.num_unreleased_parts:
                    self.bundle.used(buffers)


@dataclass(slots=True, eq=False)
class PullHalf:
    """The second half of a PUSHPULL: its own token, since the first is one, too."""

    request: WorkerRequest


@dataclass(eq=False)
class WorkerConnection:
    """What a server knows of the other end of a line.

    Attributes:
        hello: what the worker said of itself.
        store: the store that this is about.
        peer: the worker's arena, if it can be read here.
        open_requests: by id, those without an answer.
        is_open: whether answers still have somewhere to go.
        must_flush: something was queued since the last flush.
        num_held_bytes: of received bodies that are not used up; see `reigen.kv.server.flow_control`.
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
    #: what the worker reads, or the kernel has not sent, by the request that it answers
    _leases: dict[int, list[ValueBuffer]] = field(default_factory=dict)
    #: the requests whose answers wait for the kernel
    _leaving: set[int] = field(default_factory=set)

    @property
    def worker(self) -> int:
        """The worker's number."""
        return self.hello.number

    def asked(self) -> Iterator[WorkerRequest]:
        """What is not answered; of bundles that were opened, their parts."""
        for request in self.open_requests.values():
            if request.parts is None:
                yield request
            else:
                yield from request.parts.values()

    def is_busy_with(self, request: int) -> bool:
        """Whether a request is not answered, or its answer has not left: if it comes again, nothing is to be done."""
        return request in self.open_requests or request in self._leaving

    def body_of(self, header: MessageHeader, received: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A request's body, wherever it lies.

        Raises:
            WireError: it is not where the header says.
        """
        if not header.flags & _IN_MEMORY:
            return received
        if self.peer is None:
            raise WireError(f"{self.line.name}: a body in memory that is not shared")
        return self.peer.view(header.offset, header.memory_bytes)

    def send(self, header: MessageHeader, body: bytes | bytearray | memoryview = b"", priority: int = 0) -> None:
        """Queue a message, if the connection is still there."""
        if self.is_open:
            self.line.send(header, memoryview(body), priority=priority)
            self.must_flush = True

    def answer(
        self,
        request: WorkerRequest,
        kind: MessageKind,
        body: bytes | bytearray | memoryview = b"",
        *,
        flags: int = 0,
        round: int | None = None,
        dtype: int = 0,
    ) -> None:
        """Answer a request with what nobody changes afterwards. Of several answers only the first is sent."""
        if self._finish(request):
            asked = request.header
            round_ = asked.round if round is None else round
            header = MessageHeader(
                kind, asked.request, asked.key, asked.shard, round_, flags, dtype, asked.kind, self.store,
                asked.priority, len(body),
            )  # fmt: skip
            self.send(header, body, asked.priority)

    def answer_value(self, request: WorkerRequest, value: ValueBuffer, dtype: int) -> None:
        """Answer a request with memory that must not change until the worker, or the kernel, has it."""
        asked, nbytes = request.header, value.array.nbytes
        if nbytes < INLINE_BYTES:
            self.answer(request, MessageKind.VALUE, value.array.tobytes(), dtype=dtype)
            return
        if not self._finish(request) or not self.is_open:
            return
        self.memory.lease(value)
        self._leases.setdefault(asked.request, []).append(value)
        self.must_flush = True
        if value.block is not None and self.peer is not None and asked.flags & _ANSWER_IN_MEMORY:
            header = MessageHeader(
                MessageKind.VALUE, asked.request, asked.key, asked.shard, asked.round, _IN_MEMORY, dtype, asked.kind,
                self.store, asked.priority, 0, value.block.offset, nbytes,
            )  # fmt: skip
            self.line.send(header, priority=asked.priority)
            return
        header = MessageHeader(
            MessageKind.VALUE, asked.request, asked.key, asked.shard, asked.round, 0, dtype, asked.kind, self.store,
            asked.priority, nbytes,
        )  # fmt: skip
        self._leaving.add(asked.request)

        def left() -> None:
            self._leaving.discard(asked.request)
            self.release(asked.request, value)

        self.line.send(header, value.array.data, priority=asked.priority, on_sent=left)

    def answer_codes(self, request: WorkerRequest, codes: bytes) -> None:
        """Answer a request with a value as codes of the store's gradient compression."""
        self.answer(request, MessageKind.VALUE, codes, flags=int(MessageFlag.ENCODED))

    def fail(self, request: WorkerRequest, problem: RemoteError) -> None:
        """Answer a request with an error."""
        self.answer(request, MessageKind.ERROR, REMOTE_ERROR_CODEC.encode(problem))

    def refuse(self, request: WorkerRequest, error: ReigenError, key: int | str | None = None) -> None:
        """Answer a request with an error."""
        self.fail(request, RemoteError.of(error, key))

    def release(self, request: int, value: ValueBuffer | None = None) -> None:
        """The worker has copied the answer to a request, or the kernel ``value``. Unknown ones are ignored."""
        leased = self._leases.get(request, [])
        for one in [value] if value is not None else list(leased):
            if one in leased:
                leased.remove(one)
                self.memory.release(one)
        if not leased:
            self._leases.pop(request, None)

    def end(self) -> None:
        """The connection is over: nobody reads any more. May be called twice."""
        self.is_open = False
        self.line.close()
        for request in list(self._leases):
            self.release(request)
        for bundle in self.open_requests.values():
            bundle.parts = None  # which refer to it
        self.open_requests.clear()
        if self.peer is not None:
            self.peer.close()

    def _finish(self, request: WorkerRequest) -> bool:
        """Whether a request had no answer until now."""
        if request.is_answered:
            return False
        request.is_answered = True
        request.reading = None  # which refers to the request
        bundle = request.bundle
        if bundle is None:
            self._close(request)
        elif bundle.parts is not None:
            bundle.parts.pop(request.header.request, None)
            if not bundle.parts:
                self._close(bundle)
        return True

    def _close(self, request: WorkerRequest) -> None:
        """A request, or all parts of a bundle, are answered."""
        self.open_requests.pop(request.header.request, None)
        if request.parts is not None:
            request.is_answered, request.parts = True, None  # parts refer to the bundle
