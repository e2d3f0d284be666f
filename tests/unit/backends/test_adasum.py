"""Adasum over backends: against a recursion written here, in float64."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.backends import adasum as module
from reigen.backends.adasum import ColumnRange, adasum, split_columns
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import ShmBackend, shm_backend_bytes
from reigen.cluster.local_peers import map_local_peers
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.errors import UnsupportedError, UnsupportedTypeError
from reigen.testing import run_threads
from reigen.testing.reference import from_float64, to_float64
from reigen.types import DTYPES, DType

Array = NDArray[Any]
#: relative to the largest element: half a unit in the last place, and a bit
TOLERANCE = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 7e-8, "float64": 1e-13}


def tree(vectors: Sequence[Array]) -> Array:
    """The definition, on whole vectors in float64."""
    if len(vectors) == 1:
        return vectors[0]
    middle = len(vectors) // 2
    a, b = tree(vectors[:middle]), tree(vectors[middle:])
    dot, aa, bb = np.dot(a, b), np.dot(a, a), np.dot(b, b)
    return (1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b


def numbers(rank: int, count: int, seed: int, dtype: DType) -> Array:
    """What rank ``rank`` contributes: all have a part in common."""
    common = np.random.default_rng([seed, count]).standard_normal(count)
    own = np.random.default_rng([seed, count, rank]).standard_normal(count)
    return from_float64(common + own, dtype)


def with_backends(size: int, act: Callable[[Any], Any]) -> list[Any]:
    """``act(backend)`` on ranks that are threads over shared memory."""

    def run(rank: int, rendezvous: LocalRendezvous) -> Any:
        if size == 1:
            return act(NullBackend())
        neighbours, [part] = map_local_peers(rendezvous, rank, range(size), 0, 60.0, [shm_backend_bytes()])
        backend = ShmBackend(neighbours, part, looks=0)
        try:
            return act(backend)
        finally:
            rendezvous.put(f"done {rank}", b"")
            for other in range(size):
                rendezvous.get(f"done {other}", 30.0)
            backend.close()
            neighbours.close()

    return run_threads(run, size)


def run(
    backend: Any, sources: Sequence[Array], dtype: DType, *, in_place: bool = False, **scales: float
) -> list[Array]:
    sources = [source.copy() for source in sources]
    targets = sources if in_place else [np.empty_like(source) for source in sources]
    kept = [source.copy() for source in sources]
    prescale, postscale = scales.get("prescale", 1.0), scales.get("postscale", 1.0)
    adasum(backend, sources, targets, dtype, prescale, postscale, time.monotonic() + 30.0)
    assert in_place or all(a.tobytes() == b.tobytes() for a, b in zip(sources, kept, strict=True))
    return targets


def digest(arrays: Sequence[Array]) -> list[str]:
    return [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_it_is_the_tree_of_pairs(size: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)  # several exchanges, that begin and end within tensors
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 512)
    dtype = DTYPES[name]
    counts = (0, 1, 2, 7, 8, 1031, 4096, 20_001)

    def act(backend: Any) -> list[Array]:
        return run(backend, [numbers(backend.rank, count, 1, dtype) for count in counts], dtype)

    results = with_backends(size, act)
    assert all(digest(result) == digest(results[0]) for result in results)
    for count, result in zip(counts, results[0], strict=True):
        truth = tree([to_float64(numbers(rank, count, 1, dtype), dtype) for rank in range(size)])
        limit = TOLERANCE[name] * np.abs(truth).max(initial=0.0)
        np.testing.assert_allclose(to_float64(result, dtype), truth, rtol=0, atol=limit)


def test_large_tensors_in_pieces_as_they_are() -> None:
    dtype, count = DTYPES["float32"], 2_500_003

    def act(backend: Any) -> list[Array]:
        return run(backend, [numbers(backend.rank, count, 2, dtype)], dtype, in_place=True)

    results = with_backends(4, act)
    truth = tree([numbers(rank, count, 2, dtype).astype(np.float64) for rank in range(4)])
    np.testing.assert_allclose(results[3][0], truth, rtol=0, atol=1e-6)
    assert digest(results[0]) == digest(results[3])


@pytest.mark.parametrize("size", [2, 4])
def test_factors_and_places_and_company_change_nothing_else(size: int) -> None:
    """In place or not, alone or with others: the same bits. Scaling is scaling."""
    counts = (70_001, 3, 150)

    def act(backend: Any) -> list[list[str]]:
        found = []
        for name in ("float32", "bfloat16"):
            dtype = DTYPES[name]
            sources = [numbers(backend.rank, count, 3, dtype) for count in counts]
            together = run(backend, sources, dtype)
            alone = [run(backend, [source], dtype, in_place=True)[0] for source in sources]
            backwards = run(backend, sources[::-1], dtype)[::-1]
            scaled = run(backend, sources, dtype, prescale=2.0, postscale=0.5)
            found += [digest(together), digest(alone), digest(backwards), digest(scaled)]
        return found

    results = with_backends(size, act)
    assert results == [results[0]] * size
    for dtype in (0, 1):
        assert results[0][4 * dtype : 4 * dtype + 4] == [results[0][4 * dtype]] * 4


@pytest.mark.parametrize("size", [1, 2])
def test_prescale_is_rounded_to_the_type_and_postscale_is_not(size: int) -> None:
    dtype = DTYPES["float16"]

    def act(backend: Any) -> list[float]:
        sources = [np.full(5, 3.0, np.float16)]
        (a,) = run(backend, sources, dtype, prescale=0.1)
        (b,) = run(backend, sources, dtype, postscale=0.1)
        return [float(a[0]), float(b[0])]

    rounded = float(np.float16(np.float32(3.0) * np.float32(0.1)))
    assert with_backends(size, act) == [[rounded, rounded]] * size


def test_orthogonal_parallel_and_zero() -> None:
    dtype = DTYPES["float32"]

    def act(backend: Any) -> list[Array]:
        axis = np.zeros(1000, np.float32)
        axis[10 * backend.rank] = 1.0 + backend.rank
        same = numbers(0, 1000, 4, dtype)
        absent = same if backend.rank == 2 else np.zeros_like(same)
        return run(backend, [axis, same, absent, np.zeros(1000, np.float32)], dtype)

    axis, same, absent, nothing = with_backends(4, act)[1]
    truth = np.zeros(1000)
    truth[[0, 10, 20, 30]] = [1, 2, 3, 4]
    np.testing.assert_array_equal(axis, truth)
    np.testing.assert_array_equal(same, numbers(0, 1000, 4, dtype))
    np.testing.assert_array_equal(absent, same)
    assert not nothing.any()


def test_values_whose_squares_no_float32_holds() -> None:
    dtype = DTYPES["float32"]
    scales = (1e30, 1e-30, 1.0, 1e37)

    def contribution(rank: int) -> Array:
        return numbers(rank, 999, 5, dtype) * np.float32(scales[rank])

    def act(backend: Any) -> list[Array]:
        alike = numbers(backend.rank, 999, 6, dtype)
        return run(backend, [contribution(backend.rank), alike * np.float32(1e-30), alike * np.float32(1e30)], dtype)

    mixed, small, large = with_backends(4, act)[0]
    truth = tree([contribution(rank).astype(np.float64) for rank in range(4)])
    np.testing.assert_allclose(mixed, truth, rtol=1e-6)
    for result, scale in ((small, 1e-30), (large, 1e30)):
        truth = tree([(numbers(r, 999, 6, dtype) * np.float32(scale)).astype(np.float64) for r in range(4)])
        np.testing.assert_allclose(result, truth, rtol=1e-6, atol=1e-7 * scale)


def test_what_is_not_finite_spoils_its_own_tensor_only() -> None:
    dtype = DTYPES["float32"]

    def act(backend: Any) -> list[Array]:
        bad = np.ones(100, np.float32)
        bad[7] = np.inf if backend.rank else 1.0
        return run(backend, [bad, np.ones(100, np.float32)], dtype)

    for bad, good in with_backends(2, act):
        assert np.isnan(bad).all()
        np.testing.assert_array_equal(good, 1.0)


def test_pieces_are_in_order_and_full() -> None:
    assert list(split_columns([], 4)) == []
    assert list(split_columns([0, 0], 4)) == []
    assert list(split_columns([3, 0, 6, 1], 4)) == [
        [ColumnRange(0, 0, 3), ColumnRange(2, 0, 1)],
        [ColumnRange(2, 1, 5)],
        [ColumnRange(2, 5, 6), ColumnRange(3, 0, 1)],
    ]


def test_refusals_send_nothing() -> None:
    def act(backend: Any) -> int:
        with pytest.raises(UnsupportedError, match="not 3"):
            run(backend, [np.ones(3, np.float32)], DTYPES["float32"])
        with pytest.raises(UnsupportedTypeError, match="int64"):
            run(backend, [np.ones(3, np.int64)], DTYPES["int64"])
        backend.barrier(time.monotonic() + 30.0)
        return 1

    assert with_backends(3, act) == [1, 1, 1]
