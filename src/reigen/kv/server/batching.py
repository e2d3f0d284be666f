"""Batches on a server: small keys of one call come in one message, and are added up as one array where they can be.

Workers push the same keys together, round after round. Where all shards of a batch are about to do nothing but their
next round, all workers are there, and nothing else has come, the batch waits as a whole for those of the other workers.
Then one addition serves all, and one piece of memory has all answers.

Whatever else happens to one of these shards (a push of this key alone, another choice of keys, a worker that is lost,
leaves, or connects again, a deadline) splits the batches that wait: each key's request reaches its engine as if it had
come by itself, in the order in which the batches came. So engines decide everything that is not the plain case, and
what they do not know of is what makes no difference to them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, WireError
from reigen.kv.consistency.state_machine import MAX_ROUNDS_AHEAD
from reigen.kv.protocol import DTYPE_NUMBERS, MAX_BATCH_BYTES, MAX_BATCH_KEYS, MessageFlag, MessageHeader, MessageKind
from reigen.kv.server.buffers import ReductionScratch, ValueBuffer
from reigen.kv.server.reduction import PushData, ShardSum
from reigen.kv.server.requests import WorkerRequest
from reigen.kv.server.shard import Shard, ValueUpdate
from reigen.optim import Optimizer

if TYPE_CHECKING:
    from reigen.kv.server.store import ServerStore

#: Batches that are remembered, by their keys.
_MOST_KNOWN = 256
#: Bytes of a key in front of the elements: its id and its round.
KEY_HEADER_BYTES = 16
MAX_BATCH_BODY_BYTES = MAX_BATCH_KEYS * KEY_HEADER_BYTES + MAX_BATCH_BYTES
_ANSWER_IN_MEMORY = int(MessageFlag.ANSWER_IN_MEMORY)
_OWN_FLAGS = int(MessageFlag.BATCH | MessageFlag.IN_MEMORY | MessageFlag.ANSWER_IN_MEMORY | MessageFlag.RESENT)
# As plain numbers, since enumerations are slow.
_PULL, _PUSH = int(MessageKind.PULL), int(MessageKind.PUSH)
_NOTHING = np.empty(0, np.uint8)


@dataclass(eq=False)
class _BatchRound:
    """Batches that have come for one round of the same keys.

    Attributes:
        numbers: of the round, for each key.
        contributions: with their elements, in the order in which they came.
        pushes: of those that push, by worker.
    """

    numbers: list[int]
    contributions: list[tuple[WorkerRequest, NDArray[np.uint8]]] = field(default_factory=list)
    pushes: dict[int, PushData] = field(default_factory=dict)


class KeyBatch:
    """Shards that come together, of one key each, all of one element type.

    Attributes:
        ranges: of the elements of each shard in those of all.
        rounds: consecutive ones, of which the first is next.
    """

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.dtype = shards[0].dtype
        ends = list(itertools.accumulate(shard.length for shard in shards))
        self.ranges = list(zip([0, *ends], ends, strict=False))
        self.length = ends[-1]
        self.num_bytes = self.length * self.dtype.itemsize
        self.rounds: deque[_BatchRound] = deque()

    def round_of(self, numbers: list[int]) -> _BatchRound | None:
        """Return the round with these numbers, if anything has come for it."""
        return next((one for one in self.rounds if one.numbers == numbers), None)

    def begin(self, numbers: list[int]) -> _BatchRound | None:
        """Begin a round of which nothing has come yet; None: engines have to look at it."""
        if self.rounds:
            last = self.rounds[-1].numbers
            is_next = len(self.rounds) < MAX_ROUNDS_AHEAD and [number - 1 for number in numbers] == last
        else:
            is_next = all(shard.can_begin_round(number) for shard, number in zip(self.shards, numbers, strict=True))
        if not is_next:
            return None
        if not self.rounds:
            for shard in self.shards:
                shard.waiting = self
        self.rounds.append(_BatchRound(numbers))
        return self.rounds[-1]

    def end_round(self) -> None:
        """Forget the first round, which is over."""
        self.rounds.popleft()
        if not self.rounds:
            for shard in self.shards:
                shard.waiting = None

    def split(self) -> Iterator[tuple[WorkerRequest, NDArray[np.uint8]]]:
        rounds = list(self.rounds)
        self.rounds.clear()
        for shard in self.shards:
            shard.waiting = None
        for one in rounds:
            for request, elements in one.contributions:
                yield from self.parts_of(request, one.numbers, elements)

    def parts_of(
        self, request: WorkerRequest, numbers: list[int], elements: NDArray[np.uint8]
    ) -> Iterator[tuple[WorkerRequest, NDArray[np.uint8]]]:
        """Yield the requests for the keys of a batch, with their elements; all of them belong to it from now on."""
        header = request.header
        parts = []
        for place, (shard, number) in enumerate(zip(self.shards, numbers, strict=True), 1):
            about = MessageHeader(
                header.kind, header.request + place, shard.key, 0, number, header.flags & _ANSWER_IN_MEMORY,
                header.dtype, store=header.store, priority=header.priority, batch=header.batch,
            )  # fmt: skip
            parts.append(WorkerRequest(request.connection, about, request.since, batch=request, num_unreleased_parts=1))
        request.parts, request.num_unreleased_parts = {part.header.request: part for part in parts}, len(parts)
        size = self.dtype.itemsize if len(elements) else 0
        for part, (begin, end) in zip(parts, self.ranges, strict=True):
            yield part, elements[size * begin : size * end]


class BatchHandler:
    """Takes the batches of one store."""

    def __init__(self, store: ServerStore) -> None:
        self._store = store
        #: by ids and element type, for one version of the store's layout
        self._known: dict[tuple[bytes, int], KeyBatch] = {}
        self._layout_version = -1

    def take(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        """Take in a batch, which is answered now or later; raises WireError if no worker of this version sends that."""
        header = request.header
        num_keys = header.shard
        if header.flags & ~_OWN_FLAGS or not 1 <= num_keys <= MAX_BATCH_KEYS or len(body) < KEY_HEADER_BYTES * num_keys:
            raise WireError(f"a batch of {num_keys} keys in {len(body)} bytes, with flags {header.flags}")
        ids = body[: 8 * num_keys].tobytes()
        numbers: list[int] = body[8 * num_keys : KEY_HEADER_BYTES * num_keys].view(np.uint64).tolist()
        elements = body[KEY_HEADER_BYTES * num_keys :]
        batch = self._batch_of(ids, header.dtype)
        if header.kind != _PULL and min(numbers) < 1:
            raise WireError("a push without a round")
        if len(elements) != (0 if header.kind == _PULL else batch.num_bytes):
            raise WireError(f"{len(elements)} bytes of elements for keys of {batch.num_bytes}")
        if not (self._pull if header.kind == _PULL else self._push)(batch, request, numbers, elements):
            self._store.split_waiting(*batch.shards)
            self._store.handle_parts(batch.parts_of(request, numbers, elements))

    def _batch_of(self, ids: bytes, dtype: int) -> KeyBatch:
        if self._layout_version != self._store.layout_version or len(self._known) >= _MOST_KNOWN:
            self._layout_version = self._store.layout_version
            self._known.clear()
        batch = self._known.get((ids, dtype))
        if batch is None:
            batch = self._known[ids, dtype] = KeyBatch(self._shards(ids, dtype))
        return batch

    def _shards(self, ids: bytes, dtype: int) -> list[Shard]:
        keys: list[int] = np.frombuffer(ids, np.uint64).tolist()
        if len(set(keys)) < len(keys):
            raise WireError("a batch with the same key twice")
        shards = []
        for key in keys:
            shard = self._store.shards.get((key, 0))
            if shard is None:
                raise ArgumentError(
                    f"there is no key {key} on server {self._store.context.server}; it was never initialised, or the "
                    "server has lost it"
                )
            if DTYPE_NUMBERS[shard.spec.dtype] != dtype or not shard.is_whole or shard.spec.stype != "default":
                raise WireError(f"key {shard.spec.name!r} in a batch of others")
            shards.append(shard)
        if sum(shard.num_bytes for shard in shards) > MAX_BATCH_BYTES:
            raise WireError(f"a batch of more than {MAX_BATCH_BYTES} bytes")
        return shards

    # ---- the plain case

    def _push(self, batch: KeyBatch, request: WorkerRequest, numbers: list[int], elements: NDArray[np.uint8]) -> bool:
        """Have a batch wait for those of the others, or complete their round; whether that can be done."""
        store, worker = self._store, request.connection.worker
        if store.context.snapshots is not None or (store.settings.optimizer and not batch.dtype.is_floating):
            return False
        if request.header.batch:  # shards leave out what they have already, each by itself
            return False
        one = batch.round_of(numbers) or batch.begin(numbers)
        if one is None or worker in one.pushes:
            return False
        one.contributions.append((request, elements))
        one.pushes[worker] = PushData(elements.view(batch.dtype.storage))
        while batch.rounds and len(batch.rounds[0].pushes) == store.context.num_workers:
            self._complete(batch, batch.rounds[0])
        return True

    def _complete(self, batch: KeyBatch, one: _BatchRound) -> None:
        """Add up the first round, which all workers have pushed, and answer."""
        store, memory, optimizer = self._store, self._store.context.memory, self._store.settings.optimizer
        parts = [one.pushes[worker] for worker in range(store.context.num_workers)]
        targets = [memory.target(shard.value) for shard in batch.shards]
        total, dtype = memory.new(batch.num_bytes), DTYPE_NUMBERS[batch.dtype.name]
        for shard, number in zip(batch.shards, one.numbers, strict=True):
            shard.engine.together(number)
        batch.end_round()
        updated = [batch.shards[0]]

        def change(scratch: ReductionScratch) -> None:
            for shard in _update_shards(batch, parts, optimizer, targets, total, scratch):
                updated[0] = shard

        def done(error: BaseException | None) -> None:
            if error is not None:
                store.fail_all(updated[0], error)
                return
            for shard, target, number in zip(batch.shards, targets, one.numbers, strict=True):
                shard.settle(target, memory)
                shard.applied = shard.applied.over((number,) * len(parts))
            for request, _ in one.contributions:
                request.release_body(store.context.buffers)
                if request.header.kind == _PUSH:
                    request.connection.answer(request)
                else:
                    request.connection.answer_value(request, total, dtype)
            memory.retire(total)

        store.compute(batch.shards, change, done, batch.num_bytes * (len(parts) + 1))
        if batch.shards[0].is_busy:
            store.split_waiting(*batch.shards)  # later rounds wait for the shards now, not for workers alone

    def _pull(self, batch: KeyBatch, request: WorkerRequest, numbers: list[int], _: NDArray[np.uint8]) -> bool:
        """Answer a batch of pulls, or have it wait for the round that it is to see; whether that can be done."""
        one = batch.round_of(numbers)
        if one is not None:
            request.release_body(self._store.context.buffers)
            one.contributions.append((request, _NOTHING))
            return True
        worker = request.connection.worker
        for shard, number in zip(batch.shards, numbers, strict=True):
            if shard.is_busy or not shard.engine.may_read(worker, number):
                return False
        memory = self._store.context.memory
        total = memory.new(batch.num_bytes)
        out = total.array.view(batch.dtype.storage)
        for shard, (begin, end) in zip(batch.shards, batch.ranges, strict=True):
            out[begin:end] = shard.array
        request.release_body(self._store.context.buffers)
        request.connection.answer_value(request, total, DTYPE_NUMBERS[batch.dtype.name])
        memory.retire(total)
        return True


def _update_shards(
    batch: KeyBatch,
    parts: Sequence[PushData],
    optimizer: Optimizer | None,
    targets: Sequence[ValueBuffer],
    total: ValueBuffer,
    scratch: ReductionScratch,
) -> Iterator[Shard]:
    """Have the shards' ``targets``, and ``total``, hold the values after ``parts``; yields each shard before."""
    storage = batch.dtype.storage
    out = total.array.view(storage)
    if optimizer is None:
        ShardSum(batch.dtype, batch.length, parts, 1.0, scratch).into(out)
    for shard, target, (begin, end) in zip(batch.shards, targets, batch.ranges, strict=True):
        yield shard
        if optimizer is None:
            target.array.view(storage)[:] = out[begin:end]
        else:
            update = ValueUpdate([PushData(part.data[begin:end]) for part in parts])
            shard.change(update, optimizer, target, scratch)
            out[begin:end] = target.array.view(storage)
