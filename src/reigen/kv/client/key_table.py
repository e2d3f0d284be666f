"""Keys of a worker, and the requests that pushes and pulls of them consist of.

There is one for each shard. Small keys of one call travel in one message to each server (`reigen.kv.protocol`, l).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from reigen.api.adapter import Array
from reigen.compression import Codec, Residual, from_params
from reigen.errors import ArgumentError
from reigen.kv.client.requests import MAX_PENDING_PUSHES, BatchRequest, ClientRequest, KeyOrder, KVOperation
from reigen.kv.client.worker import KVWorker
from reigen.kv.protocol import (
    DTYPE_NUMBERS,
    INLINE_BYTES,
    MAX_BATCH_BYTES,
    MAX_BATCH_KEYS,
    PUSH_KINDS,
    MessageFlag,
    MessageHeader,
    MessageKind,
    ShardRange,
)
from reigen.kv.residual_files import Residuals
from reigen.kv.values import DENSE, ROW_SPARSE, Key, TensorSpec

_ROW_NUMBER = np.dtype("<i8")
_ENCODED, _ENCODE_ANSWER = int(MessageFlag.ENCODED), int(MessageFlag.ENCODE_ANSWER)
#: Keys of more bytes travel by themselves: for these, one more copy on the server costs as much as a message.
MAX_BATCHED_KEY_BYTES = 1 << 18


@dataclass(eq=False)
class KeyState:
    """Key of a store on servers, as one worker sees it.

    Attributes:
        round: pushes of this worker so far.
        generation: how often it was declared anew.
        done: by shard, the last push that was answered.
        order: of its operations.
        residuals: by shard, what compression has not sent yet.
        first_workers: of an elastic job, those that take part in its first round.
    """

    name: Key
    id: int
    spec: TensorSpec
    places: tuple[ShardRange, ...] = ()
    round: int = 0
    generation: int = 0
    done: list[int] = field(default_factory=list)
    order: KeyOrder = field(default_factory=KeyOrder)
    residuals: dict[int, Residual] = field(default_factory=dict)
    first_workers: tuple[int, ...] = ()
    _has_failed: bool = False

    def set_placement(self, places: tuple[ShardRange, ...]) -> None:
        """Note where its shards are."""
        self.places = places
        self.done = [0] * len(places)
        self.order.max_pushes = MAX_PENDING_PUSHES * len(places)
        self.residuals.clear()

    def last_round(self) -> int:
        """Return the number of the last push. One that failed counts only where it was done all the same."""
        if self._has_failed and not self.order.num_pushes:
            self._has_failed = False
            self.round = min(self.done, default=self.round)
        return self.round

    def next_round(self) -> int:
        """Return the number of a push, which is the last one now."""
        self.round = self.last_round() + 1
        return self.round

    def discard_round(self) -> None:
        """Do not count the last push, which could not be begun."""
        self._has_failed = True

    def note(self, shard: int, round: int, is_done: bool) -> None:
        """Note the end of a push of a shard."""
        if is_done:
            self.done[shard] = max(self.done[shard], round)
        else:
            self._has_failed = True

    def row_ranges(self) -> Iterator[tuple[ShardRange, int, int]]:
        """Yield each shard of a row-sparse key with its first row and the one after its last."""
        length = max(1, self.spec.row_length)
        for place in self.places:
            yield place, place.begin // length, place.end // length


class RequestFactory:
    """Makes the requests of pushes and pulls, and begins them.

    Attributes:
        codec: encodes what is pushed; None: nothing is encoded.
        answer_codec: decodes what is answered.
    """

    def __init__(self, worker: KVWorker) -> None:
        self._worker = worker
        self.codec: Codec | None = None
        self.answer_codec: Codec | None = None
        #: the number of the batch that this worker has leased, or 0; and the keys that were pushed since
        self._batch, self._pushed = 0, set[int]()

    def begin_lease(self, batch: int) -> None:
        """Mark pushes from now on: servers apply one push of a key for each batch."""
        self._batch, self._pushed = batch, set()

    @property
    def has_lease(self) -> bool:
        return self._batch > 0

    def end_lease(self) -> None:
        """Mark pushes no more."""
        self._batch = 0

    def mark(self, entry: KeyState) -> int:
        """Return the batch that a push of a key is for; raises ArgumentError if there was one already."""
        if self._batch:
            if entry.id in self._pushed:
                raise ArgumentError(
                    f"key {entry.name!r} was pushed before in this lease of samples: add up what a batch gives to a "
                    "key, and push it once"
                )
            self._pushed.add(entry.id)
        return self._batch

    def compress(self, params: Mapping[str, object], num_workers: int) -> None:
        """Encode from now on, or not any more ({}); both ends know the codecs from the same words."""
        self.codec = from_params(params) if params else None
        self.answer_codec = None if self.codec is None else self.codec.for_sums(num_workers)

    def push(self, operation: KVOperation, entry: KeyState, elements: Array, priority: int, into: Array | None) -> None:
        """Push dense elements, flat; ``into`` receives the value of this round: PUSHPULL. None: PUSH."""
        kind = MessageKind.PUSH if into is None else MessageKind.PUSHPULL
        codec = self.codec if entry.spec.dtype.is_floating else None
        is_one = len(entry.places) == 1
        batch, round_number = self.mark(entry), entry.next_round()
        try:
            for place in entry.places:
                part = elements if is_one else elements[place.begin : place.end]
                out = into if is_one or into is None else into[place.begin : place.end]
                flags = 0 if codec is None else _ENCODED
                request = self._request(kind, operation, entry, place, priority, round_number, out, flags, batch)
                if codec is None:
                    request.body, request.block = self._worker.arena.copy(part)
                else:
                    self._encode(request, codec, entry, place, part)
                # one by one: servers begin with the first while the next is copied
                self._worker.submit([request], entry.order)
        except BaseException:
            entry.discard_round()
            raise

    def push_rows(self, operation: KVOperation, entry: KeyState, indices: Array, rows: Array, priority: int) -> None:
        """Push some rows: of every shard, if only none."""
        requests = []
        batch, round_number = self.mark(entry), entry.next_round()
        try:
            for place, first, last in entry.row_ranges():
                low, high = np.searchsorted(indices, (first, last))
                request = self._request(
                    MessageKind.ROW_PUSH, operation, entry, place, priority, round_number, batch=batch
                )
                numbers = (indices[low:high] - first).astype(_ROW_NUMBER)
                parts = numbers.view(np.uint8), rows[low:high].reshape(-1).view(np.uint8)
                request.body, request.block = self._worker.arena.copy(*parts)
                requests.append(request)
            self._worker.submit(requests, entry.order)
        except BaseException:
            entry.discard_round()
            raise

    def pull(self, operation: KVOperation, entry: KeyState, into: Array, priority: int) -> None:
        """Pull all elements into flat memory."""
        requests, round_number = [], entry.last_round()
        for place in entry.places:
            out = into[place.begin : place.end]
            requests.append(self._request(MessageKind.PULL, operation, entry, place, priority, round_number, out))
        self._worker.submit(requests, entry.order)

    def pull_rows(self, operation: KVOperation, entry: KeyState, wanted: Array, into: Array, priority: int) -> None:
        """Pull rows ``wanted`` (ascending) into ``into``, (number of rows, elements of a row)."""
        requests, round_number = [], entry.last_round()
        for place, first, last in entry.row_ranges():
            low, high = np.searchsorted(wanted, (first, last))
            if low == high:
                continue
            out = into[low:high].reshape(-1)
            request = self._request(MessageKind.ROW_PULL, operation, entry, place, priority, round_number, out)
            request.body = (wanted[low:high] - first).astype(_ROW_NUMBER).tobytes()
            requests.append(request)
        if requests:
            self._worker.submit(requests, entry.order)

    def put(
        self, kind: MessageKind, operation: KVOperation, entry: KeyState, place: ShardRange, body: Array
    ) -> ClientRequest:
        """Return a request that gives a shard bytes: INIT and PUT_STATES."""
        request = self._request(kind, operation, entry, place)
        request.body, request.block = self._worker.arena.copy(body)
        return request

    def _request(
        self,
        kind: MessageKind,
        operation: KVOperation,
        entry: KeyState,
        place: ShardRange,
        priority: int = 0,
        round_number: int = 0,
        into: Array | None = None,
        flags: int = 0,
        batch: int = 0,
    ) -> ClientRequest:
        spec, codec = entry.spec, None
        if into is not None and spec.dtype.is_floating and spec.stype != ROW_SPARSE:
            codec = self.answer_codec
        header = MessageHeader(
            int(kind), 0, entry.id, place.index, round_number, flags if codec is None else flags | _ENCODE_ANSWER,
            DTYPE_NUMBERS[spec.dtype.name], priority=priority, batch=batch,
        )  # fmt: skip
        on_push_over = entry.note if kind in PUSH_KINDS else None
        return ClientRequest(header, place.server, operation, into=into, codec=codec, on_push_over=on_push_over)

    def _encode(self, request: ClientRequest, codec: Codec, entry: KeyState, place: ShardRange, part: Array) -> None:
        if place.index not in entry.residuals:
            entry.residuals[place.index] = codec.begin(len(part), entry.spec.dtype)
        nbytes = codec.max_bytes(len(part))
        if nbytes < INLINE_BYTES:
            codes = bytearray(nbytes)
            codec.encode(part, entry.residuals[place.index], codes)
            request.body = bytes(codes)
        else:
            request.body, request.block = self._worker.arena.take(nbytes)
            codec.encode(part, entry.residuals[place.index], request.body)
        counters = self._worker.member.counters
        counters.encoded_bytes += part.nbytes
        counters.code_bytes += nbytes


def collect_residuals(entry: KeyState, owner: str) -> Residuals:
    """Return what compression has not sent of a key, as one array; nothing where nothing was pushed."""
    if not entry.residuals or any(part is None for part in entry.residuals.values()):
        return {}
    parts = [entry.residuals.get(place.index) for place in entry.places]
    sizes = [place.num_elements for place in entry.places]
    known = [np.zeros(size, np.float32) if part is None else part for part, size in zip(parts, sizes, strict=True)]
    return {(entry.name, owner): np.concatenate(known)}


@dataclass(slots=True, eq=False)
class _KeyGroup:
    """Keys that go to one server in one batch."""

    entries: list[KeyState] = field(default_factory=list)
    elements: list[Array] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)
    num_bytes: int = 0


class BatchBuilder:
    """Begins one call for ``num_keys`` keys: small ones in batches, which leave when they are full or with `end`."""

    def __init__(
        self,
        factory: RequestFactory,
        worker: KVWorker,
        kind: MessageKind,
        operation: KVOperation,
        priority: int,
        num_keys: int,
    ) -> None:
        self._factory, self._worker = factory, worker
        self._kind, self._operation, self._priority = kind, operation, priority
        self._is_single = num_keys == 1
        self._groups: dict[tuple[int, str], _KeyGroup] = {}

    def add(self, entry: KeyState, elements: Array | None, out: Array | None) -> None:
        """Add a key that has not come before, all of its elements.

        ``elements``, flat, are pushed and stay as they are until `end`; None: PULL. ``out``, flat, receives what is
        stored; None: PUSH.
        """
        array = out if elements is None else elements
        assert array is not None
        spec, num_bytes = entry.spec, array.nbytes
        if self._is_single or (
            num_bytes > MAX_BATCHED_KEY_BYTES
            or len(entry.places) != 1
            or spec.stype != DENSE
            or not entry.order.is_free(self._kind)
            or (self._factory.codec is not None and spec.dtype.is_floating)
        ):
            self._alone(entry, elements, out)
            return
        where = entry.places[0].server, spec.dtype.name
        group = self._groups.get(where)
        if group is None:
            group = self._groups[where] = _KeyGroup()
        elif group.num_bytes + num_bytes > MAX_BATCH_BYTES or len(group.entries) == MAX_BATCH_KEYS:
            self._send(group)
            group = self._groups[where] = _KeyGroup()
        group.entries.append(entry)
        group.num_bytes += num_bytes
        if elements is not None:
            group.elements.append(elements)
        if out is not None:
            group.outs.append(out)

    def end(self) -> None:
        """Send the last batches."""
        for group in self._groups.values():
            self._send(group)

    def _alone(self, entry: KeyState, elements: Array | None, out: Array | None) -> None:
        if elements is not None:
            self._factory.push(self._operation, entry, elements, self._priority, out)
        elif out is not None:
            self._factory.pull(self._operation, entry, out, self._priority)

    def _send(self, group: _KeyGroup) -> None:
        if len(group.entries) == 1:
            self._alone(group.entries[0], *(each[0] if each else None for each in (group.elements, group.outs)))
            return
        first = group.entries[0]
        is_push = self._kind in PUSH_KINDS
        number = max([self._factory.mark(entry) for entry in group.entries]) if is_push else 0
        numbers = [entry.next_round() if is_push else entry.last_round() for entry in group.entries]
        try:
            header = MessageHeader(
                self._kind, shard=len(numbers), flags=int(MessageFlag.BATCH),
                dtype=DTYPE_NUMBERS[first.spec.dtype.name], priority=self._priority, batch=number,
            )  # fmt: skip
            notes = [entry.note for entry in group.entries] if is_push else []
            batch = BatchRequest(
                header, first.places[0].server, self._operation, numbers=numbers, notes=notes, outs=group.outs
            )
            about = np.array([[entry.id for entry in group.entries], numbers], np.uint64).reshape(-1).view(np.uint8)
            parts = [about, *(each.view(np.uint8) for each in group.elements)]
            batch.body, batch.block = self._worker.arena.copy(*parts)
            self._worker.submit([batch], *(entry.order for entry in group.entries))
        except BaseException:
            for entry in group.entries if is_push else ():
                entry.discard_round()
            raise
