"""Requests to a store, by their kinds: place of a body, checks, and events for a shard."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ReigenError, WireError
from reigen.kv.consistency.state_machine import (
    ConsistencyEvent,
    RoundRecovered,
    WorkerJoined,
    WorkerResumed,
    WorkerReturned,
)
from reigen.kv.protocol import (
    COMMAND_CODEC,
    CONTROL_KINDS,
    COUNT_UNKNOWN,
    DECLARE_CODEC,
    MAX_CONTROL_BYTES,
    PUSH_KINDS,
    MessageFlag,
    MessageHeader,
    MessageKind,
    pack_counts,
    unpack_counts,
)
from reigen.kv.server.batching import MAX_BATCH_BODY_BYTES, BatchHandler
from reigen.kv.server.reduction import PushData
from reigen.kv.server.requests import WorkerConnection, WorkerRequest
from reigen.kv.server.shard import AnswerRequest, RestoreStates, Shard, shard_bytes
from reigen.kv.server.store import ServerStore

# As plain numbers: each request is compared with them, and enumerations are slow.
_ENCODED, _BATCH, _UNKNOWN = map(int, (MessageFlag.ENCODED, MessageFlag.BATCH, MessageFlag.UNKNOWN))
_RELEASE, _QUERY, _RECEIVED = map(int, (MessageKind.RELEASE, MessageKind.QUERY, MessageKind.RECEIVED))
_BATCH_KINDS = frozenset(map(int, (MessageKind.PUSH, MessageKind.PUSHPULL, MessageKind.PULL)))
#: The largest body for a shard that is not here: it is read, and answered with an error.
_MOST_LOST_BYTES = 1 << 28
_NOTHING = np.empty(0, np.uint8)


class RequestHandler:
    """Takes the requests of a store's workers."""

    def __init__(self, store: ServerStore) -> None:
        self.store = store
        #: requests so far, by kind
        self.num_requests: Counter[int] = Counter()
        self._batches = BatchHandler(store)
        self._handlers: dict[int, Callable[[WorkerRequest, NDArray[np.uint8]], None]] = {
            MessageKind.DECLARE: self._declare,
            MessageKind.INIT: self._init,
            MessageKind.PUSH: self._push,
            MessageKind.PUSHPULL: self._push,
            MessageKind.ROW_PUSH: self._push,
            MessageKind.PULL: self._pull,
            MessageKind.ROW_PULL: self._pull,
            MessageKind.COMMAND: self._command,
            MessageKind.RESUME: self._resume,
            MessageKind.GET_STATES: self._get_states,
            MessageKind.PUT_STATES: self._put_states,
            MessageKind.GOODBYE: self._goodbye,
        }

    def place(self, header: MessageHeader) -> NDArray[np.uint8]:
        """Return where the body of a request is to land; raises WireError if no such request is so long."""
        if header.kind in CONTROL_KINDS:
            return np.empty(header.body_bytes, np.uint8)
        shard = None if header.flags & _BATCH else self.store.shards.get((header.key, header.shard))
        # nearly all bodies are as long as the value, and none may not be
        if shard is None or header.body_bytes > shard.num_bytes:
            most = self._most_bytes(header, shard)
            if header.body_bytes > most:
                raise WireError(
                    f"a {MessageKind(header.kind).name} of {header.body_bytes} bytes; at most {most} are expected"
                )
        return self.store.context.buffers.take(header.body_bytes)

    def arrived(self, connection: WorkerConnection, header: MessageHeader, received: NDArray[np.uint8]) -> None:
        """Take in a request, answered now or later; raises WireError if no worker of this version sends that."""
        if header.kind == _RELEASE:
            for request in np.frombuffer(received, np.uint64) if len(received) % 8 == 0 else ():
                connection.release(int(request))
            return
        if header.kind == _QUERY:
            self._query(connection, header)
            return
        handler = self._handlers.get(header.kind)
        if header.flags & _BATCH:
            handler = self._batches.take if header.kind in _BATCH_KINDS else None
        if handler is None or not header.request:
            raise WireError(f"a {MessageKind(header.kind).name} with the id {header.request}, which no worker sends")
        if connection.is_busy_with(header.request):  # sent again
            if self.store.context.acknowledges:
                connection.send(header.answer(_RECEIVED))
            return
        self.num_requests[header.kind] += 1
        request = WorkerRequest(connection, header, time.monotonic())
        connection.open_requests[header.request] = request
        if header.kind not in CONTROL_KINDS and header.body_bytes:
            request.buffer = received
            connection.num_held_bytes += received.nbytes
        self._handle(handler, request, connection.body_of(header, received))
        if not request.is_answered and self.store.context.acknowledges:
            connection.send(header.answer(_RECEIVED))

    def _handle(
        self,
        handler: Callable[[WorkerRequest, NDArray[np.uint8]], None],
        request: WorkerRequest,
        body: NDArray[np.uint8],
    ) -> None:
        if self.store.broken is not None:
            request.connection.refuse(request, self.store.broken)
            return
        try:
            handler(request, body)
        except WireError:
            raise
        except ReigenError as error:
            self.store.refuse(request, error)

    def _query(self, connection: WorkerConnection, header: MessageHeader) -> None:
        """Step g: what has become of a request whose body shall not travel again."""
        if connection.is_busy_with(header.request):
            connection.send(header.answer(_RECEIVED))
            return
        shard = self.store.shards.get((header.key, header.shard))
        is_over = (
            header.about in PUSH_KINDS and shard is not None and header.round <= shard.engine.done(connection.worker)
        )
        if header.flags & _BATCH or (not is_over and header.about != MessageKind.PULL):
            connection.send(header.answer(_RECEIVED, _UNKNOWN))
            return
        # a push that is over is not applied again, so that its body does not matter
        again = MessageHeader(
            header.about, header.request, header.key, header.shard, header.round, header.flags & ~MessageFlag.IN_MEMORY,
            header.dtype, store=header.store, priority=header.priority,
        )  # fmt: skip
        request = WorkerRequest(connection, again, time.monotonic())
        connection.open_requests[again.request] = request
        self._handle(self._push_again if is_over else self._pull, request, _NOTHING)

    # ---- keys and settings

    def _declare(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        self._check_aborted()
        self.store.declarations.declare(request, DECLARE_CODEC.decode(body.tobytes()))

    def _command(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        self._check_aborted()
        command = COMMAND_CODEC.decode(body.tobytes())
        carry_out = self.store.leases.commands().get(command.name, self.store.settings.command)
        carry_out(request, command)

    def _init(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        self._check_aborted()
        store, header = self.store, request.header
        shard_id = header.key, header.shard
        planned = store.planned.get(shard_id)
        if planned is not None:
            if len(body) != (num_bytes := shard_bytes(*planned[:2])):  # before there is memory for it
                raise WireError(f"{len(body)} bytes for the first value of a shard of {num_bytes}")
            shard = store.make_shard(header.key, *planned)
            shard.write(body)
            store.add(shard)
        elif shard_id not in store.shards:
            raise ArgumentError(f"shard {header.shard} was never declared on server {store.context.server}")
        request.release_body(store.context.buffers)
        store.enqueue(store.shards[shard_id], AnswerRequest(request))  # once it is in a snapshot, if there are any

    def _goodbye(self, request: WorkerRequest, _: NDArray[np.uint8]) -> None:
        connection = request.connection
        self.store.has_left(connection.worker, connection.hello.host)
        connection.answer(request)

    def _resume(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        """Step h."""
        worker, counts = request.connection.worker, []
        for key, index, count in unpack_counts(body.data):
            shard = self.store.shards.get((key, index))
            if shard is None:
                continue
            event = self._resumption(worker, count)
            instructions = self.store.handle_events(shard, event)
            recovered = [one.round for one in instructions if isinstance(one, RoundRecovered)]
            counts.append((key, index, recovered[0] if recovered else shard.engine.done(worker)))
        if self.store.is_elastic:
            self.store.note_named(worker)
        request.connection.answer(request, MessageKind.DONE, pack_counts(counts))

    def _resumption(self, worker: int, count: int) -> ConsistencyEvent:
        if self.store.is_elastic:
            return WorkerJoined(worker, None if count == COUNT_UNKNOWN else count)
        return WorkerReturned(worker) if count == COUNT_UNKNOWN else WorkerResumed(worker, count)

    # ---- values

    def _push(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        shard = self.store.shard_of(request)
        shard.check_push(self.store.settings.optimizer)
        if request.header.round < 1:
            raise WireError("a push without a round")
        request.contribution = self._contribution(shard, request.header, body)
        self.store.handle_events(shard, *request.events())

    def _push_again(self, request: WorkerRequest, _: NDArray[np.uint8]) -> None:
        self.store.handle_events(self.store.shard_of(request), *request.events())

    def _pull(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        shard = self.store.shard_of(request)
        if request.header.kind == MessageKind.ROW_PULL:
            request.rows = self._row_numbers(shard, body).copy()
        request.release_body(self.store.context.buffers)
        self.store.handle_events(shard, *request.events())

    def _get_states(self, request: WorkerRequest, _: NDArray[np.uint8]) -> None:
        self.store.enqueue(self.store.shard_of(request), AnswerRequest(request))

    def _put_states(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        self.store.enqueue(self.store.shard_of(request), RestoreStates(request, body), AnswerRequest(request))

    # ---- checks

    def _check_aborted(self) -> None:
        if self.store.aborted is not None:
            raise self.store.aborted.raised()

    def _contribution(self, shard: Shard, header: MessageHeader, body: NDArray[np.uint8]) -> PushData:
        if header.kind == MessageKind.ROW_PUSH:
            num_rows, rest = divmod(len(body), 8 + shard.row_length * shard.dtype.itemsize)
            if rest or num_rows > shard.num_rows:
                raise WireError(f"{len(body)} bytes of rows for a shard of {shard.num_rows}")
            numbers = self._row_numbers(shard, body[: 8 * num_rows])
            return PushData(body[8 * num_rows :].view(shard.dtype.storage), rows=numbers)
        if header.flags & _ENCODED:
            codec = self.store.settings.codec
            if codec is None or not shard.dtype.is_floating:
                raise WireError(f"codes for key {shard.spec.name!r}, whose gradients are not compressed")
            codec.check(body, shard.length)
            return PushData(body, codec)
        if len(body) != shard.num_bytes:
            raise WireError(f"a push of {len(body)} bytes to a shard of {shard.num_bytes}")
        return PushData(body.view(shard.dtype.storage))

    def _row_numbers(self, shard: Shard, body: NDArray[np.uint8]) -> NDArray[np.int64]:
        if shard.spec.stype != "row_sparse" or len(body) % 8:
            raise WireError(f"rows of key {shard.spec.name!r}, which is {shard.spec.stype}, in {len(body)} bytes")
        numbers = body.view(np.int64)
        if len(numbers) and (numbers[0] < 0 or numbers[-1] >= shard.num_rows or (numbers[1:] <= numbers[:-1]).any()):
            raise WireError(f"rows that are not ascending, or not below {shard.num_rows}")
        return numbers

    def _most_bytes(self, header: MessageHeader, shard: Shard | None) -> int:
        if header.flags & _BATCH:
            return MAX_BATCH_BODY_BYTES
        if shard is None:
            planned = self.store.planned.get((header.key, header.shard))
            return max(0 if planned is None else shard_bytes(*planned[:2]), _MOST_LOST_BYTES)
        if header.kind in {MessageKind.ROW_PUSH, MessageKind.ROW_PULL}:
            return shard.num_bytes + 8 * shard.num_rows
        if header.kind == MessageKind.PUT_STATES:
            return 16 * max(8, shard.dtype.itemsize) * shard.length + MAX_CONTROL_BYTES
        codec = self.store.settings.codec
        return max(shard.num_bytes, 0 if codec is None else codec.max_bytes(shard.length))
