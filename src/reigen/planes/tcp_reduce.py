"""How the ranks of a TCP plane add up arrays: one class for each algorithm of `reigen.planes.tcp_choice`.

Each posts its first messages, and says what follows whatever arrives; the event loop does the rest. Arrays may consist
of many tensors (`Strung`). A chunk that lies within one tensor is sent from there, and received there; one that does
not is copied, to or from scratch.

Source and target may be the same memory. A rank writes a chunk of its target only when its contribution to that chunk
has left for everybody who needs it: see each class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reigen.kernels.reduce import Reducer, Reduction
from reigen.planes.base import Array
from reigen.planes.exchange import Exchange
from reigen.planes.strung import Strung, slice_of
from reigen.planes.tcp_choice import MOST_BYTES, cut
from reigen.types import ReduceOp

#: How many chunks from each rank may be on their way into scratch, or into a target, at a time.
WINDOW = 3
_MOST_KEPT = 32


Block = NDArray[np.uint8]


class Scratch:
    """Blocks of memory for one chunk each, used again and again."""

    def __init__(self) -> None:
        self._free: list[Block] = []

    def take(self) -> Block:
        """A block, its content undefined."""
        return self._free.pop() if self._free else np.empty(_LARGEST_BYTES, np.uint8)

    def give(self, block: Block) -> None:
        """Give a block back."""
        if len(self._free) < _MOST_KEPT:
            self._free.append(block)

    def clear(self) -> None:
        """Let go of the blocks that are not in use."""
        self._free.clear()


#: The last chunk of a slice is up to half as long again.
_LARGEST_BYTES = MOST_BYTES + MOST_BYTES // 2


@dataclass
class Team:
    """The ranks of a plane, numbered from 0, as one of them sees it.

    Attributes:
        ranks: their numbers in the job.
        rank: this one's number in the plane.
        others: the others' numbers in the plane, from the next one on, so that not all ranks begin with the same.
    """

    exchange: Exchange
    ranks: tuple[int, ...]
    rank: int
    scratch: Scratch = field(default_factory=Scratch)

    def __post_init__(self) -> None:
        size = len(self.ranks)
        self.others = tuple((self.rank + step) % size for step in range(1, size))

    def send(self, member: int, array: Array, then: Callable[[], None] | None = None) -> None:
        """Post a message of a contiguous array to a member."""
        self.exchange.send(self.ranks[member], array.view(np.uint8).data, then)

    def receive(self, member: int, array: Array, then: Callable[[], None] | None = None) -> None:
        """Post a contiguous array as the place of a member's next message."""
        self.exchange.receive(self.ranks[member], array.view(np.uint8).data, then)


class _Chunks:
    """What the algorithms have in common: chunks of a source and a target, wherever they lie."""

    def __init__(self, team: Team, source: Strung, target: Strung, reducer: Reducer) -> None:
        self._team, self._source, self._target, self._reducer = team, source, target, reducer
        self._storage = reducer.reduction.dtype.storage
        self._scratch = team.scratch
        #: for chunks that are coming, a block for each rank; used by turns
        self._slots: list[dict[int, Block]] = []

    def finish(self) -> None:
        """Give scratch back. After everything has arrived."""
        for slot in self._slots:
            for block in slot.values():
                self._scratch.give(block)
        self._slots.clear()

    def _take_slots(self, count: int) -> None:
        self._slots = [{} for _ in range(count)]

    def _slot(self, index: int, member: int, count: int) -> Array:
        """Room for a member's contribution to the chunk ``index``."""
        slot = self._slots[index % len(self._slots)]
        if member not in slot:
            slot[member] = self._scratch.take()
        return self._typed(slot[member], count)

    def _typed(self, block: Block, count: int) -> Array:
        return block[: count * self._storage.itemsize].view(self._storage)

    def _contribution(self, begin: int, end: int, room: Array) -> Array:
        """This rank's contribution to a chunk in one piece: where it lies, or else copied to ``room``."""
        piece = self._source.whole(begin, end)
        if piece is not None:
            return piece
        self._source.read(begin, end, room)
        return room

    def _send_contribution(self, member: int, begin: int, end: int) -> None:
        """Post it to a member. If it must be copied, it is when it is its turn."""
        piece = self._source.whole(begin, end)
        if piece is not None:
            self._team.send(member, piece)
        else:
            self._send_late(member, lambda block: self._contribution(begin, end, self._typed(block, end - begin)))

    def _send_late(self, member: int, make: Callable[[Block], Array]) -> None:
        """Post a message that is made, perhaps in the block that is given, when it is its turn."""
        blocks: list[Block] = []

        def place() -> memoryview:
            blocks.append(self._scratch.take())
            return make(blocks[0]).view(np.uint8).data

        self._team.exchange.send(self._team.ranks[member], place, lambda: self._scratch.give(blocks.pop()))

    def _result(self, begin: int, end: int) -> tuple[Array, Block | None]:
        """Room for a chunk of the result: where it belongs, or else in a block, and that block."""
        piece = self._target.whole(begin, end)
        if piece is not None:
            return piece, None
        block = self._scratch.take()
        return self._typed(block, end - begin), block

    def _conclude(self, begin: int, result: Array, block: Block | None) -> None:
        """Put a result that lies in a block where it belongs, and give the block back."""
        if block is not None:
            self._target.write(begin, result)
            self._scratch.give(block)


class Scatter(_Chunks):
    """Every rank gets the sum of one slice: all send it their contributions, chunk by chunk, and it adds them up.

    A chunk of this rank's slice is written when all contributions to it are here; nobody else needs this rank's.

    Args:
        team: who.
        source: this rank's contributions to all slices.
        target: for the result of this rank's slice; its first element is element ``origin`` of all.
        reducer: what to compute.
        slices: by rank, from and to which element.
        origin: 0 where the target has room for all slices.
    """

    def __init__(
        self,
        team: Team,
        source: Strung,
        target: Strung,
        reducer: Reducer,
        slices: Sequence[tuple[int, int]],
        origin: int = 0,
    ) -> None:
        super().__init__(team, source, target, reducer)
        self._origin = origin
        self._chunks = [cut(*part, self._storage.itemsize, len(slices)) for part in slices]
        self._mine = self._chunks[team.rank]
        self._missing = [len(team.others)] * len(self._mine)

    def start(self) -> None:
        """Post the first messages."""
        for index in range(max(map(len, self._chunks))):
            for member in self._team.others:
                if index < len(self._chunks[member]):
                    self._send_contribution(member, *self._chunks[member][index])
        self._take_slots(min(WINDOW, len(self._mine)))
        for index in range(len(self._slots)):
            self._expect(index)
        if not self._mine:
            self._expect_results()

    def _expect(self, index: int) -> None:
        """Post the places of everybody's contributions to one of this rank's chunks."""
        begin, end = self._mine[index]
        for member in self._team.others:
            self._team.receive(member, self._slot(index, member, end - begin), partial(self._arrived, index))
        if index == len(self._mine) - 1:
            self._expect_results()

    def _arrived(self, index: int) -> None:
        """A contribution to a chunk; those of one rank come in order."""
        self._missing[index] -= 1
        if not self._missing[index]:
            begin, end = self._mine[index]
            own = self._contribution(begin, end, self._slot(index, self._team.rank, end - begin))
            inputs = [self._slot(index, member, end - begin) for member in range(len(self._team.ranks))]
            inputs[self._team.rank] = own
            result, block = self._result(begin - self._origin, end - self._origin)
            self._reducer.reduce(inputs, result)
            self._hand_out(begin, result, block)
            if index + WINDOW < len(self._mine):
                self._expect(index + WINDOW)

    def _hand_out(self, begin: int, result: Array, block: Block | None) -> None:
        """A chunk of this rank's slice is complete."""
        self._conclude(begin - self._origin, result, block)

    def _expect_results(self) -> None:
        """The places of all contributions have been posted."""


class Direct(Scatter):
    """`Scatter`, and every rank sends its slice's sum to all, each chunk as soon as it is complete."""

    def __init__(self, team: Team, source: Strung, target: Strung, reducer: Reducer) -> None:
        size, itemsize = len(team.ranks), reducer.reduction.dtype.itemsize
        slices = [slice_of(source.size, rank, size, itemsize) for rank in range(size)]
        super().__init__(team, source, target, reducer, slices)

    def _hand_out(self, begin: int, result: Array, block: Block | None) -> None:
        left = len(self._team.others)

        def sent() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._conclude(begin, result, block)

        for member in self._team.others:
            self._team.send(member, result, None if block is None else sent)

    def _expect_results(self) -> None:
        for member in self._team.others:
            chunks = iter(self._chunks[member])
            for _ in range(WINDOW):
                self._expect_result(member, chunks)

    def _expect_result(self, member: int, chunks: Iterator[tuple[int, int]]) -> None:
        if (chunk := next(chunks, None)) is not None:
            result, block = self._result(*chunk)

            def arrived() -> None:
                self._conclude(chunk[0], result, block)
                self._expect_result(member, chunks)

            self._team.receive(member, result, arrived)


class Everything(_Chunks):
    """Every rank sends all of its array to all others, and adds up everything.

    A chunk of the target is written when all contributions to it are here and this rank's own has left for everybody.
    """

    def __init__(self, team: Team, source: Strung, target: Strung, reducer: Reducer) -> None:
        super().__init__(team, source, target, reducer)
        self._chunks = cut(0, source.size, self._storage.itemsize, len(team.ranks))
        #: how many messages of a chunk have not left or arrived
        self._missing = [2 * len(team.others)] * len(self._chunks)
        self._own: dict[int, Array] = {}

    def start(self) -> None:
        """Post the first messages."""
        self._take_slots(min(WINDOW, len(self._chunks)))
        for index in range(len(self._slots)):
            self._post(index)

    def _post(self, index: int) -> None:
        begin, end = self._chunks[index]
        own = self._contribution(begin, end, self._slot(index, self._team.rank, end - begin))
        self._own[index] = own
        for member in self._team.others:
            self._team.send(member, own, partial(self._moved, index))
            self._team.receive(member, self._slot(index, member, end - begin), partial(self._moved, index))

    def _moved(self, index: int) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            begin, end = self._chunks[index]
            inputs = [self._slot(index, member, end - begin) for member in range(len(self._team.ranks))]
            inputs[self._team.rank] = self._own.pop(index)
            result, block = self._result(begin, end)
            self._reducer.reduce(inputs, result)
            self._conclude(begin, result, block)
            if index + WINDOW < len(self._chunks):
                self._post(index + WINDOW)


class Ring(_Chunks):
    """Partial sums of slices go around and become sums, sums go around until everybody has them.

    In step k rank r sends slice r - k to rank r + 1 and receives slice r - k - 1 from rank r - 1. In steps 0 to n - 2
    it adds its contribution to what it receives; what it has then is sent in the next step. Chunks of one step and of
    the next are on their way at the same time.

    Partial sums lie in the target: its own contribution to a slice a rank needs once, when it makes them, and the sums,
    which replace them, come when they have been around.
    """

    def __init__(self, team: Team, source: Strung, target: Strung, reducer: Reducer) -> None:
        super().__init__(team, source, target, reducer)
        size, itemsize, reduction = len(team.ranks), self._storage.itemsize, reducer.reduction
        slices = [slice_of(source.size, rank, size, itemsize) for rank in range(size)]
        self._chunks = [cut(*part, itemsize, 2) for part in slices]
        self._next, self._previous = team.others[0], team.others[-1]
        combining = ReduceOp.SUM if reduction.op is ReduceOp.AVERAGE else reduction.op
        self._scaling: Reducer | None = None
        if reduction.prescale != 1.0:
            self._scaling = Reducer(Reduction(reduction.dtype, combining, 1, prescale=reduction.prescale))
        self._combining = Reducer(Reduction(reduction.dtype, combining, 1))
        self._ending = Reducer(Reduction(reduction.dtype, reduction.op, reduction.count, postscale=reduction.postscale))
        steps = range(2 * (size - 1))
        #: what comes: step, from and to which element
        self._coming = [(step, *chunk) for step in steps for chunk in self._chunks[(team.rank - step - 1) % size]]

    def start(self) -> None:
        """Post the first messages."""
        for begin, end in self._chunks[self._team.rank]:
            if self._scaling is None:
                self._send_contribution(self._next, begin, end)
            else:
                self._send_late(self._next, partial(self._scaled, begin, end))
        self._take_slots(min(WINDOW, len(self._coming)))
        for index in range(len(self._slots)):
            self._expect(index)

    def _scaled(self, begin: int, end: int, block: Block) -> Array:
        """This rank's contribution to a chunk, as it is combined with those of others."""
        own = self._contribution(begin, end, self._typed(block, end - begin))
        if self._scaling is None:
            return own
        scaled = self._typed(block, end - begin)
        self._scaling.reduce([own], scaled)
        return scaled

    def _expect(self, index: int) -> None:
        step, begin, end = self._coming[index]
        if step < len(self._team.others):
            partial_sum = self._slot(index, self._previous, end - begin)
            self._team.receive(self._previous, partial_sum, partial(self._add, index, partial_sum))
        else:
            result, block = self._result(begin, end)
            self._team.receive(self._previous, result, partial(self._pass_on, index, result, block))

    def _add(self, index: int, partial_sum: Array) -> None:
        step, begin, end = self._coming[index]
        scratch = self._scratch.take()
        own = self._scaled(begin, end, scratch)
        result, block = self._result(begin, end)
        is_last = step == len(self._team.others) - 1
        (self._ending if is_last else self._combining).reduce([partial_sum, own], result)
        self._scratch.give(scratch)
        self._pass_on(index, result, block)

    def _pass_on(self, index: int, result: Array, block: Block | None) -> None:
        """Send on what has come; sums, and those partial sums that lie in the target, stay there."""
        step, begin, _ = self._coming[index]
        if index + WINDOW < len(self._coming):
            self._expect(index + WINDOW)
        num_adding = len(self._team.others)
        if block is not None and step < num_adding - 1:
            self._team.send(self._next, result, lambda: self._scratch.give(block))
        elif step < 2 * num_adding - 1:
            self._team.send(self._next, result, partial(self._conclude, begin, result, block))
        else:
            self._conclude(begin, result, block)
