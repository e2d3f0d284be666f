"""What each kind of request does to a store: where its body lands, what is checked, what then happens to a shard."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ReigenError, UnsupportedError, UnsupportedTypeError, WireError
from reigen.kv.consistency.events import (
    ConsistencyEvent,
    PullRequested,
    PushReceived,
    RoundRecovered,
    WorkerResumed,
    WorkerReturned,
)
from reigen.kv.protocol import (
    COMMAND_CODEC,
    CONTROL_KINDS,
    COUNT_UNKNOWN,
    DECLARE_CODEC,
    DTYPE_NUMBERS,
    MAX_CONTROL_BYTES,
    MessageFlag,
    MessageHeader,
    MessageKind,
    ShardRange,
    pack_counts,
    unpack_counts,
)
from reigen.kv.server.batching import MAX_BATCH_BODY_BYTES, BatchHandler
from reigen.kv.server.reduction import PushData
from reigen.kv.server.requests import PullHalf, WorkerConnection, WorkerRequest
from reigen.kv.server.shard import KeySpec, Shard
from reigen.kv.server.store import ServerStore
from reigen.types import dtype_named

# As plain numbers: each request is compared with them, and enumerations are slow.
_ENCODED, _RELEASE, _QUERY, _PUSHPULL = (
    int(MessageFlag.ENCODED),
    int(MessageKind.RELEASE),
    int(MessageKind.QUERY),
    int(MessageKind.PUSHPULL),
)
_BUNDLE, _BUNDLED = (
    int(MessageFlag.BATCH),
    frozenset({int(MessageKind.PUSH), int(MessageKind.PUSHPULL), int(MessageKind.PULL)}),
)
_PUSHES = frozenset({int(MessageKind.PUSH), int(MessageKind.PUSHPULL), int(MessageKind.ROW_PUSH)})
#: The largest body for a shard that is not here: it is read, and answered with an error.
_MOST_LOST_BYTES = 1 << 28
_NOTHING = np.empty(0, np.uint8)


class RequestHandler:
    """Takes the requests of a store's workers.

    Args:
        store: what they are about.
    """

    def __init__(self, store: ServerStore) -> None:
        self.store = store
        self._bundles = BatchHandler(
            store, lambda part, body: self._handle(self._handlers[part.header.kind], part, body)
        )
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
        """Where the body of a request is to land.

        Raises:
            WireError: it has a length that no such request has.
        """
        if header.kind in CONTROL_KINDS:
            return np.empty(header.body_bytes, np.uint8)
        shard = None if header.flags & _BUNDLE else self.store.shards.get((header.key, header.shard))
        # nearly all bodies are as long as the value, and none may not be
        if shard is None or header.body_bytes > shard.num_bytes:
            most = self._most_bytes(header, shard)
            if header.body_bytes > most:
                raise WireError(
                    f"a {MessageKind(header.kind).name} of {header.body_bytes} bytes; at most {most} are expected"
                )
        return self.store.context.buffers.take(header.body_bytes)

    def arrived(self, connection: WorkerConnection, header: MessageHeader, received: NDArray[np.uint8]) -> None:
        """A request is there; it is answered now or later.

        Raises:
            WireError: no worker of this version sends that.
        """
        if header.kind == _RELEASE:
            for request in np.frombuffer(received, np.uint64) if len(received) % 8 == 0 else ():
                connection.release(int(request))
            return
        if header.kind == _QUERY:
            self._query(connection, header)
            return
        handler = self._handlers.get(header.kind)
        if header.flags & _BUNDLE:
            handler = self._bundles.take if header.kind in _BUNDLED else None
        if handler is None or not header.request:
            raise WireError(f"a {MessageKind(header.kind).name} with the id {header.request}, which no worker sends")
        if connection.is_busy_with(header.request):  # sent again
            if self.store.context.acknowledges:
                self._received(connection, header)
            return
        request = WorkerRequest(connection, header, time.monotonic())
        connection.open_requests[header.request] = request
        if header.kind not in CONTROL_KINDS and header.body_bytes:
            request.buffer = received
            connection.num_held_bytes += received.nbytes
        self._handle(handler, request, connection.body_of(header, received))
        if not request.is_answered and self.store.context.acknowledges:
            self._received(connection, header)

    def _handle(
        self,
        handler: Callable[[WorkerRequest, NDArray[np.uint8]], None],
        request: WorkerRequest,
        body: NDArray[np.uint8],
    ) -> None:
        store, connection = self.store, request.connection
        if store.broken is not None:
            connection.fail(request, store.broken)
            return
        try:
            handler(request, body)
        except WireError:
            raise
        except ReigenError as error:
            request.used(store.context.buffers)
            name = None if request.shard is None else request.shard.facts.name
            connection.refuse(request, error, name)

    def _received(self, connection: WorkerConnection, header: MessageHeader, *, flags: int = 0) -> None:
        kind = header.about if header.kind == MessageKind.QUERY else header.kind
        connection.send(
            MessageHeader(
                MessageKind.RECEIVED, header.request, header.key, header.shard, header.round, flags, about=kind,
                store=connection.store,
            )
        )  # fmt: skip

    def _query(self, connection: WorkerConnection, header: MessageHeader) -> None:
        """Step g: what has become of a request whose body shall not travel again."""
        if connection.is_busy_with(header.request):
            self._received(connection, header)
            return
        shard = self.store.shards.get((header.key, header.shard))
        is_over = header.about in _PUSHES and shard is not None and header.round <= shard.engine.done(connection.worker)
        if header.flags & _BUNDLE or (not is_over and header.about != MessageKind.PULL):
            self._received(connection, header, flags=int(MessageFlag.UNKNOWN))
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
        self._check_aborted(request)
        self.store.declarations.declare(request, DECLARE_CODEC.decode(body.tobytes()))

    def _command(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        self._check_aborted(request)
        self.store.settings.command(request, COMMAND_CODEC.decode(body.tobytes()))

    def _init(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        self._check_aborted(request)
        store, header = self.store, request.header
        shard_id = header.key, header.shard
        planned = store.planned.get(shard_id)
        if planned is not None:
            if len(body) != (num_bytes := _shard_bytes(*planned)):  # before there is memory for it
                raise WireError(f"{len(body)} bytes for the first value of a shard of {num_bytes}")
            shard = store.make_shard(header.key, *planned)
            shard.write(body)
            store.add(shard)
        elif shard_id not in store.shards:
            raise ArgumentError(f"shard {header.shard} was never declared on server {store.context.server}")
        request.used(store.context.buffers)
        # once it is in a snapshot, if there are any
        store.then(store.shards[shard_id], lambda: request.connection.answer(request, MessageKind.DONE))

    def _goodbye(self, request: WorkerRequest, _: NDArray[np.uint8]) -> None:
        self.store.handle_goodbye(request)

    def _resume(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        """Step h."""
        worker, counts = request.connection.worker, []
        for key, index, count in unpack_counts(body.data):
            shard = self.store.shards.get((key, index))
            if shard is None:
                continue
            event = WorkerReturned(worker) if count == COUNT_UNKNOWN else WorkerResumed(worker, count)
            told = [one.round for one in self.store.handle_events(shard, event) if isinstance(one, RoundRecovered)]
            counts.append((key, index, told[0] if told else shard.engine.done(worker)))
        request.connection.answer(request, MessageKind.DONE, pack_counts(counts))

    # ---- values

    def _push(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        shard = self._shard_of(request)
        self._check_can_be_pushed(shard)
        if request.header.round < 1:
            raise WireError("a push without a round")
        request.contribution = self._contribution(shard, request.header, body)
        self._pushed(request, shard, request.connection.worker)

    def _push_again(self, request: WorkerRequest, _: NDArray[np.uint8]) -> None:
        self._pushed(request, self._shard_of(request), request.connection.worker)

    def _pushed(self, request: WorkerRequest, shard: Shard, worker: int) -> None:
        round_ = request.header.round
        events: list[ConsistencyEvent] = [PushReceived(worker, round_, request)]
        if request.header.kind == _PUSHPULL:
            request.reading = PullHalf(request)
            events.append(PullRequested(worker, round_, request.reading))
        self.store.handle_events(shard, *events)

    def _pull(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        shard = self._shard_of(request)
        if request.header.kind == MessageKind.ROW_PULL:
            request.numbers = self._row_numbers(shard, body).copy()
        request.used(self.store.context.buffers)
        self.store.handle_events(shard, PullRequested(request.connection.worker, request.header.round, request))

    def _get_states(self, request: WorkerRequest, _: NDArray[np.uint8]) -> None:
        shard = self._shard_of(request)

        def answer() -> None:
            request.connection.answer(request, MessageKind.VALUE, shard.pack_states(self.store.settings.optimizer))

        self.store.then(shard, answer)

    def _put_states(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        shard = self._shard_of(request)

        def take() -> None:
            try:
                shard.put_states(body, self.store.settings.optimizer)
                shard.must_save = self.store.context.saves_always
            except ReigenError as error:
                request.connection.refuse(request, error, shard.facts.name)
            request.used(self.store.context.buffers)

        self.store.then(shard, take)
        self.store.then(shard, lambda: request.connection.answer(request, MessageKind.DONE))  # when it has been saved

    # ---- checks

    def _check_aborted(self, request: WorkerRequest) -> None:
        if self.store.aborted is not None:
            raise self.store.aborted.raised()

    def _check_can_be_pushed(self, shard: Shard) -> None:
        optimizer = self.store.settings.optimizer
        if optimizer is None and not shard.engine.is_synchronous:
            raise UnsupportedError(
                "without an optimizer a push takes the place of what was stored, which makes no sense where workers "
                "are not synchronous; call set_optimizer() before"
            )
        if optimizer is not None and not shard.dtype.is_floating:
            raise UnsupportedTypeError(f"an optimizer cannot update {shard.dtype.name} values; use a floating type")
        if optimizer is not None and not optimizer.is_elementwise and not shard.is_whole:
            raise ArgumentError(
                f"{optimizer.name} needs the whole value, and this key is cut into shards; call set_optimizer() "
                "before init()"
            )

    def _shard_of(self, request: WorkerRequest) -> Shard:
        header = request.header
        shard = self.store.shards.get((header.key, header.shard))
        if shard is None:
            if (header.key, header.shard) in self.store.planned:
                raise ArgumentError(f"key {self.store.planned[header.key, header.shard][0].name!r} has no value yet")
            raise ArgumentError(
                f"there is no shard {header.shard} of a key {header.key} on server {self.store.context.server}; "
                "it was never initialised, or the server has lost it"
            )
        if header.dtype and header.dtype != DTYPE_NUMBERS[shard.facts.dtype]:
            raise WireError(f"elements of another type than those of key {shard.facts.name!r}")
        request.shard = shard
        return shard

    def _contribution(self, shard: Shard, header: MessageHeader, body: NDArray[np.uint8]) -> PushData:
        if header.kind == MessageKind.ROW_PUSH:
            num_rows = self._num_rows(shard, len(body))
            numbers = self._row_numbers(shard, body[: 8 * num_rows])
            return PushData(body[8 * num_rows :].view(shard.dtype.storage), rows=numbers)
        if header.flags & _ENCODED:
            codec = self.store.settings.codec
            if codec is None or not shard.dtype.is_floating:
                raise WireError(f"codes for key {shard.facts.name!r}, whose gradients are not compressed")
            codec.check(body, shard.length)
            return PushData(body, codec)
        if len(body) != shard.num_bytes:
            raise WireError(f"a push of {len(body)} bytes to a shard of {shard.num_bytes}")
        return PushData(body.view(shard.dtype.storage))

    def _num_rows(self, shard: Shard, num_bytes: int) -> int:
        num_rows, rest = divmod(num_bytes, 8 + shard.row_length * shard.dtype.itemsize)
        if rest or num_rows > shard.num_rows:
            raise WireError(f"{num_bytes} bytes of rows for a shard of {shard.num_rows}")
        return num_rows

    def _row_numbers(self, shard: Shard, body: NDArray[np.uint8]) -> NDArray[np.int64]:
        if shard.facts.stype != "row_sparse" or len(body) % 8:
            raise WireError(f"rows of key {shard.facts.name!r}, which is {shard.facts.stype}, in {len(body)} bytes")
        numbers = body.view(np.int64)
        if len(numbers) and (numbers[0] < 0 or numbers[-1] >= shard.num_rows or (np.diff(numbers) <= 0).any()):
            raise WireError(f"rows that are not ascending, or not below {shard.num_rows}")
        return numbers

    def _most_bytes(self, header: MessageHeader, shard: Shard | None) -> int:
        """How long the body of a request may be."""
        if header.flags & _BUNDLE:
            return MAX_BATCH_BODY_BYTES
        if shard is None:
            planned = self.store.planned.get((header.key, header.shard))
            return max(0 if planned is None else _shard_bytes(*planned), _MOST_LOST_BYTES)
        if header.kind in {MessageKind.ROW_PUSH, MessageKind.ROW_PULL}:
            return shard.num_bytes + 8 * shard.num_rows
        if header.kind == MessageKind.PUT_STATES:
            return 16 * max(8, shard.dtype.itemsize) * shard.length + MAX_CONTROL_BYTES
        codec = self.store.settings.codec
        return max(shard.num_bytes, 0 if codec is None else codec.max_bytes(shard.length))


def _shard_bytes(facts: KeySpec, place: ShardRange) -> int:
    """How long the value of a shard is."""
    return (place.end - place.begin) * dtype_named(facts.dtype).itemsize
