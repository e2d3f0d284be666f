"""Operations between hosts, in cross groups: the network steps of `reigen.backends.hierarchical.backend`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from reigen.backends.base import Array, Backend, ReduceBuffer
from reigen.backends.buffer_list import BufferList, rank_slice, zip_pieces
from reigen.backends.hierarchical.cross_groups import SMALL_BYTES, CrossGroups, TwoStageReduction
from reigen.backends.hierarchical.intra_host import EMPTY_BUFFERS, Combine, IntraHost, ReadRequest
from reigen.kernels.reduce import BlockReducer

#: How much longer than the deadline each of the steps b and c waits.
GRACE_SECONDS = 1.0


class InterHost:
    """One rank's part in them.

    Args:
        lanes: who is where.
        rank: this rank, numbered as there.
        local: the ranks of this machine.
        chunk_bytes: how much scratch this rank may use for what cannot be done in the caller's arrays.
    """

    def __init__(self, lanes: CrossGroups, rank: int, local: IntraHost, chunk_bytes: int) -> None:
        self._lanes, self._rank, self._local, self._chunk_bytes = lanes, rank, local, chunk_bytes
        self._machine = lanes.host_of(rank)
        #: the ranks of this machine
        self._own = lanes.machines[self._machine]
        #: this rank's lane, if it has one
        self.index = lanes.group_of(rank)
        #: by lane, whose it is on this machine, numbered as in the local backend
        self._carriers = [self._own.index(lane[self._machine]) for lane in lanes.lanes]
        #: the backend of the lane, once it has been joined
        self.lane: Backend | None = None

    def learn(self, deadline: float) -> tuple[bool, bool]:
        """Whether the lanes add in order, and whether they are abortable: who has a lane tells who has none."""
        told = np.zeros(2, bool)
        if self.lane is not None:
            told[:] = self.lane.capabilities.ordered_sums, self.lane.capabilities.abortable
        shown = BufferList([told]) if self.index == 0 else EMPTY_BUFFERS
        nobody = len(self._carriers) - 1
        self._spread(
            [2] + [0] * nobody, shown, [ReadRequest(0, BufferList([told]))] + [None] * nobody, told.dtype, deadline
        )
        return bool(told[0]), bool(told[1])

    def owned(self, copies: Sequence[Array]) -> tuple[Array, ...]:
        """Of an array of each rank of this machine, those of the ranks that own slices: who has a lane, by lane."""
        return tuple(copies[rank] for rank in self._carriers)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce_registered(self, copies: Sequence[BufferList], stages: TwoStageReduction, deadline: float) -> None:
        """Reduce where it lies. ``copies``: of each rank of this machine."""
        bounds = self._slice(copies[0].size, stages.whole.dtype.itemsize)
        self._reduce_registered(copies, bounds, stages, deadline, keep=False)

    def _reduce_registered(
        self,
        copies: Sequence[BufferList],
        bounds: tuple[int, int],
        stages: TwoStageReduction,
        deadline: float,
        *,
        keep: bool,
    ) -> None:
        """Reduce this rank's slice of all copies, here and between machines; ``keep``: into its own copy alone."""
        storage, combine = stages.whole.dtype.storage, _combine_function(stages)
        low, high = bounds
        step = self._chunk_bytes // storage.itemsize if stages.wide else high - low
        for begin in range(low, high, max(1, step)):
            here = [copy.cut(begin, min(high, begin + step)) for copy in copies]
            own = here[self._local.rank]
            partial = _scratch(own.size, stages) if stages.wide else own
            self._local.reduce_copies(here, partial, combine, storage)
            self._local.ended("SHM_REDUCE")
            result = self._between(partial, stages, deadline + GRACE_SECONDS)
            for copy in [own] if keep else here:
                if copy is not result:
                    _copy(result, copy)
            self._local.ended("MEMCPY_OUT_FUSION_BUFFER")
        self._local.backend.barrier(deadline + 2 * GRACE_SECONDS)

    def reduce_to_owners(
        self, copies: Sequence[BufferList], counts: Sequence[int], stages: TwoStageReduction, deadline: float
    ) -> None:
        """See `Backend.reduce_to_owners`: `allreduce_registered` without its last step. ``counts``: by lane."""
        low = 0 if self.index is None else sum(counts[: self.index])
        high = low if self.index is None else low + counts[self.index]
        self._reduce_registered(copies, (low, high), stages, deadline, keep=True)

    def allreduce(self, source: BufferList, target: BufferList, stages: TwoStageReduction, deadline: float) -> None:
        """See `Backend.allreduce`. A lane's local sums come to be where its results will be: in its rank's target."""
        storage, combine = stages.whole.dtype.storage, _combine_function(stages)
        slices = self._lanes.slices(source.size, storage.itemsize)
        longest = max(high - low for low, high in slices)
        step = self._chunk_bytes // storage.itemsize if stages.wide else longest
        for begin in range(0, longest, max(1, step)):
            spans = [(min(high, low + begin), min(high, low + begin + step)) for low, high in slices]
            results = [target.cut(*span) for span in spans]
            shown = EMPTY_BUFFERS
            own = EMPTY_BUFFERS if self.index is None else results[self.index]
            partial = _scratch(own.size, stages) if stages.wide else own
            self._gather([source.cut(*span) for span in spans], partial, combine, storage, deadline)
            if own.size:
                shown = self._between(partial, stages, deadline + GRACE_SECONDS)
                if shown is not own:
                    _copy(shown, own)
            wanted = [None if result is own else ReadRequest(0, result) for result in results]
            sizes = [high - low for low, high in spans]
            self._spread(sizes, shown, wanted, storage, deadline + 2 * GRACE_SECONDS)

    def _between(self, partial: BufferList, stages: TwoStageReduction, deadline: float) -> BufferList:
        """This machine's partial results, or a part of them, become the results, in place or elsewhere."""
        lane = self._carrying()
        if not stages.wide:
            pieces = [piece for _, piece in partial.pieces(0, partial.size)]
            lane.allreduce([ReduceBuffer(piece, piece) for piece in pieces], stages.network, deadline)
            return partial
        [(_, total)] = partial.pieces(0, partial.size)
        whole, result = BlockReducer(stages.whole), np.empty(total.size, stages.whole.dtype.storage)
        if total.nbytes <= SMALL_BYTES:
            lane.allreduce([ReduceBuffer(total, total)], stages.network, deadline)
            whole.finish(total, result)
            return BufferList([result])
        bounds = [rank_slice(total.size, rank, lane.size, total.itemsize) for rank in range(lane.size)]
        counts = [high - low for low, high in bounds]
        mine = np.empty(counts[lane.rank], total.dtype)
        lane.reduce_scatter(total, counts, mine, stages.network, deadline)
        rounded = np.empty(mine.size, result.dtype)
        whole.finish(mine, rounded)
        lane.allgather(rounded, counts, result, deadline)
        return BufferList([result])

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, stages: TwoStageReduction, deadline: float
    ) -> None:
        """See `Backend.reduce_scatter`. Every lane carries a part of what each machine gets."""
        combine, storage = _combine_function(stages), stages.whole.dtype.storage
        blocks = self._blocks(source, counts)
        before = sum(counts[rank] for rank in self._own if rank < self._rank)  # in this machine's block
        step = max(1, self._chunk_bytes // storage.itemsize // len(blocks))
        for begin in range(0, max(block.size for block in blocks), step):
            chunks = [block.cut(min(block.size, begin), min(block.size, begin + step)) for block in blocks]
            slices = [self._lanes.slices(chunk.size, storage.itemsize) for chunk in chunks]
            sizes = [high - low for low, high in slices[self._machine]]
            shown = self._scatter(chunks, slices, combine, stages, deadline)
            wanted: list[ReadRequest | None] = []
            for low, high in slices[self._machine]:
                first, last = max(begin + low, before), min(begin + high, before + target.size)
                into = target[first - before : last - before] if first < last else target[:0]
                wanted.append(ReadRequest(first - begin - low, BufferList([into])))
            self._spread(sizes, shown, wanted, storage, deadline + 2 * GRACE_SECONDS)

    def _scatter(
        self,
        chunks: Sequence[BufferList],
        slices: Sequence[Sequence[tuple[int, int]]],
        combine: Combine,
        stages: TwoStageReduction,
        deadline: float,
    ) -> BufferList:
        """Steps a and b for what each machine gets; this lane's slice of what this machine gets, if it has one."""
        storage = stages.whole.dtype.storage
        parts = [
            _concatenate([chunk.cut(*bounds[lane]) for chunk, bounds in zip(chunks, slices, strict=True)])
            for lane in range(len(self._carriers))
        ]
        own = EMPTY_BUFFERS if self.index is None else parts[self.index]
        partial = _scratch(own.size, stages)
        self._gather(parts, partial, combine, storage, deadline, followed=chunks[self._machine].size > 0)
        if self.index is None or not own.size:
            return EMPTY_BUFFERS
        counts = [bounds[self.index][1] - bounds[self.index][0] for bounds in slices]
        [(_, total)] = partial.pieces(0, partial.size)
        mine = np.empty(counts[self._machine], total.dtype)
        self._carrying().reduce_scatter(total, counts, mine, stages.network, deadline + GRACE_SECONDS)
        if not stages.wide:
            return BufferList([mine])
        rounded = np.empty(mine.size, storage)
        BlockReducer(stages.whole).finish(mine, rounded)
        return BufferList([rounded])

    # -- other collectives --------------------------------------------------------------------------------------------

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """See `Backend.allgather`. Every lane carries a part of what each machine has."""
        blocks = self._blocks(target, counts)
        here = [counts[rank] for rank in self._own]
        ends = itertools.accumulate(here)
        own = blocks[self._machine]
        wanted = [ReadRequest(0, own.cut(end - count, end)) for count, end in zip(here, ends, strict=True)]
        step = max(1, self._chunk_bytes // target.itemsize // len(blocks))
        self._local.share(BufferList([source]), here, wanted, target.dtype, deadline)
        for begin in range(0, max(block.size for block in blocks), step):
            chunks = [block.cut(min(block.size, begin), min(block.size, begin + step)) for block in blocks]
            self._exchange_chunks(chunks, target.dtype, deadline)

    def _exchange_chunks(self, chunks: Sequence[BufferList], storage: np.dtype[np.generic], deadline: float) -> None:
        """Each machine has its chunk; all get all of them."""
        slices = [self._lanes.slices(chunk.size, storage.itemsize) for chunk in chunks]
        shown = EMPTY_BUFFERS
        if self.index is not None:
            bounds = [of_machine[self.index] for of_machine in slices]
            counts = [high - low for low, high in bounds]
            if any(counts):
                sent, received = np.empty(counts[self._machine], storage), np.empty(sum(counts), storage)
                chunks[self._machine].read(*bounds[self._machine], sent)
                self._carrying().allgather(sent, counts, received, deadline + GRACE_SECONDS)
                first = sum(counts[: self._machine])
                shown = BufferList([received[:first], received[first + sent.size :]])
        others = [index for index in range(len(chunks)) if index != self._machine]
        pieces = [
            _concatenate([chunks[i].cut(*slices[i][lane]) for i in others]) for lane in range(len(self._carriers))
        ]
        sizes = [piece.size for piece in pieces]
        wanted = [ReadRequest(0, piece) for piece in pieces]
        self._spread(sizes, shown, wanted, storage, deadline + 2 * GRACE_SECONDS)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """See `Backend.broadcast`. Every lane carries a part, from the root's machine to all others."""
        start = self._lanes.host_of(root)
        slices = self._lanes.slices(target.size, target.itemsize)
        pieces = [target[low:high] for low, high in slices]
        if source is not None and source is not target:
            target[:] = source
        if start == self._machine:
            sizes = [target.size if rank == root else 0 for rank in self._own]
            wanted = [
                ReadRequest(0, BufferList([target])) if n and rank != self._rank else None
                for rank, n in zip(self._own, sizes, strict=True)
            ]
            shown = EMPTY_BUFFERS if source is None else BufferList([target])
            self._local.share(shown, sizes, wanted, target.dtype, deadline)
        mine = None if self.index is None else pieces[self.index]
        if mine is not None and mine.size:
            sent = mine if start == self._machine else None
            self._carrying().broadcast(sent, mine, start, deadline + GRACE_SECONDS)
        if start != self._machine:
            shown = EMPTY_BUFFERS if mine is None else BufferList([mine])
            others = [None if piece is mine else ReadRequest(0, BufferList([piece])) for piece in pieces]
            sizes = [piece.size for piece in pieces]
            self._spread(sizes, shown, others, target.dtype, deadline + 2 * GRACE_SECONDS)

    def barrier(self, deadline: float) -> None:
        """See `Backend.barrier`."""
        self._local.arrive(deadline, waits=self.index == 0)
        if self.index == 0:
            self._carrying().barrier(deadline + GRACE_SECONDS)
        self._local.backend.barrier(deadline + 2 * GRACE_SECONDS)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _carrying(self) -> Backend:
        assert self.lane is not None, "only who has a lane has a slice"
        return self.lane

    def _slice(self, count: int, itemsize: int) -> tuple[int, int]:
        """What this rank carries of ``count`` elements."""
        return (0, 0) if self.index is None else self._lanes.slices(count, itemsize)[self.index]

    def _blocks(self, array: Array, counts: Sequence[int]) -> list[BufferList]:
        """The parts of an array, one for each rank, by machine."""
        ends = list(itertools.accumulate(counts))
        parts = [array[end - count : end] for count, end in zip(counts, ends, strict=True)]
        return [BufferList([parts[rank] for rank in machine]) for machine in self._lanes.machines]

    def _gather(
        self,
        parts: Sequence[BufferList],
        out: BufferList,
        combine: Combine,
        storage: np.dtype[np.generic],
        deadline: float,
        *,
        followed: bool = True,
    ) -> None:
        """Step a of a reduction: ``parts`` by lane; see `IntraHost.reduce`."""
        by_rank = [EMPTY_BUFFERS] * self._local.size
        for carrier, part in zip(self._carriers, parts, strict=True):
            by_rank[carrier] = part
        self._local.reduce(by_rank, out, combine, storage, deadline, followed=followed)

    def _spread(
        self,
        sizes: Sequence[int],
        shown: BufferList,
        wanted: Sequence[ReadRequest | None],
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        """Step c: ``sizes`` and ``wanted`` by lane."""
        sizes_by_rank = [0] * self._local.size
        wanted_by_rank: list[ReadRequest | None] = [None] * self._local.size
        for carrier, size, part in zip(self._carriers, sizes, wanted, strict=True):
            sizes_by_rank[carrier], wanted_by_rank[carrier] = size, part
        self._local.share(shown, sizes_by_rank, wanted_by_rank, storage, deadline)


def _combine_function(stages: TwoStageReduction) -> Combine:
    reducer = BlockReducer(stages.local)
    return reducer.combine if stages.wide else reducer.reduce


def _scratch(count: int, stages: TwoStageReduction) -> BufferList:
    """Room for partial results."""
    return BufferList([np.empty(count, np.dtype(np.float32) if stages.wide else stages.whole.dtype.storage)])


def _copy(source: BufferList, target: BufferList) -> None:
    for _, (piece, place) in zip_pieces([source, target], 0, target.size):
        place[:] = piece


def _concatenate(parts: Sequence[BufferList]) -> BufferList:
    return BufferList([piece for part in parts for _, piece in part.pieces(0, part.size)])
