"""Adasum's arithmetic: what the formula promises, and where its divisions have nothing to divide by."""

from __future__ import annotations

import numpy as np
import pytest

from reigen.errors import ArgumentError, UnsupportedError, UnsupportedTypeError
from reigen.kernels.adasum import check_adasum, combine_pairs, load_float64, pair_factors, pair_products, store_float64
from reigen.types import DTYPES


def pair(a: list[float], b: list[float]) -> list[float]:
    vectors = np.array([a, b], np.float64)
    return combine_pairs(vectors.copy(), [pair_factors(pair_products(vectors))])[0].tolist()


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ([3, 0, 0], [0, 2, 1], [3, 2, 1]),  # orthogonal: the sum
        ([3, 4, 1], [3, 4, 1], [3, 4, 1]),  # equal: the mean
        ([2, 4, 6], [1, 2, 3], [1.5, 3, 4.5]),  # parallel: the mean, whatever the lengths
        ([1, 2, 3], [-1, -2, -3], [0, 0, 0]),
        ([1, 0, 0], [1, 1, 0], [1.25, 0.75, 0]),  # a.b = |a|^2 = 1, |b|^2 = 2: a / 2 + 3 b / 4
        ([0, 0, 0], [1, 2, 3], [1, 2, 3]),
        ([1, 2, 3], [0, 0, 0], [1, 2, 3]),
        ([0, 0, 0], [0, 0, 0], [0, 0, 0]),
        ([1e-200, 0, 0], [1, 2, 3], [1, 2, 3]),  # its square is 0
        ([1e30, 0, 0], [0, 1e-30, 0], [1e30, 1e-30, 0]),
    ],
)
def test_a_pair(a, b, result):
    assert pair(a, b) == result


def test_products_of_what_is_not_finite_make_all_nan():
    with np.errstate(all="ignore"):
        for bad in (np.inf, np.nan):
            assert np.isnan(pair([bad, 0], [1, 2])).all()


def test_levels_are_applied_in_turn():
    vectors = np.array([[1.0], [10.0], [100.0], [1000.0]])
    first, second = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0]])
    assert combine_pairs(vectors.copy(), []).tolist() == vectors.tolist()
    assert combine_pairs(vectors.copy(), [first]).tolist() == [[21.0], [4300.0]]
    assert combine_pairs(vectors.copy(), [first, second]).tolist() == [[105.0 + 25800.0]]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_loading_is_exact_and_storing_rounds_to_nearest(name):
    dtype = DTYPES[name]
    bits = np.arange(1 << 16, dtype=np.uint16)
    block = bits if name == "bfloat16" else bits.view(np.float16).astype(dtype.storage)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = load_float64(block, dtype)
    assert values.dtype == np.float64
    finite = np.isfinite(values)
    assert store_float64(values[finite], dtype).tobytes() == block[finite].tobytes()
    if dtype.itemsize == 2:
        assert load_float64(store_float64(np.array([1.0 + 2**-12, 2.0**-8 + 1.0]), dtype), dtype).tolist() == [
            1.0,
            1.0 if name == "bfloat16" else 1.0 + 2**-8,
        ]


def test_what_it_is_not_defined_for():
    for name in ("float16", "bfloat16", "float32", "float64"):
        for size in (1, 2, 4, 8, 64):
            check_adasum(DTYPES[name], size)
    for size in (3, 6, 12):
        with pytest.raises(UnsupportedError, match=f"not {size}") as caught:
            check_adasum(DTYPES["float32"], size)
        assert isinstance(caught.value, ArgumentError)
        assert isinstance(caught.value, NotImplementedError)
    with pytest.raises(UnsupportedTypeError, match="int32"):
        check_adasum(DTYPES["int32"], 2)
