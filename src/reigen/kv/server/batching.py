"""Bundles on a server: small keys of one call come in one message, and are added up as one array where they can be.

A message, a decision and an addition for each small key would cost many times what it takes to add them up. Workers
that do the same push the same keys together, round after round. So where all shards of a bundle are about to do nothing
but their next round, all workers are there, and nothing else has come, the bundle waits as a whole for those of the
other workers. Then one addition serves all, and one piece of memory has all answers.

Whatever else happens to one of these shards meanwhile (a push of this key alone, another selection of keys, a worker
that is lost, leaves, or connects again, a deadline) opens the bundles that wait: each key's request is handed to the
desk as if it had come by itself, in the order in which the bundles came. So engines decide everything that is not the
plain case, and what they do not know of is what makes no difference to them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

#: Selections of keys that are remembered.
_MOST_KNOWN = 256
#: Bytes of a key in front of the elements: its id and its round.
KEY_HEADER_BYTES = 16
MAX_BATCH_BODY_BYTES = MAX_BATCH_KEYS * KEY_HEADER_BYTES + MAX_BATCH_BYTES
_ANSWER_IN_MEMORY = int(MessageFlag.ANSWER_IN_MEMORY)
_OWN_FLAGS = int(MessageFlag.BATCH | MessageFlag.IN_MEMORY | MessageFlag.ANSWER_IN_MEMORY | MessageFlag.RESENT)
# As plain numbers, since enumerations are slow.
_PULL, _PUSH = int(MessageKind.PULL), int(MessageKind.PUSH)
_NOTHING = np.empty(0, np.uint8)
#: Has a part of a bundle done as if it had come by itself.
PartHandler = Callable[[WorkerRequest, NDArray[np.uint8]], None]


@dataclass(eq=False)
class _BatchRound:
    """What has come for one round of a selection.

    Attributes:
        numbers: of the round, for each key.
        came: the bundles with their elements, in the order in which they came.
        pushes: those that push, by worker.
    """

    numbers: list[int]
    came: list[tuple[WorkerRequest, NDArray[np.uint8]]] = field(default_factory=list)
    pushes: dict[int, PushData] = field(default_factory=dict)


class KeyBatch:
    """Shards that come together.

    Args:
        shards: of one key each, all of one element type.
        handle: what a part of a bundle that is opened is given to.
    """

    def __init__(self, shards: list[Shard], handle: PartHandler) -> None:
        self.shards = shards
        self.dtype = shards[0].dtype
        ends = list(itertools.accumulate(shard.length for shard in shards))
        #: which elements are whose
        self.ranges = list(zip([0, *ends], ends, strict=False))
        self.length = ends[-1]
        self.num_bytes = self.length * self.dtype.itemsize
        #: consecutive ones, of which the first is next
        self.rounds: deque[_BatchRound] = deque()
        self._handle = handle

    def round_of(self, numbers: list[int]) -> _BatchRound | None:
        """What has come for a round."""
        return next((one for one in self.rounds if one.numbers == numbers), None)

    def begin(self, numbers: list[int]) -> _BatchRound | None:
        """A round of which nothing has come yet; None: engines have to look at it."""
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

    def is_over(self) -> None:
        """The first round is over."""
        self.rounds.popleft()
        if not self.rounds:
            for shard in self.shards:
                shard.waiting = None

    def open(self) -> None:
        """See `reigen.kv.server.shard.WaitingBatch`."""
        rounds = list(self.rounds)
        self.rounds.clear()
        for shard in self.shards:
            shard.waiting = None
        for one in rounds:
            for request, elements in one.came:
                self.split(request, one.numbers, elements)

    def split(self, request: WorkerRequest, numbers: list[int], elements: NDArray[np.uint8]) -> None:
        """Have a bundle done key by key."""
        header = request.header
        parts = []
        for place, (shard, number) in enumerate(zip(self.shards, numbers, strict=True), 1):
            about = MessageHeader(
                header.kind, header.request + place, shard.key, 0, number, header.flags & _ANSWER_IN_MEMORY,
                header.dtype, store=header.store, priority=header.priority,
            )  # fmt: skip
            parts.append(
                WorkerRequest(request.connection, about, request.since, bundle=request, num_unreleased_parts=1)
            )
        request.parts, request.num_unreleased_parts = {part.header.request: part for part in parts}, len(parts)
        size = self.dtype.itemsize if len(elements) else 0
        for part, (begin, end) in zip(parts, self.ranges, strict=True):
            self._handle(part, elements[size * begin : size * end])


class BatchHandler:
    """Takes the bundles of one store.

    Args:
        store: whose shards they are about.
        handle: what a part of a bundle that was opened is given to.
    """

    def __init__(self, store: ServerStore, handle: PartHandler) -> None:
        self._store = store
        self._handle = handle
        #: by ids and element type
        self._known: dict[tuple[bytes, int], KeyBatch] = {}
        self._num_laid_out = -1

    def take(self, request: WorkerRequest, body: NDArray[np.uint8]) -> None:
        """A bundle has come.

        Raises:
            WireError: no worker of this version sends that.
            ArgumentError: there is no such key.
        """
        header = request.header
        num_keys = header.shard
        if header.flags & ~_OWN_FLAGS or not 1 <= num_keys <= MAX_BATCH_KEYS or len(body) < KEY_HEADER_BYTES * num_keys:
            raise WireError(f"a bundle of {num_keys} keys in {len(body)} bytes, with flags {header.flags}")
        ids = body[: 8 * num_keys].tobytes()
        numbers: list[int] = body[8 * num_keys : KEY_HEADER_BYTES * num_keys].view(np.uint64).tolist()
        elements = body[KEY_HEADER_BYTES * num_keys :]
        selection = self._selection(ids, header.dtype)
        if header.kind != _PULL and min(numbers) < 1:
            raise WireError("a push without a round")
        if len(elements) != (0 if header.kind == _PULL else selection.num_bytes):
            raise WireError(f"{len(elements)} bytes of elements for keys of {selection.num_bytes}")
        if not (self._read if header.kind == _PULL else self._push)(selection, request, numbers, elements):
            selection.split(request, numbers, elements)

    def _selection(self, ids: bytes, dtype: int) -> KeyBatch:
        if self._num_laid_out != self._store.layout_version or len(self._known) >= _MOST_KNOWN:
            self._num_laid_out = self._store.layout_version
            self._known.clear()
        selection = self._known.get((ids, dtype))
        if selection is None:
            selection = self._known[ids, dtype] = KeyBatch(self._shards(ids, dtype), self._handle)
        return selection

    def _shards(self, ids: bytes, dtype: int) -> list[Shard]:
        keys: list[int] = np.frombuffer(ids, np.uint64).tolist()
        if len(set(keys)) < len(keys):
            raise WireError("a bundle with the same key twice")
        shards = []
        for key in keys:
            shard = self._store.shards.get((key, 0))
            if shard is None:
                raise ArgumentError(
                    f"there is no key {key} on server {self._store.context.server}; it was never initialised, or the "
                    "server has lost it"
                )
            if DTYPE_NUMBERS[shard.facts.dtype] != dtype or not shard.is_whole or shard.facts.stype != "default":
                raise WireError(f"key {shard.facts.name!r} in a bundle of others")
            shards.append(shard)
        if sum(shard.num_bytes for shard in shards) > MAX_BATCH_BYTES:
            raise WireError(f"a bundle of more than {MAX_BATCH_BYTES} bytes")
        return shards

    # ---- the plain case

    def _push(
        self, selection: KeyBatch, request: WorkerRequest, numbers: list[int], elements: NDArray[np.uint8]
    ) -> bool:
        """Have a bundle wait for those of the others, or complete their round; whether that can be done."""
        store, worker = self._store, request.connection.worker
        optimizer = store.settings.optimizer
        if store.context.snapshots is not None or (optimizer is not None and not selection.dtype.is_floating):
            return False
        one = selection.round_of(numbers) or selection.begin(numbers)
        if one is None or worker in one.pushes:
            return False
        one.came.append((request, elements))
        one.pushes[worker] = PushData(elements.view(selection.dtype.storage))
        while selection.rounds and len(selection.rounds[0].pushes) == store.context.num_workers:
            self._complete(selection, selection.rounds[0])
        return True

    def _complete(self, selection: KeyBatch, one: _BatchRound) -> None:
        """All workers have pushed the first round: add it up, and answer."""
        store, memory = self._store, self._store.context.memory
        parts = [one.pushes[worker] for worker in range(store.context.num_workers)]
        targets = [memory.target(shard.value) for shard in selection.shards]
        total, dtype = memory.new(selection.num_bytes), DTYPE_NUMBERS[selection.dtype.name]
        for shard, number in zip(selection.shards, one.numbers, strict=True):
            shard.engine.together(number)
        selection.is_over()

        at = [selection.shards[0]]

        def done(error: BaseException | None) -> None:
            if error is not None:
                store.fail_all(at[0], error)
                return
            for shard, target, number in zip(selection.shards, targets, one.numbers, strict=True):
                shard.settle(target, memory)
                shard.applied = shard.applied.over((number,) * len(parts))
            for request, _ in one.came:
                request.used(store.context.buffers)
                if request.header.kind == _PUSH:
                    request.connection.answer(request, MessageKind.DONE)
                else:
                    request.connection.answer_value(request, total, dtype)
            memory.retire(total)

        optimizer = store.settings.optimizer

        def change(scratch: ReductionScratch) -> None:
            for shard in _update_shards(selection, parts, optimizer, targets, total, scratch):
                at[0] = shard

        store.do(selection.shards, change, done, selection.num_bytes * (len(parts) + 1))
        if selection.shards[0].is_busy:
            selection.open()  # later rounds wait for the shards now, not for workers alone

    def _read(self, selection: KeyBatch, request: WorkerRequest, numbers: list[int], _: NDArray[np.uint8]) -> bool:
        """Answer a bundle of pulls, or have it wait for the round that it is to see; whether that can be done."""
        one = selection.round_of(numbers)
        if one is not None:
            request.used(self._store.context.buffers)
            one.came.append((request, _NOTHING))
            return True
        worker = request.connection.worker
        for shard, number in zip(selection.shards, numbers, strict=True):
            if shard.is_busy or not shard.engine.may_read(worker, number):
                return False
        memory = self._store.context.memory
        total = memory.new(selection.num_bytes)
        out = total.array.view(selection.dtype.storage)
        for shard, (begin, end) in zip(selection.shards, selection.ranges, strict=True):
            out[begin:end] = shard.array
        request.used(self._store.context.buffers)
        request.connection.answer_value(request, total, DTYPE_NUMBERS[selection.dtype.name])
        memory.retire(total)
        return True


def _update_shards(
    selection: KeyBatch,
    parts: Sequence[PushData],
    optimizer: Optimizer | None,
    targets: Sequence[ValueBuffer],
    total: ValueBuffer,
    scratch: ReductionScratch,
) -> Iterator[Shard]:
    """Have the shards' ``targets``, and ``total``, hold what is stored after ``parts``; yields each shard before."""
    storage = selection.dtype.storage
    out = total.array.view(storage)
    if optimizer is None:
        ShardSum(selection.dtype, selection.length, parts, 1.0, scratch).into(out)
    for shard, target, (begin, end) in zip(selection.shards, targets, selection.ranges, strict=True):
        yield shard
        if optimizer is None:
            target.array.view(storage)[:] = out[begin:end]
        else:
            update = ValueUpdate([PushData(part.data[begin:end]) for part in parts])
            shard.change(update, optimizer, target, scratch)
            out[begin:end] = target.array.view(storage)
