"""Allreduce over TCP: one class for each algorithm of `reigen.backends.tcp.algorithm`.

Each posts its first messages, with callbacks for their arrival; the event loop does the rest. Arrays may consist of
many tensors (`BufferList`). A chunk that lies within one tensor is sent from there, and received there; one that does
not is copied, to or from scratch.

Source and target may be the same memory. A rank writes a chunk of its target only when its contribution to that chunk
has left for all ranks that need it: see each class.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reigen.backends.base import Array
from reigen.backends.buffer_list import BufferList, rank_slice
from reigen.backends.tcp.algorithm import LEAST_BYTES, MOST_BYTES, ElementRange, cut_chunks, rows_ahead
from reigen.backends.tcp.event_loop import TcpEventLoop
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.types import ReduceOp

#: Number of messages from each rank that have a place before they come.
WINDOW = 3
_MOST_KEPT = 32


ChunkBlock = NDArray[np.uint8]


class ChunkPool:
    """Pool of memory blocks for one chunk each."""

    def __init__(self) -> None:
        self._free: list[ChunkBlock] = []

    def take(self) -> ChunkBlock:
        """Take a block, its content undefined."""
        return self._free.pop() if self._free else np.empty(_LARGEST_BYTES, np.uint8)

    def give(self, block: ChunkBlock) -> None:
        """Give a block back."""
        if len(self._free) < _MOST_KEPT:
            self._free.append(block)

    def clear(self) -> None:
        """Drop the blocks that are not in use."""
        self._free.clear()


#: The last chunk of a slice is up to half as long again.
_LARGEST_BYTES = MOST_BYTES + MOST_BYTES // 2


@dataclass
class TcpGroup:
    """Ranks of a backend, numbered from 0, as one of them sees it.

    Attributes:
        ranks: their numbers in the job.
        rank: this one's number in the backend.
        others: the others' numbers in the backend, from the next one on, so that not all ranks begin with the same.
    """

    loop: TcpEventLoop
    ranks: tuple[int, ...]
    rank: int
    scratch: ChunkPool = field(default_factory=ChunkPool)

    def __post_init__(self) -> None:
        size = len(self.ranks)
        self.others = tuple((self.rank + step) % size for step in range(1, size))

    def send(self, member: int, array: Array, then: Callable[[], None] | None = None) -> None:
        """Post a message of a contiguous array to a member."""
        self.loop.send(self.ranks[member], array.data, then)

    def receive(self, member: int, array: Array, then: Callable[[], None] | None = None) -> None:
        """Post a contiguous array as the place of a member's next message."""
        self.loop.receive(self.ranks[member], array.data, then)


class _ChunkedAllreduce:
    """Common part of the algorithms: chunks of a source and a target, wherever they lie."""

    def __init__(self, group: TcpGroup, source: BufferList, target: BufferList, reducer: BlockReducer) -> None:
        self._group, self._source, self._target, self._reducer = group, source, target, reducer
        self._storage = reducer.reduction.dtype.storage
        self._scratch = group.scratch
        #: for chunks that are coming, a block for each rank
        self._slots: dict[int, dict[int, ChunkBlock]] = {}

    def _slot(self, index: int, member: int, count: int) -> Array:
        """Return a buffer for a member's contribution to the chunk ``index``, until `_release`."""
        slot = self._slots.setdefault(index, {})
        if member not in slot:
            slot[member] = self._scratch.take()
        return self._typed(slot[member], count)

    def _release(self, index: int) -> None:
        """Release the contributions to a chunk."""
        for block in self._slots.pop(index, {}).values():
            self._scratch.give(block)

    def _typed(self, block: ChunkBlock, count: int) -> Array:
        assert count * self._storage.itemsize <= block.size, "a chunk fits a block"
        return block[: count * self._storage.itemsize].view(self._storage)

    def _contribution(self, begin: int, end: int, buffer: Array) -> Array:
        """Return this rank's contribution to a chunk in one piece: where it lies, or else copied to ``buffer``."""
        piece = self._source.whole(begin, end)
        if piece is not None:
            return piece
        self._source.read(begin, end, buffer)
        return buffer

    def _own_contribution(self, index: int, begin: int, end: int) -> Array:
        """Return the same; copied, if it must be, to this rank's slot for the chunk ``index``."""
        piece = self._source.whole(begin, end)
        if piece is None:
            piece = self._contribution(begin, end, self._slot(index, self._group.rank, end - begin))
        return piece

    def _reduce(self, index: int, own: Array, place: int) -> tuple[Array, ChunkBlock | None]:
        """Reduce all contributions to the chunk ``index``, in rank order, to the target's element ``place`` on."""
        size, rank = len(self._group.ranks), self._group.rank
        inputs = [own if member == rank else self._slot(index, member, own.size) for member in range(size)]
        result, block = self._result(place, place + own.size)
        self._reducer.reduce(inputs, result)
        self._release(index)
        return result, block

    def _send_contribution(self, member: int, begin: int, end: int) -> None:
        """Post it to a member. If it must be copied, it is when it is its turn."""
        piece = self._source.whole(begin, end)
        if piece is not None:
            self._group.send(member, piece)
        else:
            self._send_late(member, lambda block: self._contribution(begin, end, self._typed(block, end - begin)))

    def _send_late(self, member: int, make: Callable[[ChunkBlock], Array]) -> None:
        """Post a message that is made, perhaps in the block that is given, when it is its turn."""
        blocks: list[ChunkBlock] = []

        def place() -> memoryview:
            blocks.append(self._scratch.take())
            return make(blocks[0]).view(np.uint8).data

        self._group.loop.send(self._group.ranks[member], place, lambda: self._scratch.give(blocks.pop()))

    def _result(self, begin: int, end: int) -> tuple[Array, ChunkBlock | None]:
        """Return a buffer for a chunk of the result: where it belongs, or else in a block, and that block."""
        piece = self._target.whole(begin, end)
        if piece is not None:
            return piece, None
        block = self._scratch.take()
        return self._typed(block, end - begin), block

    def _conclude(self, begin: int, result: Array, block: ChunkBlock | None) -> None:
        """Put a result that lies in a block where it belongs, and give the block back."""
        if block is not None:
            self._target.write(begin, result)
            self._scratch.give(block)


class DirectAllreduce(_ChunkedAllreduce):
    """Direct algorithm: of every row rank r gets all contributions to chunk r, adds them up, and sends the sum to all.

    Contributions are ahead of sums by the rows of `algorithm.rows_ahead`: when this rank's chunk of a row is complete,
    contributions to the next rows leave. So the data on their way to one rank are bounded, all ranks go at the pace of
    the slowest, and no sums wait behind contributions that are not needed yet. Between two ranks messages have this
    order, on both sides: the contributions to the first rows; then by turns the sum of a row and the contributions that
    leave when it is complete.

    A chunk of the target is written when all contributions to it are here, or when its sum comes, which its rank makes
    of this rank's contribution among others.

    Args:
        group, source, reducer: the ranks, this rank's contributions, the reduction.
        target: array for the result; its first element is element ``origin`` of all.
        rows: for each row the chunk of every rank.
        origin: 0 where the target has room for everything.
        is_shared: every rank gets all sums, not only those that it makes.
    """

    def __init__(
        self,
        group: TcpGroup,
        source: BufferList,
        target: BufferList,
        reducer: BlockReducer,
        rows: Sequence[Sequence[ElementRange]],
        origin: int = 0,
        *,
        is_shared: bool = True,
    ) -> None:
        super().__init__(group, source, target, reducer)
        self._rows, self._origin, self._is_shared = rows, origin, is_shared
        self._leads = rows_ahead(rows, self._storage.itemsize)
        #: how many contributions to this rank's chunk are missing, by row; the first row that is not complete
        self._missing = [0 if begin == end else len(group.others) for begin, end in (row[group.rank] for row in rows)]
        self._current = 0
        #: by member: messages for which no place is posted, and the number of places that are posted and empty
        self._incoming = {member: deque(self._script(member)) for member in group.others}
        self._num_posted = dict.fromkeys(group.others, 0)

    def start(self) -> None:
        """Post the first messages."""
        self._contribute(0, self._leads[0])
        self._advance()

    def _script(self, member: int) -> Iterator[tuple[int, bool]]:
        """Yield a member's messages in their order: the row, and whether it is a sum."""
        for row, (begin, end) in enumerate(itertools.pairwise((0, *self._leads)), start=-1):
            if self._is_shared and row >= 0 and _is_nonempty(self._rows[row][member]):
                yield row, True
            for other in range(begin, end):
                if _is_nonempty(self._rows[other][self._group.rank]):
                    yield other, False

    def _contribute(self, begin: int, end: int) -> None:
        """Post the contributions to some rows."""
        for row in range(begin, end):
            for member in self._group.others:
                if _is_nonempty(self._rows[row][member]):
                    self._send_contribution(member, *self._rows[row][member])

    def _expect(self, member: int) -> None:
        """Post the places of a member's next messages, as far as there is room."""
        incoming = self._incoming[member]
        while incoming and self._num_posted[member] < WINDOW:
            row, is_sum = incoming[0]
            if is_sum:
                begin, end = self._rows[row][member]
                place, block = self._result(begin, end)
                then = partial(self._sum_arrived, member, begin, place, block)
            elif row < self._leads[self._current + 1]:
                begin, end = self._rows[row][self._group.rank]
                place = self._slot(row, member, end - begin)
                then = partial(self._contribution_arrived, member, row)
            else:
                return
            self._group.receive(member, place, then)
            incoming.popleft()
            self._num_posted[member] += 1

    def _sum_arrived(self, member: int, begin: int, place: Array, block: ChunkBlock | None) -> None:
        self._conclude(begin, place, block)
        self._num_posted[member] -= 1
        self._expect(member)

    def _contribution_arrived(self, member: int, row: int) -> None:
        self._num_posted[member] -= 1
        self._missing[row] -= 1
        if row == self._current and not self._missing[row]:
            self._advance()
        else:
            self._expect(member)

    def _advance(self) -> None:
        """Advance to the first row in which contributions to this rank's chunk are missing."""
        while self._current < len(self._rows) and not self._missing[self._current]:
            if _is_nonempty(self._rows[self._current][self._group.rank]):
                self._complete(self._current)
            self._contribute(self._leads[self._current], self._leads[self._current + 1])
            self._current += 1
        for member in self._group.others:
            self._expect(member)

    def _complete(self, row: int) -> None:
        begin, end = self._rows[row][self._group.rank]
        total, block = self._reduce(row, self._own_contribution(row, begin, end), begin - self._origin)
        if self._is_shared:
            self._hand_out(begin, total, block)
        else:
            self._conclude(begin - self._origin, total, block)

    def _hand_out(self, begin: int, total: Array, block: ChunkBlock | None) -> None:
        left = len(self._group.others)

        def sent() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._conclude(begin, total, block)

        for member in self._group.others:
            self._group.send(member, total, None if block is None else sent)


def _is_nonempty(span: ElementRange) -> bool:
    return span[0] < span[1]


class LatencyAllreduce(_ChunkedAllreduce):
    """Latency algorithm: every rank sends all of its array to all others, and adds up everything.

    A chunk of the target is written when all contributions to it are here and this rank's own has left for all others.
    """

    def __init__(self, group: TcpGroup, source: BufferList, target: BufferList, reducer: BlockReducer) -> None:
        super().__init__(group, source, target, reducer)
        self._chunks = cut_chunks(0, source.size, self._storage.itemsize, least_bytes=4 * LEAST_BYTES, divisor=2)
        #: how many messages have not left or arrived, by chunk; the first chunk that is not complete
        self._missing = [2 * len(group.others)] * len(self._chunks)
        self._current = 0
        self._own: dict[int, Array] = {}

    def start(self) -> None:
        """Post the first messages."""
        for index in range(min(WINDOW, len(self._chunks))):
            self._post(index)

    def _post(self, index: int) -> None:
        begin, end = self._chunks[index]
        own = self._own[index] = self._own_contribution(index, begin, end)
        for member in self._group.others:
            self._group.send(member, own, partial(self._moved, index))
            self._group.receive(member, self._slot(index, member, end - begin), partial(self._moved, index))

    def _moved(self, index: int) -> None:
        self._missing[index] -= 1
        while self._current < len(self._chunks) and not self._missing[self._current]:
            self._complete(self._current)
            if self._current + WINDOW < len(self._chunks):
                self._post(self._current + WINDOW)
            self._current += 1

    def _complete(self, index: int) -> None:
        begin, _ = self._chunks[index]
        self._conclude(begin, *self._reduce(index, self._own.pop(index), begin))


class RingAllreduce(_ChunkedAllreduce):
    """Ring algorithm: partial sums of slices go around and become sums, sums go around until all ranks have them.

    In step k rank r sends slice r - k to rank r + 1 and receives slice r - k - 1 from rank r - 1. In steps 0 to n - 2
    it adds its contribution to the data received; the sum is sent in the next step. Chunks of one step and of
    the next are on their way at the same time.

    Partial sums lie in the target: its own contribution to a slice a rank needs once, when it makes them, and the sums,
    which replace them, come when they have been around.
    """

    def __init__(self, group: TcpGroup, source: BufferList, target: BufferList, reducer: BlockReducer) -> None:
        super().__init__(group, source, target, reducer)
        size, itemsize, reduction = len(group.ranks), self._storage.itemsize, reducer.reduction
        slices = [rank_slice(source.size, rank, size, itemsize) for rank in range(size)]
        self._chunks = [cut_chunks(*part, itemsize) for part in slices]
        self._next, self._previous = group.others[0], group.others[-1]
        combining = ReduceOp.SUM if reduction.op is ReduceOp.AVERAGE else reduction.op
        self._scaling: BlockReducer | None = None
        if reduction.prescale != 1.0:
            self._scaling = BlockReducer(Reduction(reduction.dtype, combining, 1, prescale=reduction.prescale))
        self._combining = BlockReducer(Reduction(reduction.dtype, combining, 1))
        self._ending = BlockReducer(
            Reduction(reduction.dtype, reduction.op, reduction.count, postscale=reduction.postscale)
        )
        steps = range(2 * (size - 1))
        #: what comes: step, from and to which element
        self._chunk_steps = [(step, *chunk) for step in steps for chunk in self._chunks[(group.rank - step - 1) % size]]

    def start(self) -> None:
        """Post the first messages."""
        for begin, end in self._chunks[self._group.rank]:
            if self._scaling is None:
                self._send_contribution(self._next, begin, end)
            else:
                self._send_late(self._next, partial(self._scaled, begin, end))
        for index in range(min(WINDOW, len(self._chunk_steps))):
            self._expect(index)

    def _scaled(self, begin: int, end: int, block: ChunkBlock) -> Array:
        """Return this rank's contribution to a chunk, as it is combined with those of others."""
        own = self._contribution(begin, end, self._typed(block, end - begin))
        if self._scaling is None:
            return own
        scaled = self._typed(block, end - begin)
        self._scaling.reduce([own], scaled)
        return scaled

    def _expect(self, index: int) -> None:
        step, begin, end = self._chunk_steps[index]
        if step < len(self._group.others):
            partial_sum = self._slot(index, self._previous, end - begin)
            self._group.receive(self._previous, partial_sum, partial(self._add, index, partial_sum))
        else:
            result, block = self._result(begin, end)
            self._group.receive(self._previous, result, partial(self._pass_on, index, result, block))

    def _add(self, index: int, partial_sum: Array) -> None:
        step, begin, end = self._chunk_steps[index]
        scratch = self._scratch.take()
        own = self._scaled(begin, end, scratch)
        result, block = self._result(begin, end)
        is_last = step == len(self._group.others) - 1
        (self._ending if is_last else self._combining).reduce([partial_sum, own], result)
        self._scratch.give(scratch)
        self._release(index)
        self._pass_on(index, result, block)

    def _pass_on(self, index: int, result: Array, block: ChunkBlock | None) -> None:
        """Send received data on; sums, and those partial sums that lie in the target, stay there."""
        step, begin, _ = self._chunk_steps[index]
        if index + WINDOW < len(self._chunk_steps):
            self._expect(index + WINDOW)
        num_adding = len(self._group.others)
        if block is not None and step < num_adding - 1:
            self._group.send(self._next, result, lambda: self._scratch.give(block))
        elif step < 2 * num_adding - 1:
            self._group.send(self._next, result, partial(self._conclude, begin, result, block))
        else:
            self._conclude(begin, result, block)
