"""Backend over MPI: the network that a site has (InfiniBand, Slingshot, EFA), reached through mpi4py.

Collectives are MPI's non-blocking ones, so that every call keeps its deadline (`reigen.backends.mpi.progress`). They
cannot be cancelled. One that is given up may write to its memory whenever the ranks that were late come after all, so
it never is the caller's: data passes through staging memory of the backend, chunk by chunk, the next chunk on its way
while this one is copied or added up. That keeps all counts far below 2**31, too, beyond which MPI libraries differ.

Floating-point sums are taken in rank order as on one host (`reigen.kernels.reduce`): an alltoall brings every rank
its slice of all ranks' data, an allgather the sums. Beyond `ORDERED_RANKS` ranks MPI's own
reductions are used where it has them; they send fewer messages, and add in an order that MPI chooses, the same on all
ranks, but not necessarily the same for all sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reigen.backends.base import (
    Array,
    BackendCapabilities,
    FlatBackend,
    ReduceBuffer,
)
from reigen.backends.buffer_list import BufferList, rank_slice
from reigen.backends.mpi.progress import MpiProgress
from reigen.backends.null import NullBackend
from reigen.backends.shm.cross_memory import BLOCK_BYTES
from reigen.errors import CollectiveError
from reigen.kernels.reduce import BlockReducer, Reduction, ScratchArrays
from reigen.types import DType, ReduceOp

if TYPE_CHECKING:
    from mpi4py.MPI import Request

#: Bytes of a chunk, and number of chunks on their way: larger ones leave the cache, more use more memory.
CHUNK_BYTES = 1 << 20
_NUM_SLOTS = 4
#: Up to so many bytes of all ranks together, every rank gets and adds up everything: one exchange instead of two.
SMALL_BYTES = 1 << 17
#: Up to so many ranks, sums are taken in rank order. An alltoall and an allgather then take no longer than the
#: allreduce of Open MPI or MPICH, but the number of their messages grows with the square of the number of ranks.
ORDERED_RANKS = 16


class MpiBackend(FlatBackend):
    """`reigen.backends.base.Backend` over a communicator.

    ``progress`` is the communicator with its waiting; the other arguments are those of `MpiNetwork`.
    """

    name = "mpi"

    def __init__(self, progress: MpiProgress, native: bool | None, chunk_bytes: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._progress, self._native, self._chunk_bytes = progress, native, chunk_bytes
        self._communicator, self._post = progress.communicator, progress.post
        self.rank, self.size = progress.rank, progress.size
        self._ordered, self.reason = sums_in_rank_order(progress.size, native)
        self.capabilities = BackendCapabilities(registered_memory=False, ordered_sums=self._ordered, abortable=True)
        self._staging = ScratchArrays()
        self._num_splits = 0

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        """Implement `Backend.allreduce`; memory of `allocate` is ordinary memory."""
        self._progress.begin(self.ranks_missing, self.progress_hook)
        source, target = BufferList([b.source for b in buffers]), BufferList([b.target for b in buffers])
        if source.size == 0:
            return
        if self._by_mpi(reduction):
            self._reduce_by_mpi(source, target, reduction, deadline)
        elif source.size * reduction.dtype.itemsize * self.size <= SMALL_BYTES:
            self._reduce_small(source, target, reduction, deadline)
        else:
            self._reduce_in_order(source, target, reduction, deadline)

    def _by_mpi(self, reduction: Reduction) -> bool:
        return not self._ordered and can_reduce_by_mpi(reduction)[0]

    def _reduce_by_mpi(self, source: BufferList, target: BufferList, reduction: Reduction, deadline: float) -> None:
        prescaler, finisher = _scaling_reducers(reduction)
        bounds = _split_chunks(source.size, self._chunk_bytes // reduction.dtype.itemsize)
        kind, op = self._kind(reduction.dtype), self._op(reduction)

        def start(index: int) -> Request:
            begin, end = bounds[index]
            stage = self._take("send", index, end - begin, reduction.dtype)
            source.read(begin, end, stage)
            prescaler.reduce([stage], stage)
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            buffer = [stage, stage.size, kind]
            return self._post(lambda: self._communicator.Iallreduce(self._mpi.IN_PLACE, buffer, op), stage)

        def finish(index: int) -> None:
            begin, end = bounds[index]
            stage = self._take("send", index, end - begin, reduction.dtype)
            finisher.reduce([stage], stage)
            target.write(begin, stage)

        self._rounds(len(bounds), start, finish, "MPI_ALLREDUCE", deadline)

    def _reduce_small(self, source: BufferList, target: BufferList, reduction: Reduction, deadline: float) -> None:
        stage = self._take("receive", 0, source.size * self.size, reduction.dtype).reshape(self.size, -1)
        source.read(0, source.size, stage[self.rank])
        self._ended("MEMCPY_IN_FUSION_BUFFER")
        buffer = [stage, stage[0].nbytes, self._mpi.BYTE]
        request = self._post(lambda: self._communicator.Iallgather(self._mpi.IN_PLACE, buffer), stage)
        self._progress.wait(request, deadline)
        total = self._take("sum", 0, source.size, reduction.dtype)
        BlockReducer(reduction).reduce(list(stage), total)
        self._ended("MPI_ALLREDUCE")
        target.write(0, total)
        self._ended("MEMCPY_OUT_FUSION_BUFFER")

    def _reduce_in_order(self, source: BufferList, target: BufferList, reduction: Reduction, deadline: float) -> None:
        """Do alltoall, sum, allgather. While a chunk is summed the next ones are on their way, and earlier sums."""
        dtype, reducer = reduction.dtype, BlockReducer(reduction)
        bounds = _split_chunks(source.size, self._chunk_bytes // dtype.itemsize)

        def scatter(index: int) -> Request:
            begin, end = bounds[index]
            stage = self._take("send", index, end - begin, dtype)
            source.read(begin, end, stage)
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            parts = self._slices(end - begin, dtype)
            own = [parts[self.rank]] * self.size
            return self._exchange(stage, parts, self._take("receive", index, sum(own), dtype), own)

        def add(index: int) -> Request:
            begin, end = bounds[index]
            parts = self._slices(end - begin, dtype)
            own = parts[self.rank]
            received = self._take("receive", index, own * self.size, dtype).reshape(self.size, own)
            total = self._take("sum", index, end - begin, dtype)
            _reduce_blocks(reducer, list(received), total[sum(parts[: self.rank]) :][:own])
            return self._gather(total, parts)

        def collect(index: int) -> None:
            begin, end = bounds[index]
            self._progress.wait(gathering.pop(index), deadline)
            self._ended("MPI_ALLREDUCE")
            target.write(begin, self._take("sum", index, end - begin, dtype))
            self._ended("MEMCPY_OUT_FUSION_BUFFER")

        scattering = {index: scatter(index) for index in range(min(_NUM_SLOTS, len(bounds)))}
        gathering: dict[int, Request] = {}
        for index in range(len(bounds)):
            self._progress.wait(scattering.pop(index), deadline)
            gathering[index] = add(index)
            self._ended("MPI_ALLREDUCE")
            if index + _NUM_SLOTS < len(bounds):
                scattering[index + _NUM_SLOTS] = scatter(index + _NUM_SLOTS)
            if index >= _NUM_SLOTS - 1:
                collect(index - _NUM_SLOTS + 1)
        for index in sorted(gathering):
            collect(index)

    def _slices(self, count: int, dtype: DType) -> list[int]:
        """Return how many elements of a chunk each rank adds up."""
        cuts = (rank_slice(count, rank, self.size, dtype.itemsize) for rank in range(self.size))
        return [high - low for low, high in cuts]

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        self._progress.begin(self.ranks_missing, self.progress_hook)
        dtype, by_mpi = reduction.dtype, self._by_mpi(reduction)
        starts = list(itertools.accumulate(counts, initial=0))
        num_rounds = -(-sum(counts) * dtype.itemsize // self._chunk_bytes)
        prescaler, finisher = _scaling_reducers(reduction) if by_mpi else (None, None)
        reducer = BlockReducer(reduction)

        def start(index: int) -> Request:
            parts = [_chunk_part(count, index, num_rounds) for count in counts]
            sizes = [end - begin for begin, end in parts]
            stage = self._take("send", index, sum(sizes), dtype)
            _parts_of(source, starts, parts).read(0, stage.size, stage)
            if prescaler is None:
                self._ended("MEMCPY_IN_FUSION_BUFFER")
                own = [sizes[self.rank]] * self.size
                return self._exchange(stage, sizes, self._take("receive", index, sum(own), dtype), own)
            prescaler.reduce([stage], stage)
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            received = self._take("receive", index, sizes[self.rank], dtype)
            kind, op = self._kind(dtype), self._op(reduction)
            buffers = [stage, stage.size, kind], [received, received.size, kind]
            return self._post(lambda: self._communicator.Ireduce_scatter(*buffers, sizes, op), stage, received)

        def finish(index: int) -> None:
            begin, end = _chunk_part(counts[self.rank], index, num_rounds)
            if finisher is None:
                received = self._take("receive", index, (end - begin) * self.size, dtype)
                _reduce_blocks(reducer, list(received.reshape(self.size, -1)), target[begin:end])
            else:
                finisher.reduce([self._take("receive", index, end - begin, dtype)], target[begin:end])

        self._rounds(num_rounds, start, finish, "MPI_REDUCESCATTER", deadline)

    def _kind(self, dtype: DType) -> Any:
        return self._mpi.Datatype.fromcode(dtype.storage.char)

    def _op(self, reduction: Reduction) -> Any:
        mpi = self._mpi
        named = {ReduceOp.MIN: mpi.MIN, ReduceOp.MAX: mpi.MAX, ReduceOp.PRODUCT: mpi.PROD}
        return named.get(reduction.op, mpi.SUM)

    # -- collectives that move data -----------------------------------------------------------------------------------

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        self._progress.begin(self.ranks_missing, self.progress_hook)
        starts = list(itertools.accumulate(counts, initial=0))
        num_rounds = -(-sum(counts) * target.itemsize // self._chunk_bytes)

        def cut(index: int) -> tuple[Array, list[tuple[int, int]], list[int]]:
            parts = [_chunk_part(count, index, num_rounds) for count in counts]
            sizes = [end - begin for begin, end in parts]
            return self._take("send", index, sum(sizes), target.dtype), parts, sizes

        def start(index: int) -> Request:
            stage, parts, sizes = cut(index)
            begin, end = parts[self.rank]
            stage[sum(sizes[: self.rank]) :][: end - begin] = source[begin:end]
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            return self._gather(stage, sizes)

        def finish(index: int) -> None:
            stage, parts, _ = cut(index)
            _parts_of(target, starts, parts).write(0, stage)

        self._rounds(num_rounds, start, finish, "MPI_ALLGATHER", deadline)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        self._progress.begin(self.ranks_missing, self.progress_hook)
        bounds = _split_chunks(target.size, self._chunk_bytes // target.itemsize)

        def start(index: int) -> Request:
            begin, end = bounds[index]
            stage = self._take("send", index, end - begin, target.dtype)
            if source is not None:
                stage[:] = source[begin:end]
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            buffer = [stage, stage.nbytes, self._mpi.BYTE]
            return self._post(lambda: self._communicator.Ibcast(buffer, root), stage)

        def finish(index: int) -> None:
            begin, end = bounds[index]
            if target is not source:
                target[begin:end] = self._take("send", index, end - begin, target.dtype)

        self._rounds(len(bounds), start, finish, "MPI_BCAST", deadline)

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        self._progress.begin(self.ranks_missing, self.progress_hook)
        sent, received = counts[self.rank], [row[self.rank] for row in counts]
        send_starts = list(itertools.accumulate(sent, initial=0))
        receive_starts = list(itertools.accumulate(received, initial=0))
        most = max(*(sum(row) for row in counts), *(sum(column) for column in zip(*counts, strict=True)))
        num_rounds = -(-most * target.itemsize // self._chunk_bytes)

        def start(index: int) -> Request:
            parts = [_chunk_part(count, index, num_rounds) for count in sent]
            outgoing = [end - begin for begin, end in parts]
            incoming = [end - begin for begin, end in (_chunk_part(count, index, num_rounds) for count in received)]
            stage = self._take("send", index, sum(outgoing), target.dtype)
            _parts_of(source, send_starts, parts).read(0, stage.size, stage)
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            buffer = self._take("receive", index, sum(incoming), target.dtype)
            return self._exchange(stage, outgoing, buffer, incoming)

        def finish(index: int) -> None:
            parts = [_chunk_part(count, index, num_rounds) for count in received]
            stage = self._take("receive", index, sum(end - begin for begin, end in parts), target.dtype)
            _parts_of(target, receive_starts, parts).write(0, stage)

        self._rounds(num_rounds, start, finish, "MPI_ALLTOALL", deadline)

    def barrier(self, deadline: float) -> None:
        self._progress.begin(self.ranks_missing, self.progress_hook)
        self._progress.wait(self._post(self._communicator.Ibarrier), deadline)

    # -- help ---------------------------------------------------------------------------------------------------------

    def _rounds(
        self,
        count: int,
        start: Callable[[int], Request],
        finish: Callable[[int], None],
        phase: str,
        deadline: float,
    ) -> None:
        """Start every chunk, wait for it and finish it, with `_NUM_SLOTS` of them on their way."""
        requests = [start(index) for index in range(min(_NUM_SLOTS, count))]
        for index in range(count):
            self._progress.wait(requests[index % _NUM_SLOTS], deadline)
            self._ended(phase)
            finish(index)
            self._ended("MEMCPY_OUT_FUSION_BUFFER")
            if index + _NUM_SLOTS < count:
                requests[index % _NUM_SLOTS] = start(index + _NUM_SLOTS)

    def _exchange(self, stage: Array, outgoing: Sequence[int], buffer: Array, incoming: Sequence[int]) -> Request:
        """Start an alltoall; numbers of elements."""
        byte, itemsize = self._mpi.BYTE, stage.itemsize
        send = [stage, [n * itemsize for n in outgoing], byte]
        receive = [buffer, [n * itemsize for n in incoming], byte]
        return self._post(lambda: self._communicator.Ialltoallv(send, receive), stage, buffer)

    def _gather(self, stage: Array, sizes: Sequence[int]) -> Request:
        """Start an allgather in place; numbers of elements."""
        buffer = [stage, [n * stage.itemsize for n in sizes], self._mpi.BYTE]
        return self._post(lambda: self._communicator.Iallgatherv(self._mpi.IN_PLACE, buffer), stage)

    def _take(self, use: str, index: int, count: int, dtype: DType | np.dtype[Any]) -> Array:
        """Return staging memory of ``count`` elements for the ``index``-th chunk; the same again for the same chunk."""
        storage = dtype.storage if isinstance(dtype, DType) else dtype
        return self._staging.take(f"{use} {index % _NUM_SLOTS}", count * storage.itemsize, np.uint8).view(storage)

    def _ended(self, phase: str) -> None:
        if self.phase_ended is not None:
            self.phase_ended(phase)

    # -- memory, some of the ranks, ends ------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], deadline: float) -> MpiBackend | NullBackend | None:
        if len(ranks) == 1:
            return NullBackend() if self.rank in ranks else None
        self.barrier(deadline)
        self._num_splits += 1
        progress = self._progress.part(ranks, self._num_splits)
        return None if progress is None else MpiBackend(progress, self._native, self._chunk_bytes)

    def abort(self, error: CollectiveError) -> None:
        self._progress.give_up(error)

    def close(self) -> None:
        self._progress.close()
        self._staging = ScratchArrays()


def sums_in_rank_order(size: int, native: bool | None) -> tuple[bool, str]:
    """Return ``(whether floating-point sums are taken in rank order, why)`` in a backend of ``size`` ranks.

    ``native``: whether MPI's own reductions are to be used; None: undecided.
    """
    if native is not None:
        return not native, "MPI's own reductions were asked for" if native else "sums in rank order were asked for"
    if size <= ORDERED_RANKS:
        return True, f"{size} ranks, at most {ORDERED_RANKS}: sums in rank order cost nothing"
    return False, f"{size} ranks, more than {ORDERED_RANKS}: MPI's own reductions send fewer messages"


def can_reduce_by_mpi(reduction: Reduction) -> tuple[bool, str]:
    """Return ``(whether MPI computes this as Reigen's kernels would but for the order, why or why not)``."""
    dtype, op = reduction.dtype, reduction.op
    if dtype.itemsize < 4:
        # Open MPI 5.0.9 adds uint8 with saturation where the processor has AVX; MPICH 4.0.2 takes MIN of uint8 as if
        # it were signed. And no MPI sums halves in float32.
        return False, f"MPI libraries do not agree on {op.name} of {dtype.name}"
    if dtype.is_floating and op in {ReduceOp.MIN, ReduceOp.MAX}:
        return False, f"MPI does not say what {op.name} of a NaN is"
    return True, f"MPI has {op.name} of {dtype.name}"


def _scaling_reducers(reduction: Reduction) -> tuple[BlockReducer, BlockReducer]:
    """Return reducers for every rank's data before MPI adds it up, and for the result."""
    before = Reduction(reduction.dtype, ReduceOp.SUM, 1, prescale=reduction.prescale)
    after = Reduction(reduction.dtype, reduction.op, reduction.count, postscale=reduction.postscale)
    return BlockReducer(before), BlockReducer(after)


def _split_chunks(count: int, longest: int) -> list[tuple[int, int]]:
    return [(begin, min(count, begin + longest)) for begin in range(0, count, longest)]


def _chunk_part(count: int, index: int, num_rounds: int) -> tuple[int, int]:
    """Return the ``index``-th part of ``count`` elements."""
    return count * index // num_rounds, count * (index + 1) // num_rounds


def _parts_of(array: Array, starts: Sequence[int], parts: Sequence[tuple[int, int]]) -> BufferList:
    """Return the ranges ``parts`` of the blocks of an array that begin at ``starts``."""
    return BufferList([array[first + b : first + e] for first, (b, e) in zip(starts, parts, strict=False)])


def _reduce_blocks(reducer: BlockReducer, inputs: Sequence[Array], total: Array) -> None:
    """Reduce block by block, in the cache."""
    block = BLOCK_BYTES // total.itemsize
    for begin in range(0, total.size, block):
        reducer.reduce([array[begin : begin + block] for array in inputs], total[begin : begin + block])
