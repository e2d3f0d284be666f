"""The truth that backends are compared with, itself compared with Python's exact arithmetic, element by element."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest

from reigen.testing.reference import expected_reduction, from_float64, random_array, to_float64
from reigen.types import DTYPES, ReduceOp, dtype_named


def float32(value: Fraction) -> Fraction:
    """The nearest float32: Python packs a float correctly rounded, and a Fraction becomes the nearest float."""
    return Fraction(struct.unpack("f", struct.pack("f", float(value)))[0])


def bfloat16(value: Fraction) -> Fraction:
    """The nearest number with 8 significant bits, ties to even."""
    if value == 0:
        return value
    unit = Fraction(1)
    while abs(value) >= 256 * unit:
        unit *= 2
    while abs(value) < 128 * unit:
        unit /= 2
    return round(value / unit) * unit  # Python rounds ties to even


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    dtype = dtype_named("bfloat16")
    values = np.concatenate(
        [np.random.default_rng(0).standard_normal(300), [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0]]
    )
    got = to_float64(from_float64(values, dtype), dtype)
    assert [Fraction(x) for x in got] == [bfloat16(Fraction(x)) for x in values]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_floating_averages_are_rounded_step_by_step(name: str) -> None:
    dtype = dtype_named(name)
    inputs = [random_array(dtype, 200, (1, rank)) for rank in range(3)]
    got = to_float64(expected_reduction(inputs, dtype, ReduceOp.AVERAGE), dtype)
    last = bfloat16 if name == "bfloat16" else float32
    for index, value in enumerate(got):
        a, b, c = (Fraction(to_float64(array, dtype)[index]) for array in inputs)
        assert Fraction(value) == last(float32(float32(float32(a + b) + c) / 3))


@pytest.mark.parametrize("name", ["uint8", "int8", "uint16", "int16", "int32", "int64"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
def test_integers_wrap_around(name: str, op: ReduceOp) -> None:
    dtype = dtype_named(name)
    inputs = [random_array(dtype, 50, (2, rank)) for rank in range(5)]
    limits = np.iinfo(name)
    for index, value in enumerate(expected_reduction(inputs, dtype, op).tolist()):
        exact = 0 if op is ReduceOp.SUM else 1
        for array in inputs:
            exact = exact + int(array[index]) if op is ReduceOp.SUM else exact * int(array[index])
        assert value == (exact - int(limits.min)) % (1 << limits.bits) + int(limits.min)


def test_integer_averages_and_factors_are_truncated_toward_zero() -> None:
    dtype = dtype_named("int32")
    inputs = [np.array(values, np.int32) for values in ([-3, 3, -1, 5], [-2, 2, 0, 0])]
    assert expected_reduction(inputs, dtype, ReduceOp.AVERAGE).tolist() == [-2, 2, 0, 2]
    assert expected_reduction(inputs, dtype, ReduceOp.SUM, prescale=0.5).tolist() == [-2, 2, 0, 2]
    assert expected_reduction(inputs, dtype, ReduceOp.SUM, postscale=0.5).tolist() == [-2, 2, 0, 2]
    assert expected_reduction(inputs, dtype, ReduceOp.MAX, postscale=1.5).tolist() == [-3, 4, 0, 7]


def test_bool_is_or_and_and() -> None:
    dtype = dtype_named("bool")
    inputs = [np.array([False, True, True]), np.array([False, False, True])]
    assert expected_reduction(inputs, dtype, ReduceOp.SUM).tolist() == [False, True, True]
    assert expected_reduction(inputs, dtype, ReduceOp.PRODUCT).tolist() == [False, False, True]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_examples_have_the_storage_type_and_repeat(name: str) -> None:
    dtype = dtype_named(name)
    array = random_array(dtype, 9, (7, 1))
    assert array.dtype == dtype.storage
    np.testing.assert_array_equal(array, random_array(dtype, 9, (7, 1)))
    assert random_array(dtype, 0, (7, 1)).size == 0
