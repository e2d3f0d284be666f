"""Cases of the conformance suite of backends, for one rank."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.backends.adasum import adasum
from reigen.backends.base import Backend, ReduceBuffer
from reigen.kernels.reduce import Reduction
from reigen.testing.reference import expected_adasum, expected_reduction, random_array, to_float64
from reigen.types import DTYPES, DType, ReduceOp, dtype_named

Array = NDArray[Any]

OPS = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
CASE_TIMEOUT_SECONDS = 60.0
_GUARD = 8
_LARGE_BYTES = (5 << 19) + 24  # two and a half MiB and a bit: several chunks, no round number
_MEMORY_BYTES = 64 << 20
_SIZES = (0, 1, 7, 1031)
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def case_deadline() -> float:
    """Return a deadline that only a broken backend meets."""
    return time.monotonic() + CASE_TIMEOUT_SECONDS


class CaseCache:
    """Cache of inputs and truths for ranks that are threads of one process; the latest are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Hashable, tuple[list[Array], int]] = {}
        self._bytes = 0

    def __reduce__(self) -> tuple[type[CaseCache], tuple[()]]:
        return CaseCache, ()  # another process remembers for itself

    def of(self, key: Hashable, compute: Callable[[], list[Array]]) -> list[Array]:
        """Return the arrays of ``compute`` for a key, read-only, from the cache if they are in it."""
        with self._lock:
            if key not in self._known:
                arrays = compute()
                for array in arrays:
                    array.flags.writeable = False
                nbytes = sum(array.nbytes for array in arrays)
                while self._known and self._bytes + nbytes > _MEMORY_BYTES:
                    self._bytes -= self._known.pop(next(iter(self._known)))[1]
                self._known[key] = arrays, nbytes
                self._bytes += nbytes
            return self._known[key][0]


class BackendConformance:
    """Cases of the suite, for one rank."""

    def __init__(self, backend: Backend, trimmed: bool, cache: CaseCache) -> None:
        self._backend = backend
        self._cache = cache
        self._rank, self._size = backend.rank, backend.size
        self._trimmed = trimmed
        #: hashes of results that must be the same on all ranks
        self.digests: dict[str, str] = {}

    def cases(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield every case with its name, in the order in which all ranks run them."""
        names = ("float32", "bfloat16", "int32", "bool") if self._trimmed else tuple(DTYPES)
        for dtype in map(dtype_named, names):
            for op in OPS:
                if (dtype.name, op) != ("bool", ReduceOp.AVERAGE):
                    yield f"allreduce {dtype.name} {op.name}", partial(self._reduce, dtype, op, _SIZES)
                    yield f"reduce_scatter {dtype.name} {op.name}", partial(self._scatter, dtype, op, 40)
            if dtype.name != "bool":
                yield f"factors {dtype.name}", partial(self._factors, dtype)
        large = ("float32",) if self._trimmed else ("float32", "float16", "bfloat16", "int64", "uint8")
        for dtype in map(dtype_named, large):
            yield f"large {dtype.name}", partial(self._large, dtype)
        yield "not-a-number and infinity", self._special_values
        yield "several tensors in one call", self._several
        yield "allgather", self._allgather
        yield "alltoall", self._alltoall
        yield "broadcast", self._broadcast
        yield "barrier", self._barrier
        if self._backend.capabilities.registered_memory:
            yield "registered memory", self._registered
        yield "reduction to owners", self._to_owners
        yield "shared memory", self._shared
        yield "split", self._split
        if self._size & (self._size - 1) == 0:
            for name in (name for name in _EPSILON if name in names):
                yield f"adasum {name}", partial(self._adasum, dtype_named(name))
        yield "a random mixture", self._mixture

    # -- cases

    def _barrier(self) -> None:
        for _ in range(20):
            self._backend.barrier(case_deadline())

    def _reduce(self, dtype: DType, op: ReduceOp, counts: Sequence[int], **factors: float) -> None:
        for count in counts:
            inputs = self._inputs(dtype, [count] * self._size, count, small=_needs_small(op, factors))
            result, check_guards = _guarded_array(count, dtype)
            source = inputs[self._rank].copy()
            reduction = Reduction(dtype, op, self._size, **factors)
            self._backend.allreduce([ReduceBuffer(source, result)], reduction, case_deadline())
            check_guards()
            np.testing.assert_array_equal(_bits(source), _bits(inputs[self._rank]), "the source was changed")
            self._same(result, self._reduced(inputs, dtype, op, count, factors), dtype)
            self._record(f"allreduce {dtype.name} {op.name} {count} {factors}", result)

    def _scatter(self, dtype: DType, op: ReduceOp, unit: int, **factors: float) -> None:
        counts = [unit * (rank % 3) + rank % 2 for rank in range(self._size)]  # uneven, the first empty
        inputs = self._inputs(dtype, [sum(counts)] * self._size, unit, small=_needs_small(op, factors))
        result, check_guards = _guarded_array(counts[self._rank], dtype)
        reduction = Reduction(dtype, op, self._size, **factors)
        self._backend.reduce_scatter(inputs[self._rank].copy(), counts, result, reduction, case_deadline())
        check_guards()
        begin = sum(counts[: self._rank])
        truth = self._reduced(inputs, dtype, op, unit, factors)[begin : begin + counts[self._rank]]
        self._same(result, truth, dtype)

    def _factors(self, dtype: DType) -> None:
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX):
            self._reduce(dtype, op, [1031], prescale=1.5)
            self._reduce(dtype, op, [1031], postscale=0.75)
            self._reduce(dtype, op, [1031], prescale=1.5, postscale=0.75)
            self._scatter(dtype, op, 40, prescale=1.5, postscale=0.75)

    def _large(self, dtype: DType) -> None:
        if not self._trimmed:
            self._reduce(dtype, ReduceOp.SUM, [_LARGE_BYTES // dtype.itemsize])
        self._reduce(dtype, ReduceOp.AVERAGE, [_LARGE_BYTES // dtype.itemsize])
        self._scatter(dtype, ReduceOp.SUM, _LARGE_BYTES // dtype.itemsize // self._size)

    def _special_values(self) -> None:
        dtype = DTYPES["float32"]
        values = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
        inputs = [np.roll(values, rank) for rank in range(self._size)]
        for op in OPS:
            result = np.empty(4, np.float32)
            self._backend.allreduce(
                [ReduceBuffer(inputs[self._rank], result)], Reduction(dtype, op, self._size), case_deadline()
            )
            self._same(result, expected_reduction(inputs, dtype, op), dtype)

    def _several(self) -> None:
        dtype, op = DTYPES["float32"], ReduceOp.AVERAGE
        counts = (3, 0, 1000, 1, _LARGE_BYTES // 4, 17)
        columns = [self._inputs(dtype, [count] * self._size, index) for index, count in enumerate(counts)]
        sources = [column[self._rank].copy() for column in columns]
        targets = [source if index % 2 else np.empty_like(source) for index, source in enumerate(sources)]
        buffers = [ReduceBuffer(source, target) for source, target in zip(sources, targets, strict=True)]
        self._backend.allreduce(buffers, Reduction(dtype, op, self._size), case_deadline())
        for index, (column, target) in enumerate(zip(columns, targets, strict=True)):
            self._same(target, self._reduced(column, dtype, op, index, {}), dtype)
            self._record(f"several {index}", target)

    def _allgather(self) -> None:
        for dtype in DTYPES.values():
            self._gather(dtype, [7 * (rank % 4) for rank in range(self._size)])
        self._gather(DTYPES["uint8"], [0] * self._size)
        self._gather(DTYPES["int32"], [0] * (self._size - 1) + [5])
        self._gather(DTYPES["float32"], [_LARGE_BYTES // 4 // (1 + rank) for rank in range(self._size)])

    def _gather(self, dtype: DType, counts: Sequence[int]) -> None:
        inputs = self._inputs(dtype, counts, 3)
        result, check_guards = _guarded_array(sum(counts), dtype)
        self._backend.allgather(inputs[self._rank], counts, result, case_deadline())
        check_guards()
        np.testing.assert_array_equal(_bits(result), _bits(np.concatenate(inputs)))

    def _alltoall(self) -> None:
        for dtype in DTYPES.values():
            self._exchange(dtype, 5)
        self._exchange(DTYPES["float32"], 0)
        self._exchange(DTYPES["int16"], _LARGE_BYTES // 2 // self._size)

    def _exchange(self, dtype: DType, unit: int) -> None:
        """Send ``unit * ((i + 2 * j) % 3)`` elements from rank i to rank j: every third number is zero."""
        counts = [[unit * ((i + 2 * j) % 3) for j in range(self._size)] for i in range(self._size)]
        inputs = self._inputs(dtype, [sum(row) for row in counts], 4)
        result, check_guards = _guarded_array(sum(row[self._rank] for row in counts), dtype)
        self._backend.alltoall(inputs[self._rank], counts, result, case_deadline())
        check_guards()
        begins = [sum(row[: self._rank]) for row in counts]
        parts = [
            array[begin : begin + row[self._rank]] for array, begin, row in zip(inputs, begins, counts, strict=True)
        ]
        np.testing.assert_array_equal(_bits(result), _bits(np.concatenate(parts)))

    def _broadcast(self) -> None:
        for root in range(self._size):
            for count in (*_SIZES, _LARGE_BYTES // 4) if root == 0 else _SIZES:
                self._spread(DTYPES["float32"], count, root)
        for dtype in DTYPES.values():
            self._spread(dtype, 33, self._size - 1)
        root = self._size // 2
        truth = random_array(DTYPES["int64"], 9, (5, root))
        own = truth.copy() if self._rank == root else np.zeros(9, np.int64)
        self._backend.broadcast(own if self._rank == root else None, own, root, case_deadline())  # source is target
        np.testing.assert_array_equal(own, truth)

    def _spread(self, dtype: DType, count: int, root: int) -> None:
        truth = random_array(dtype, count, (6, root))
        result, check_guards = _guarded_array(count, dtype)
        self._backend.broadcast(truth.copy() if self._rank == root else None, result, root, case_deadline())
        check_guards()
        np.testing.assert_array_equal(_bits(result), _bits(truth))

    def _registered(self) -> None:
        """Check that regions are zeroed, aligned, reduced in place, whole and in part, and used again after free()."""
        dtype, op = DTYPES["float32"], ReduceOp.SUM
        for nbytes in (4, 4096 + 4) if self._trimmed else (4, 4096 + 4, _LARGE_BYTES):
            region = self._backend.allocate(nbytes, case_deadline())
            assert region.array.shape == (nbytes,)
            assert region.array.ctypes.data % 64 == 0
            assert not region.array.any(), "registered memory is not zeroed"
            self._record(f"offset of {nbytes} bytes", np.array([region.offset]))
            values = region.array.view(np.float32)
            begin = values.size // 3
            for first, last in ((0, values.size), (begin, values.size - begin // 2)):
                inputs = self._inputs(dtype, [values.size] * self._size, first)
                values[:] = inputs[self._rank]
                self._backend.barrier(case_deadline())  # all copies are written, as callers must
                part = values[first:last]
                buffer = ReduceBuffer(part, part, offset=region.offset + 4 * first)
                self._backend.allreduce([buffer], Reduction(dtype, op, self._size), case_deadline())
                truth = inputs[self._rank].copy()
                truth[first:last] = self._reduced(inputs, dtype, op, first, {})[first:last]
                self._same(values, truth, dtype)
                self._backend.barrier(case_deadline())
            self._backend.free(region.offset)

    def _to_owners(self) -> None:
        """Check that every owner has its part, visible to all ranks of its host; parts may be empty."""
        region = self._backend.allocate(1, case_deadline())
        num_owners, own = len(region.owned), region.owner
        self._backend.free(region.offset)
        large = 3 * _LARGE_BYTES // 8 // num_owners
        for name, op, factors in (
            ("float32", ReduceOp.AVERAGE, {}),
            ("float64", ReduceOp.SUM, {"prescale": 0.5, "postscale": 3.0}),
            ("bfloat16", ReduceOp.AVERAGE, {}),
            ("int32", ReduceOp.MAX, {}),
        ):
            dtype = dtype_named(name)
            for unit in (1, 40) if self._trimmed and name != "float32" else (1, 40, large):
                counts = [unit * (1 + owner % 2) + owner % 3 for owner in range(num_owners)]
                counts[-1] = 0 if num_owners > 2 else counts[-1]
                size = sum(counts)
                region = self._backend.allocate(size * dtype.itemsize, case_deadline())
                assert len(region.owned) == num_owners
                inputs = self._inputs(dtype, [size] * self._size, unit, small=_needs_small(op, factors))
                values = region.array.view(dtype.storage)
                values[:] = inputs[self._rank]
                self._backend.barrier(case_deadline())
                reduction = Reduction(dtype, op, self._size, **factors)
                self._backend.reduce_to_owners(
                    ReduceBuffer(values, values, region.offset), counts, reduction, case_deadline()
                )
                truth = self._reduced(inputs, dtype, op, unit, factors)
                for owner in range(num_owners):
                    part = slice(sum(counts[:owner]), sum(counts[: owner + 1]))
                    self._same(region.owned[owner].view(dtype.storage)[part], truth[part], dtype)
                    if owner == own:
                        self._same(values[part], truth[part], dtype)
                self._backend.barrier(case_deadline())
                self._backend.free(region.offset)

    def _shared(self) -> None:
        """Check that an owner's writing is visible on its host; zeroed when fresh, also when it is used again."""
        region = self._backend.allocate(1, case_deadline())
        num_owners, own = len(region.owned), region.owner
        self._backend.free(region.offset)
        for nbytes in (8 * num_owners, _LARGE_BYTES, _LARGE_BYTES):
            region = self._backend.allocate_shared(nbytes, case_deadline())
            assert region.array.shape == (nbytes,)
            assert region.array.ctypes.data % 64 == 0
            assert not region.array.any(), "shared memory is not zeroed"
            self._backend.barrier(case_deadline())
            self._record(f"offset of {nbytes} shared bytes", np.array([region.offset]))
            numbers = region.array[: 8 * num_owners].view(np.int64)
            if own is not None:
                numbers[own] = own + 1
            self._backend.barrier(case_deadline())
            np.testing.assert_array_equal(numbers, np.arange(1, num_owners + 1), "not all ranks' writing is seen")
            self._backend.barrier(case_deadline())
            self._backend.free(region.offset)

    def _split(self) -> None:
        """Check groups of some ranks: two of the same ranks in turn, others beside them, and all ranks in between."""
        all_ranks = list(range(self._size))
        lists = [all_ranks[::2], all_ranks[1::2]]
        if self._size < 4 or not self._trimmed:  # even ranks and odd ranks are groups of one where there are few
            lists.append(all_ranks)
        groups = [(self._group(ranks), ranks[0]) for ranks in 2 * lists if ranks]
        own = [(group, first) for group, first in groups if group is not None]
        for index, (group, _) in enumerate(own):
            if group._rank > 0:  # the roots are ahead, so that data of several groups is on its way at once
                time.sleep(0.01)
            group._spread(DTYPES["float32"], 33 + index, 0)
        for turn in range(2):
            for group, first in own:
                for _ in range(1 + first):  # the odd ranks do more than the even ones, who may be ahead
                    group._mixed(turn)
            self._reduce(DTYPES["float32"], ReduceOp.SUM, [1031])
        for group, _ in own[: len(own) // 2]:
            group._backend.close()
        for group, _ in own[len(own) // 2 :]:
            group._mixed(2)
            group._backend.close()
        again = self._group(all_ranks[::2])
        if again is not None:
            again._mixed(3)
            again._backend.close()
        self._reduce(DTYPES["float32"], ReduceOp.SUM, [1031])

    def _group(self, ranks: Sequence[int]) -> BackendConformance | None:
        """Return the cases of a backend of some ranks; None on a rank that is not one of them."""
        backend = self._backend.split(ranks, case_deadline())
        if self._rank not in ranks:
            assert backend is None, f"split({ranks}) gives rank {self._rank} a backend"
            return None
        assert backend is not None, f"split({ranks}) gives rank {self._rank} no backend"
        numbering = f"split({ranks}): rank {self._rank} is rank {backend.rank} of {backend.size}"
        assert (backend.rank, backend.size) == (list(ranks).index(self._rank), len(ranks)), numbering
        return BackendConformance(backend, True, self._cache)

    def _mixed(self, seed: int) -> None:
        dtype = DTYPES["float32"]
        self._reduce(dtype, ReduceOp.SUM, [5, 1031 + seed])
        self._scatter(dtype, ReduceOp.AVERAGE, 40 + seed)
        self._gather(dtype, [7 * (rank % 4) + seed for rank in range(self._size)])
        self._exchange(dtype, 5 + seed)
        self._spread(dtype, 33 + seed, seed % self._size)
        self._backend.barrier(case_deadline())

    def _adasum(self, dtype: DType) -> None:
        """Check Adasum, made of other operations, with one and several tensors; in float64 but for the result."""
        counts = (1, 7, 1031, _LARGE_BYTES // 2 // dtype.itemsize)
        columns = [self._inputs(dtype, [count] * self._size, count) for count in counts]
        sources = [column[self._rank].copy() for column in columns]
        targets = [np.empty_like(source) for source in sources]
        adasum(self._backend, sources, targets, dtype, 1.0, 1.0, case_deadline())
        for source, target, column in zip(sources, targets, columns, strict=True):
            truth = self._adasummed(column, dtype)
            limit = 4 * _EPSILON[dtype.name] * np.abs(truth).max()
            np.testing.assert_allclose(to_float64(target, dtype), truth, rtol=0, atol=limit)
            adasum(self._backend, [source], [source], dtype, 1.0, 1.0, case_deadline())
            if self._backend.capabilities.ordered_sums:
                np.testing.assert_array_equal(_bits(source), _bits(target), "other bits alone than in company")
            else:  # the sums of products are taken in an order that depends on their place
                np.testing.assert_allclose(to_float64(source, dtype), truth, rtol=0, atol=limit)
            self._record(f"adasum {dtype.name} {target.size}", target)

    def _mixture(self) -> None:
        """Run operations of all kinds and sizes in one random order: traces of one would hurt the next."""
        random = np.random.default_rng(self._size)
        for _ in range(20 if self._trimmed else 60):
            unit = int(random.choice([1, 50, 9000, 400_000]) // self._size) + 1
            match random.integers(6):
                case 0:
                    self._reduce(DTYPES["float32"], ReduceOp.AVERAGE, [unit])
                case 1:
                    self._scatter(DTYPES["float64"], ReduceOp.SUM, unit)
                case 2:
                    self._gather(DTYPES["int16"], [unit * (rank % 3) for rank in range(self._size)])
                case 3:
                    self._exchange(DTYPES["int32"], unit)
                case 4:
                    self._spread(DTYPES["uint8"], unit, int(random.integers(self._size)))
                case _:
                    self._backend.barrier(case_deadline())

    # -- helpers

    def _inputs(self, dtype: DType, counts: Sequence[int], seed: int, *, small: bool = False) -> list[Array]:
        """Return every rank's source, read-only."""
        key = ("inputs", dtype.name, tuple(counts), seed, small and not dtype.is_floating)
        return self._cache.of(
            key, lambda: [random_array(dtype, count, (seed, rank), small=small) for rank, count in enumerate(counts)]
        )

    def _reduced(self, inputs: list[Array], dtype: DType, op: ReduceOp, seed: int, factors: dict[str, float]) -> Array:
        """Return the truth about inputs made from ``seed``."""
        key = ("truth", dtype.name, op, len(inputs), inputs[0].size, seed, tuple(factors.items()))
        return self._cache.of(key, lambda: [expected_reduction(inputs, dtype, op, **factors)])[0]

    def _adasummed(self, inputs: list[Array], dtype: DType) -> Array:
        """Return the truth about inputs whose seed is their size."""
        key = ("adasummed", dtype.name, len(inputs), inputs[0].size)
        return self._cache.of(key, lambda: [expected_adasum([to_float64(array, dtype) for array in inputs])])[0]

    def _same(self, result: Array, truth: Array, dtype: DType) -> None:
        """Compare bits, any NaN for a NaN; or numbers with a tolerance where a backend adds in its own order."""
        assert result.dtype == dtype.storage
        if not dtype.is_floating:
            np.testing.assert_array_equal(result, truth)
            return
        if np.array_equal(_bits(result), _bits(truth)):
            return
        numbers, expected = to_float64(result, dtype), to_float64(truth, dtype)
        if self._backend.capabilities.ordered_sums:
            nan = np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(numbers), nan)
            np.testing.assert_array_equal(_bits(result)[~nan], _bits(truth)[~nan])
        else:
            epsilon = _EPSILON[dtype.name]
            np.testing.assert_allclose(numbers, expected, rtol=self._size * epsilon, atol=4 * self._size * epsilon)

    def _record(self, name: str, array: Array) -> None:
        self.digests[name] = hashlib.sha256(array.tobytes()).hexdigest()


def _needs_small(op: ReduceOp, factors: dict[str, float]) -> bool:
    return op is ReduceOp.AVERAGE or bool(factors)


def _bits(array: Array) -> Array:
    """Return the elements as unsigned integers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _guarded_array(count: int, dtype: DType) -> tuple[Array, Callable[[], None]]:
    """Return an array for a result inside a larger one, and a check that nothing was written around it."""
    whole = np.full((count + 2 * _GUARD) * dtype.itemsize, 0xA5, np.uint8)

    def check() -> None:
        edge = _GUARD * dtype.itemsize
        assert (whole[:edge] == 0xA5).all(), "written before the beginning of the target"
        assert (whole[whole.size - edge :] == 0xA5).all(), "written beyond the end of the target"

    return whole.view(dtype.storage)[_GUARD : _GUARD + count], check
