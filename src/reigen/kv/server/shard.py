"""Shard on its server: the value, the optimizer's states, and the arithmetic of a round.

What computes (`Shard.change`, `Shard.pack`) runs in one thread at a time, one of a pool or the server's own; where it
writes to is decided in the server's thread, which also counts who reads a value (`reigen.kv.server.buffers`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.compression import Codec
from reigen.errors import ArgumentError, ConfigError, UnsupportedError, UnsupportedTypeError, WireError
from reigen.files import Buffer
from reigen.kv.consistency.sample_leases import NumberSet
from reigen.kv.consistency.state_machine import (
    ConsistencyEngine,
    ConsistencyInstruction,
    ConsistencyState,
    RequestToken,
)
from reigen.kv.protocol import KeySpec, ShardRange
from reigen.kv.server.buffers import ReductionScratch, ValueAllocator, ValueBuffer
from reigen.kv.server.reduction import BLOCK_ELEMENTS, PushData, ShardSum, accumulation_dtype, narrow, sum_rows
from reigen.optim import Optimizer, States, packed, piece_of
from reigen.optim.optimizer_state import Slot
from reigen.types import DType, dtype_named

ShardId = tuple[int, int]

#: The fact of a file, or of states on their way, that says whose they are.
OPTIMIZER_FACT = "optimizer"


class ShardSnapshot(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Facts of a shard's snapshot beside its arrays.

    Attributes:
        applied: the state of its engine.
        count, rate: of its slot, if it has one.
        num_earlier: see `Shard`.
        has_slot: an optimizer kept states of it; else it was saved before the store was given one.
        batches: see `Shard`, as ranges.
    """

    key: int
    spec: KeySpec
    place: ShardRange
    applied: ConsistencyState
    count: int = 0
    rate: float | None = None
    num_earlier: int = 0
    has_slot: bool = False
    batches: tuple[tuple[int, int], ...] = ()


class WaitingBatch(Protocol):
    """Requests for several shards that wait as a whole (`reigen.kv.server.batching`)."""

    def split(self) -> Iterator[tuple[Any, NDArray[np.uint8]]]:
        """Wait no more: yield the requests for single keys, in the order of their coming, with their elements."""


class AnswerRequest(NamedTuple):
    """Instruction: answer a request, when what comes before it is done, and saved where that has to be.

    GET_STATES is answered with the states that the optimizer keeps of the shard, all others by DONE.
    """

    token: RequestToken


class RestoreStates(NamedTuple):
    """Instruction: replace the optimizer's states of the shard by those of a PUT_STATES request."""

    token: RequestToken
    body: NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class ValueUpdate:
    """Change of a value.

    Attributes:
        parts: what is added up, in rank order.
        scale: factor of the sum.
        num_update: what a learning-rate schedule is asked for; None: how often the shard was updated.
        batches: leased ones that the parts are of.
    """

    parts: Sequence[PushData]
    scale: float = 1.0
    num_update: int | None = None
    batches: Sequence[int] = ()


def shard_bytes(spec: KeySpec, place: ShardRange) -> int:
    """Return the size of a shard."""
    return place.num_elements * dtype_named(spec.dtype).itemsize


ShardInstruction = ConsistencyInstruction | ConsistencyState | AnswerRequest | RestoreStates


@dataclass(eq=False)
class Shard:
    """Part of a key's value.

    Attributes:
        place: which of the key's elements these are.
        engine: its rounds.
        slot: what the optimizer keeps of it.
        queue: instructions, in order; the state of the engine that an event led to stands behind those of that event.
        is_busy: a thread works on it.
        waiting: requests that its engine has not heard of; whatever else happens to it comes after them.
        applied: the state of the engine that belongs to ``value``.
        num_changes: how often the value has changed.
        num_earlier: updates of each worker before its first round here, where workers are not synchronous: of the job
            whose states were loaded.
        is_dirty: it differs from the latest snapshot.
        must_save: a snapshot is due.
        batches: leased ones (`reigen.kv.consistency.sample_leases`) whose pushes are in ``value``.
        length: how many elements it has.
    """

    key: int
    spec: KeySpec
    place: ShardRange
    engine: ConsistencyEngine
    value: ValueBuffer
    slot: Slot | None = None
    queue: deque[ShardInstruction] = field(default_factory=deque)
    is_busy: bool = False
    waiting: WaitingBatch | None = None
    applied: ConsistencyState = field(init=False)
    num_changes: int = 0
    num_earlier: int = 0
    is_dirty: bool = True
    must_save: bool = False
    batches: NumberSet = field(default_factory=NumberSet)
    _residual: NDArray[np.float32] | None = None
    #: the sum of the latest round as codes, for the number of changes that it belongs to
    _encoded: tuple[int, bytes] = (-1, b"")
    dtype: DType = field(init=False)
    length: int = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = dtype_named(self.spec.dtype)
        self.length = self.place.num_elements
        self.num_bytes = shard_bytes(self.spec, self.place)
        self.applied = self.engine.state()

    @property
    def id(self) -> ShardId:
        return self.key, self.place.index

    @property
    def is_whole(self) -> bool:
        """Return whether it is all of its key."""
        return self.length == math.prod(self.spec.shape)

    @property
    def is_sum(self) -> bool:
        """Return whether the value has been pushed to. A first value, perhaps a weight, stands no lossy codes."""
        return self.num_changes > 1

    @property
    def row_length(self) -> int:
        """Elements of a row of a row-sparse key."""
        return math.prod(self.spec.shape[1:])

    @property
    def num_rows(self) -> int:
        """Number of whole rows of a row-sparse key."""
        return self.length // self.row_length if self.row_length else 0

    @property
    def array(self) -> NDArray[Any]:
        """Elements that are stored."""
        return self.value.array.view(self.dtype.storage)

    def write(self, data: NDArray[np.uint8]) -> None:
        """Take a first value."""
        np.copyto(self.value.array, data)
        self.num_changes += 1
        self.is_dirty = True

    def use(self, optimizer: Optimizer | None) -> None:
        """Update by ``optimizer``, if any; raises ConfigError if it keeps other states than the one before."""
        if optimizer is None or not self.dtype.is_floating:
            return  # other types may be stored, too; a push of them is an error
        if self.slot is None:
            self.slot = Slot(optimizer, self.array, self.dtype)
        else:
            self.slot.check_fits(optimizer)

    def check_push(self, optimizer: Optimizer | None) -> None:
        """Raise the error of a push that can lead to nothing."""
        if optimizer is None:
            if not self.engine.is_synchronous:
                raise UnsupportedError(
                    "without an optimizer a push takes the place of what was stored, which makes no sense where "
                    "workers are not synchronous; call set_optimizer() before"
                )
        elif not self.dtype.is_floating:
            raise UnsupportedTypeError(f"an optimizer cannot update {self.dtype.name} values; use a floating type")
        elif not optimizer.is_elementwise and not self.is_whole:
            raise ArgumentError(
                f"{optimizer.name} needs the whole value, and this key is cut into shards; call set_optimizer() "
                "before init()"
            )

    # ---- updates

    def can_begin_round(self, round: int) -> bool:
        """Return whether nothing is under way, and this round is next; see `ConsistencyEngine.is_next`."""
        return not (self.is_busy or self.waiting) and self.engine.is_next(round)

    def settle(self, target: ValueBuffer, memory: ValueAllocator) -> None:
        """Take the next value."""
        if target is not self.value:
            memory.retire(self.value)
            self.value = target
        self.num_changes += 1
        self.is_dirty = True

    def change(
        self, update: ValueUpdate, optimizer: Optimizer | None, target: ValueBuffer, scratch: ReductionScratch
    ) -> None:
        """Write the value after ``update`` into ``target``."""
        out = target.array.view(self.dtype.storage)
        is_rows = all(part.rows is not None for part in update.parts)
        if optimizer is None:
            self._assign(update, out, is_rows, scratch)
            return
        if target is not self.value:
            np.copyto(target.array, self.value.array)
        self.use(optimizer)
        assert self.slot is not None
        if is_rows:
            rows, sums = sum_rows(self.dtype, self.row_length, update.parts, update.scale)
            shaped = out.reshape(self.num_rows, self.row_length)
            self.slot.update_rows(
                optimizer, shaped, rows, sums, key=self.spec.name, num_update=update.num_update,
                grad_type=accumulation_dtype(self.dtype),
            )  # fmt: skip
            return
        total = ShardSum(self.dtype, self.length, self._dense(update.parts), update.scale, scratch)
        step = self.slot.begin(optimizer, key=self.spec.name, num_update=update.num_update)
        block = BLOCK_ELEMENTS if optimizer.is_elementwise else max(self.length, 1)
        for begin in range(0, self.length, block):
            end = min(begin + block, self.length)
            self.slot.apply(step, out[begin:end], total.block(begin, end), begin, accumulation_dtype(self.dtype))

    def _assign(self, update: ValueUpdate, out: NDArray[Any], is_rows: bool, scratch: ReductionScratch) -> None:
        """Put the sum in the place of the stored value; rows that were not given are zero."""
        if not is_rows:
            ShardSum(self.dtype, self.length, self._dense(update.parts), update.scale, scratch).into(out)
            return
        rows, sums = sum_rows(self.dtype, self.row_length, update.parts, update.scale)
        out[:] = 0
        flat = np.empty(sums.size, self.dtype.storage)
        narrow(sums.reshape(-1), flat, self.dtype)
        out.reshape(self.num_rows, self.row_length)[rows] = flat.reshape(sums.shape)

    def _dense(self, parts: Sequence[PushData]) -> list[PushData]:
        """Contributions with rows as whole ones."""
        dense = []
        for part in parts:
            if part.rows is not None:
                whole = np.zeros((self.num_rows, self.row_length), self.dtype.storage)
                whole[part.rows] = part.data.reshape(len(part.rows), self.row_length)
                part = PushData(whole.reshape(-1))  # noqa: PLW2901
            dense.append(part)
        return dense

    # ---- what others get

    def rows(self, numbers: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy some rows."""
        shaped = self.array.reshape(self.num_rows, self.row_length)
        np.take(shaped, numbers, axis=0, out=out.view(self.dtype.storage).reshape(len(numbers), self.row_length))

    def encoded(self, codec: Codec) -> bytes:
        """Return the value as codes, the same for all workers that ask between two changes, and after a restart."""
        if self._encoded[0] != self.num_changes:
            if self._residual is None:
                self._residual = codec.begin(self.length, self.dtype)
            codes = bytearray(codec.max_bytes(self.length))
            codec.encode(self.array, self._residual, codes)
            self._encoded = (self.num_changes, bytes(codes))
            self.is_dirty = True
        return self._encoded[1]

    def pack_states(self, optimizer: Optimizer | None) -> bytes:
        """Return the answer to GET_STATES: states of one piece, or of none where no optimizer updates the shard."""
        if optimizer is None or self.slot is None:
            return States(()).to_bytes()
        piece = piece_of(self.slot, self.spec.name, math.prod(self.spec.shape), self.place.begin)
        return States([piece], None, {OPTIMIZER_FACT: optimizer.name}).to_bytes()

    def put_states(self, body: NDArray[np.uint8], optimizer: Optimizer | None) -> None:
        """Take over states of `pack_states`, from this or another job.

        Raises:
            ArgumentError: it is damaged, there is no optimizer, or the states are of another one.
        """
        try:
            saved = States.from_bytes(body.data)
        except ConfigError as error:
            raise ArgumentError(str(error)) from None
        if optimizer is None:
            raise ArgumentError("there is no optimizer whose states could be loaded; call set_optimizer() before")
        name = saved.facts.get(OPTIMIZER_FACT, "none")
        if name != optimizer.name:
            raise ArgumentError(f"these are states of the optimizer {name!r}, the store uses {optimizer.name!r}")
        if [(piece.begin, piece.end) for piece in saved.pieces] != [(self.place.begin, self.place.end)]:
            raise ArgumentError(f"these are not the states of the elements {self.place.begin} to {self.place.end}")
        piece = saved.pieces[0]
        self.use(optimizer)
        self._restore_slot(piece.arrays, piece.count, piece.rate)
        self.num_earlier = (piece.count - optimizer.begin_num_update) // self.engine.num_workers - max(
            self.applied.done
        )
        self.is_dirty = True

    def _restore_slot(self, arrays: Mapping[str, NDArray[Any]], count: int, rate: float | None) -> None:
        assert self.slot is not None
        wanted = {name: (array.dtype, len(array)) for name, array in self.slot.arrays.items()}
        given = {name: (array.dtype, array.size) for name, array in arrays.items()}
        if count < 0 or not math.isfinite(rate or 0.0):
            raise ArgumentError(f"states after {count} updates, at a learning rate of {rate}")
        if wanted != given:
            raise ArgumentError(
                f"the states are {_format_arrays(given)}, the store's optimizer keeps {_format_arrays(wanted)}"
            )
        for name, array in arrays.items():
            np.copyto(self.slot.arrays[name], array.reshape(-1))
        self.slot.count, self.slot.rate = count, rate

    # ---- snapshots

    def pack(self) -> list[Buffer]:
        """Return all of it, as it is now, for a snapshot."""
        arrays = {} if self.slot is None else {f"state {name}": array for name, array in self.slot.arrays.items()}
        arrays["value"] = self.array
        if self._residual is not None:
            arrays["residual"] = self._residual
        if self._encoded[0] == self.num_changes:
            arrays["codes"] = np.frombuffer(self._encoded[1], np.uint8)
        about = ShardSnapshot(
            self.key, self.spec, self.place, self.applied, num_earlier=self.num_earlier, batches=self.batches.ranges()
        )
        if self.slot is not None:
            about = msgspec.structs.replace(about, count=self.slot.count, rate=self.slot.rate, has_slot=True)
        return packed(about, arrays)

    def restore(self, snapshot: ShardSnapshot, arrays: dict[str, NDArray[Any]], optimizer: Optimizer | None) -> None:
        """Take over a snapshot; raises WireError if it is not of this shard."""
        value = arrays.get("value")
        if value is None or value.nbytes != self.num_bytes:
            raise WireError("a snapshot without the value of its shard")
        self.write(value.reshape(-1).view(np.uint8))
        self.num_changes += any(snapshot.applied.done)  # see `is_sum`
        self.num_earlier = snapshot.num_earlier
        self.batches = NumberSet(snapshot.batches)
        residual = arrays.get("residual")
        if residual is not None:
            self._residual = np.array(residual, np.float32)
        if "codes" in arrays:
            self._encoded = (self.num_changes, arrays["codes"].tobytes())
        self.use(optimizer)
        if self.slot is not None and snapshot.has_slot:
            kept = {name.removeprefix("state "): array for name, array in arrays.items() if name.startswith("state ")}
            try:
                self._restore_slot(kept, snapshot.count, snapshot.rate)
            except (ArgumentError, ConfigError) as error:
                raise WireError(f"a snapshot with other states: {error}") from None
        self.is_dirty = False


def _format_arrays(arrays: dict[str, tuple[Any, int]]) -> str:
    return ", ".join(f"{name} ({length} {dtype})" for name, (dtype, length) in arrays.items()) or "none"
