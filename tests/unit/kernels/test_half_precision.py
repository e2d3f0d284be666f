"""bfloat16 and float16 conversion, against exact rational rounding and ``struct``."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.kernels.half_precision import converters, narrow_bfloat16, narrow_float16, widen_bfloat16


def bfloat16_value(bits: int) -> float:
    """What the bfloat16 with these bits means, spelled out by ``struct``."""
    return float(struct.unpack(">f", struct.pack(">HH", bits, 0))[0])


def nearest_bfloat16(value: float) -> int:
    """Bits of the bfloat16 nearest to a finite ``value``, ties to even, by comparing both neighbours exactly."""
    sign = 0x8000 if math.copysign(1.0, value) < 0 else 0
    magnitude = abs(value)
    low, high = 0, 0x7F80
    while high - low > 1:  # the largest bfloat16 <= magnitude; their bits are ordered like their values
        middle = (low + high) // 2
        low, high = (middle, high) if bfloat16_value(middle) <= magnitude else (low, middle)
    above = 2.0**128 if high == 0x7F80 else bfloat16_value(high)  # float64 holds all of these exactly
    below_gap, above_gap = magnitude - bfloat16_value(low), above - magnitude
    if below_gap != above_gap:
        return sign | (low if below_gap < above_gap else high)
    return sign | (low if low % 2 == 0 else high)


def narrowed(value: float) -> int:
    target = np.empty(1, np.uint16)
    narrow_bfloat16(np.array([value], np.float32), target)
    return int(target[0])


def test_widening_bfloat16_is_exact_for_every_number() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    target = np.empty(len(every), np.float32)
    widen_bfloat16(every, target)
    expected = np.array([bfloat16_value(bits) for bits in range(1 << 16)])
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(np.signbit(target), every >= 0x8000)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_widening_and_narrowing_gives_every_number_back(name: str) -> None:
    widen, narrow = converters(name)
    storage = np.uint16 if name == "bfloat16" else np.float16
    every = np.arange(1 << 16, dtype=np.uint16)
    wide, back = np.empty(len(every), np.float32), np.empty(len(every), storage)
    widen(every.view(storage), wide)
    is_nan = np.isnan(wide)
    narrow(wide, back)
    np.testing.assert_array_equal(back.view(np.uint16)[~is_nan], every[~is_nan])
    widen(back, wide)
    np.testing.assert_array_equal(np.isnan(wide), is_nan)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_narrowing_bfloat16_rounds_to_nearest_even(value: float) -> None:
    assert narrowed(value) == nearest_bfloat16(value)


@given(st.integers(0, 0x7F7F), st.sampled_from([0x7FFF, 0x8000, 0x8001]), st.booleans())
def test_narrowing_bfloat16_at_and_beside_ties(upper: int, lower: int, negative: bool) -> None:
    value = struct.unpack(">f", struct.pack(">HH", upper | (0x8000 if negative else 0), lower))[0]
    assert narrowed(value) == nearest_bfloat16(value)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(0x7F800000, 0x7F80), (0xFF800000, 0xFF80), (0x7F7FFFFF, 0x7F80), (0x00000001, 0x0000), (0x80000000, 0x8000)],
)
def test_narrowing_bfloat16_at_the_ends(bits: int, expected: int) -> None:
    target = np.empty(1, np.uint16)
    narrow_bfloat16(np.array([bits], np.uint32).view(np.float32), target)
    assert target[0] == expected


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_nan_stays_nan_among_numbers(bits: int) -> None:
    source = np.array([0x3F800000, bits, 0xBF800000], np.uint32).view(np.float32)
    target = np.empty(3, np.uint16)
    narrow_bfloat16(source, target)
    assert math.isnan(bfloat16_value(int(target[1])))
    assert (target[0], target[2]) == (0x3F80, 0xBF80)


def test_narrowing_float16_is_numpys_cast_bit_for_bit() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    every = every[np.isfinite(every)]
    between = (np.sort(every)[1:] + np.sort(every)[:-1]) / 2  # ties
    beside = [np.nextafter(values, np.float32(end)) for values in (every, between) for end in (-np.inf, np.inf)]
    ends = np.array([65519.996, 65520, 65536, 1e30, np.inf, 2.9802322e-8, 2.98023259e-8, 1e-45, 0, np.nan], np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    source = np.concatenate([every, between, *beside, ends, -ends, random])
    before, target = source.copy(), np.empty(len(source), np.float16)
    narrow_float16(source, target)
    with np.errstate(all="ignore"):
        expected = source.astype(np.float16)
    is_nan = np.isnan(source)
    np.testing.assert_array_equal(np.isnan(target), is_nan)
    np.testing.assert_array_equal(target.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan])
    np.testing.assert_array_equal(source.view(np.uint32), before.view(np.uint32))


def test_no_elements() -> None:
    for name in ("bfloat16", "float16"):
        widen, narrow = converters(name)
        half = np.empty(0, np.uint16 if name == "bfloat16" else np.float16)
        widen(half, np.empty(0, np.float32))
        narrow(np.empty(0, np.float32), half)
