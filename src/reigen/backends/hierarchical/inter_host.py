"""Operations between hosts, in cross groups: the network steps of `reigen.backends.hierarchical.backend`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from reigen.backends.base import Array, Backend, ReduceBuffer
from reigen.backends.buffer_list import BufferList, rank_slice, split_array, zip_pieces
from reigen.backends.hierarchical.cross_groups import SMALL_BYTES, CrossGroups, TwoStageReduction, two_stage_reduction
from reigen.backends.hierarchical.intra_host import EMPTY_BUFFERS, Combine, IntraHost, ReadRequest
from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import BlockReducer, Reduction

#: Seconds beyond the deadline that each of the steps b and c waits.
GRACE_SECONDS = 1.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


def reports_failures(operation: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Decorate an operation of a backend: its failures are reported to other hosts, which cannot see them."""

    @functools.wraps(operation)
    def reporting(backend: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return operation(backend, *args, **kwargs)
        except SharedMemoryError:
            raise  # all know it, and nothing is broken
        except CollectiveError as error:
            backend.abort(error)
            raise

    return reporting


class InterHost:
    """Network steps of a `HierarchicalBackend`, its base class: operations in the cross groups, one rank of each host.

    ``rank`` is numbered as in ``cross``; ``chunk_bytes`` limits the scratch for operations that cannot be done in the
    caller's arrays.
    """

    def __init__(self, cross: CrossGroups, rank: int, local: IntraHost, chunk_bytes: int) -> None:
        self.rank, self.size = rank, cross.size
        self._cross, self._local, self._chunk_bytes = cross, local, chunk_bytes
        self._host = cross.host_of(rank)
        #: the ranks of this host
        self._own = cross.hosts[self._host]
        #: index of this rank's cross group, if it has one
        self._index = cross.group_of(rank)
        #: by cross group, its rank on this host, numbered as in the local backend
        self._members = [self._own.index(ranks[self._host]) for ranks in cross.groups]
        #: the backend of the cross group, once it has been joined
        self._group: Backend | None = None

    def _learn(self, deadline: float) -> tuple[bool, bool]:
        """Learn whether the network adds in order and is abortable; ranks of a cross group tell the others."""
        answers = np.zeros(2, bool)
        if self._group is not None:
            answers[:] = self._group.capabilities.ordered_sums, self._group.capabilities.abortable
        shared = BufferList([answers]) if self._index == 0 else EMPTY_BUFFERS
        rest = len(self._members) - 1
        requests = [ReadRequest(0, BufferList([answers]))] + [None] * rest
        self._spread([2] + [0] * rest, shared, requests, answers.dtype, deadline)
        return bool(answers[0]), bool(answers[1])

    def _owned(self, copies: Sequence[Array]) -> tuple[Array, ...]:
        """Return the arrays of the ranks that own slices, by cross group, of an array of each rank of this host."""
        return tuple(copies[rank] for rank in self._members)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _reduce_registered(
        self, copies: Sequence[BufferList], counts: Sequence[int] | None, stages: TwoStageReduction, deadline: float
    ) -> None:
        """Reduce where it lies. ``copies``: of each rank of this host; ``counts``: of `Backend.reduce_to_owners`."""
        storage, combine = stages.full.dtype.storage, _combine_function(stages)
        low = high = 0
        if self._index is not None and counts is not None:
            low = sum(counts[: self._index])
            high = low + counts[self._index]
        elif self._index is not None:
            low, high = self._cross.slices(copies[0].size, storage.itemsize)[self._index]
        step = self._chunk_bytes // storage.itemsize if stages.wide else high - low
        for begin in range(low, high, max(1, step)):
            pieces = [copy.cut(begin, min(high, begin + step)) for copy in copies]
            own = pieces[self._local.rank]
            partial = _scratch(own.size, stages) if stages.wide else own
            self._local.reduce_copies(pieces, partial, combine, storage)
            self._local.ended("SHM_REDUCE")
            result = self._between(partial, stages, deadline + GRACE_SECONDS)
            for copy in pieces if counts is None else [own]:
                if copy is not result:
                    _copy(result, copy)
            self._local.ended("MEMCPY_OUT_FUSION_BUFFER")
        self._local.backend.barrier(deadline + 2 * GRACE_SECONDS)

    def _allreduce(self, source: BufferList, target: BufferList, stages: TwoStageReduction, deadline: float) -> None:
        """Implement `Backend.allreduce`. A cross group's local sums go to its results' place, its rank's target."""
        storage, combine = stages.full.dtype.storage, _combine_function(stages)
        slices = self._cross.slices(source.size, storage.itemsize)
        longest = max(high - low for low, high in slices)
        step = self._chunk_bytes // storage.itemsize if stages.wide else longest
        for begin in range(0, longest, max(1, step)):
            spans = [(min(high, low + begin), min(high, low + begin + step)) for low, high in slices]
            results = [target.cut(*span) for span in spans]
            shared = EMPTY_BUFFERS
            own = EMPTY_BUFFERS if self._index is None else results[self._index]
            partial = _scratch(own.size, stages) if stages.wide else own
            self._gather([source.cut(*span) for span in spans], partial, combine, storage, deadline)
            if own.size:
                shared = self._between(partial, stages, deadline + GRACE_SECONDS)
                if shared is not own:
                    _copy(shared, own)
            requests = [None if result is own else ReadRequest(0, result) for result in results]
            sizes = [high - low for low, high in spans]
            self._spread(sizes, shared, requests, storage, deadline + 2 * GRACE_SECONDS)

    def _between(self, partial: BufferList, stages: TwoStageReduction, deadline: float) -> BufferList:
        """Reduce this host's partial results, or a part of them, to the results, in place or elsewhere."""
        group = self._cross_backend()
        if not stages.wide:
            pieces = [piece for _, piece in partial.pieces(0, partial.size)]
            group.allreduce([ReduceBuffer(piece, piece) for piece in pieces], stages.network, deadline)
            return partial
        [(_, total)] = partial.pieces(0, partial.size)
        full, result = BlockReducer(stages.full), np.empty(total.size, stages.full.dtype.storage)
        if total.nbytes <= SMALL_BYTES:
            group.allreduce([ReduceBuffer(total, total)], stages.network, deadline)
            full.finish(total, result)
            return BufferList([result])
        bounds = [rank_slice(total.size, rank, group.size, total.itemsize) for rank in range(group.size)]
        counts = [high - low for low, high in bounds]
        own = np.empty(counts[group.rank], total.dtype)
        group.reduce_scatter(total, counts, own, stages.network, deadline)
        rounded = np.empty(own.size, result.dtype)
        full.finish(own, rounded)
        group.allgather(rounded, counts, result, deadline)
        return BufferList([result])

    @reports_failures
    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """Implement `Backend.reduce_scatter`. Every cross group carries a part of each host's result."""
        stages, storage = two_stage_reduction(reduction), reduction.dtype.storage
        combine = _combine_function(stages)
        blocks = self._blocks(source, counts)
        before = sum(counts[rank] for rank in self._own if rank < self.rank)  # in this host's block
        step = max(1, self._chunk_bytes // storage.itemsize // len(blocks))
        for begin in range(0, max(block.size for block in blocks), step):
            chunks = [block.cut(min(block.size, begin), min(block.size, begin + step)) for block in blocks]
            slices = [self._cross.slices(chunk.size, storage.itemsize) for chunk in chunks]
            sizes = [high - low for low, high in slices[self._host]]
            shared = self._scatter(chunks, slices, combine, stages, deadline)
            requests: list[ReadRequest | None] = []
            for low, high in slices[self._host]:
                first, last = max(begin + low, before), min(begin + high, before + target.size)
                into = target[first - before : last - before] if first < last else target[:0]
                requests.append(ReadRequest(first - begin - low, BufferList([into])))
            self._spread(sizes, shared, requests, storage, deadline + 2 * GRACE_SECONDS)

    def _scatter(
        self,
        chunks: Sequence[BufferList],
        slices: Sequence[Sequence[tuple[int, int]]],
        combine: Combine,
        stages: TwoStageReduction,
        deadline: float,
    ) -> BufferList:
        """Do steps a and b for each host's part; return this cross group's slice of this host's part, if it has one."""
        storage = stages.full.dtype.storage
        parts = [
            _concatenate([chunk.cut(*bounds[index]) for chunk, bounds in zip(chunks, slices, strict=True)])
            for index in range(len(self._members))
        ]
        own = EMPTY_BUFFERS if self._index is None else parts[self._index]
        partial = _scratch(own.size, stages)
        self._gather(parts, partial, combine, storage, deadline, followed=chunks[self._host].size > 0)
        if self._index is None or not own.size:
            return EMPTY_BUFFERS
        counts = [bounds[self._index][1] - bounds[self._index][0] for bounds in slices]
        [(_, total)] = partial.pieces(0, partial.size)
        result = np.empty(counts[self._host], total.dtype)
        self._cross_backend().reduce_scatter(total, counts, result, stages.network, deadline + GRACE_SECONDS)
        if not stages.wide:
            return BufferList([result])
        rounded = np.empty(result.size, storage)
        BlockReducer(stages.full).finish(result, rounded)
        return BufferList([rounded])

    # -- other collectives --------------------------------------------------------------------------------------------

    @reports_failures
    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """Implement `Backend.allgather`. Every cross group carries a part of each host's data."""
        blocks = self._blocks(target, counts)
        sizes = [counts[rank] for rank in self._own]
        parts = split_array(target, counts)
        requests = [ReadRequest(0, BufferList([parts[rank]])) for rank in self._own]
        step = max(1, self._chunk_bytes // target.itemsize // len(blocks))
        self._local.share(BufferList([source]), sizes, requests, target.dtype, deadline)
        for begin in range(0, max(block.size for block in blocks), step):
            chunks = [block.cut(min(block.size, begin), min(block.size, begin + step)) for block in blocks]
            self._exchange_chunks(chunks, target.dtype, deadline)

    def _exchange_chunks(self, chunks: Sequence[BufferList], storage: np.dtype[np.generic], deadline: float) -> None:
        """Exchange the hosts' chunks: all get all of them."""
        slices = [self._cross.slices(chunk.size, storage.itemsize) for chunk in chunks]
        shared = EMPTY_BUFFERS
        if self._index is not None:
            bounds = [of_host[self._index] for of_host in slices]
            counts = [high - low for low, high in bounds]
            if any(counts):
                sent, received = np.empty(counts[self._host], storage), np.empty(sum(counts), storage)
                chunks[self._host].read(*bounds[self._host], sent)
                self._cross_backend().allgather(sent, counts, received, deadline + GRACE_SECONDS)
                first = sum(counts[: self._host])
                shared = BufferList([received[:first], received[first + sent.size :]])
        remote = [index for index in range(len(chunks)) if index != self._host]
        pieces = [
            _concatenate([chunks[i].cut(*slices[i][index]) for i in remote]) for index in range(len(self._members))
        ]
        sizes = [piece.size for piece in pieces]
        requests = [ReadRequest(0, piece) for piece in pieces]
        self._spread(sizes, shared, requests, storage, deadline + 2 * GRACE_SECONDS)

    @reports_failures
    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """Implement `Backend.broadcast`. Every cross group carries a part, from the root's host to all others."""
        start = self._cross.host_of(root)
        slices = self._cross.slices(target.size, target.itemsize)
        pieces = [target[low:high] for low, high in slices]
        if source is not None and source is not target:
            target[:] = source
        if start == self._host:
            sizes = [target.size if rank == root else 0 for rank in self._own]
            requests = [
                ReadRequest(0, BufferList([target])) if n and rank != self.rank else None
                for rank, n in zip(self._own, sizes, strict=True)
            ]
            shared = EMPTY_BUFFERS if source is None else BufferList([target])
            self._local.share(shared, sizes, requests, target.dtype, deadline)
        own_slice = None if self._index is None else pieces[self._index]
        if own_slice is not None and own_slice.size:
            sent = own_slice if start == self._host else None
            self._cross_backend().broadcast(sent, own_slice, start, deadline + GRACE_SECONDS)
        if start != self._host:
            shared = EMPTY_BUFFERS if own_slice is None else BufferList([own_slice])
            remote_requests = [None if piece is own_slice else ReadRequest(0, BufferList([piece])) for piece in pieces]
            sizes = [piece.size for piece in pieces]
            self._spread(sizes, shared, remote_requests, target.dtype, deadline + 2 * GRACE_SECONDS)

    @reports_failures
    def barrier(self, deadline: float) -> None:
        self._local.arrive(deadline, waits=self._index == 0)
        if self._index == 0:
            self._cross_backend().barrier(deadline + GRACE_SECONDS)
        self._local.backend.barrier(deadline + 2 * GRACE_SECONDS)

    # -- cross groups -------------------------------------------------------------------------------------------------

    def _cross_backend(self) -> Backend:
        assert self._group is not None, "only ranks of a cross group have a slice"
        return self._group

    def _blocks(self, array: Array, counts: Sequence[int]) -> list[BufferList]:
        """Return the parts of an array, one for each rank, by host."""
        parts = split_array(array, counts)
        return [BufferList([parts[rank] for rank in host]) for host in self._cross.hosts]

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
        """Do step a of a reduction: ``parts`` by cross group; see `IntraHost.reduce`."""
        by_rank = [EMPTY_BUFFERS] * self._local.size
        for member, part in zip(self._members, parts, strict=True):
            by_rank[member] = part
        self._local.reduce(by_rank, out, combine, storage, deadline, followed=followed)

    def _spread(
        self,
        sizes: Sequence[int],
        shared: BufferList,
        requests: Sequence[ReadRequest | None],
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        """Do step c: ``sizes`` and ``requests`` by cross group."""
        sizes_by_rank = [0] * self._local.size
        requests_by_rank: list[ReadRequest | None] = [None] * self._local.size
        for member, size, part in zip(self._members, sizes, requests, strict=True):
            sizes_by_rank[member], requests_by_rank[member] = size, part
        self._local.share(shared, sizes_by_rank, requests_by_rank, storage, deadline)


def _combine_function(stages: TwoStageReduction) -> Combine:
    reducer = BlockReducer(stages.local)
    return reducer.combine if stages.wide else reducer.reduce


def _scratch(count: int, stages: TwoStageReduction) -> BufferList:
    """Allocate partial results."""
    return BufferList([np.empty(count, np.dtype(np.float32) if stages.wide else stages.full.dtype.storage)])


def _copy(source: BufferList, target: BufferList) -> None:
    for _, (piece, place) in zip_pieces([source, target], 0, target.size):
        place[:] = piece


def _concatenate(parts: Sequence[BufferList]) -> BufferList:
    return BufferList([piece for part in parts for _, piece in part.pieces(0, part.size)])
