"""One block reduced, against exact Python integers and element-by-element loops over NumPy scalars."""

from __future__ import annotations

import gc
import itertools
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce as fold
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.kernels import BlockReducer, Reduction
from reigen.types import DTYPES, ReduceOp, dtype_named

pytestmark = pytest.mark.filterwarnings("error")

OPS = [op for op in ReduceOp if op is not ReduceOp.ADASUM]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
SCALES = [(1.0, 1.0), (0.5, 1.0), (1.0, 3.0), (1 / 3, -1.7)]


# --- the truth: scalars, one element at a time -------------------------------------------------------------------


def wrapped(value: int, name: str) -> int:
    info = np.iinfo(name)
    return (value - info.min) % (info.max - info.min + 1) + info.min


def scaled_integer(value: int, factor: float, divisor: int, name: str) -> int:
    quotient = Fraction(value, divisor) if factor == 1.0 else Fraction(float(value) / divisor * factor)
    info = np.iinfo(name)
    highest = info.max if name != "int64" or factor == 1.0 else 2**63 - 1024
    return min(max(math.trunc(quotient), info.min), highest)


def integer_truth(column: Sequence[int], name: str, op: ReduceOp, prescale: float, postscale: float) -> int:
    values = [scaled_integer(int(x), prescale, 1, name) for x in column]
    combine: Callable[[int, int], int] = {
        ReduceOp.MIN: min,
        ReduceOp.MAX: max,
        ReduceOp.PRODUCT: lambda a, b: a * b,
    }.get(op, lambda a, b: a + b)
    total = wrapped(fold(combine, values), name)
    return scaled_integer(total, postscale, len(column) if op is ReduceOp.AVERAGE else 1, name)


def round_bfloat16(value: np.float32) -> np.float32:
    """Nearest bfloat16, through bytes: compares the two neighbours in float64."""
    if not np.isfinite(value):
        return value
    (bits,) = struct.unpack(">I", struct.pack(">f", value))
    below, above = ((bits >> 16) << 16), ((bits >> 16) + 1) << 16
    low, high = (float(np.uint32(b).view(np.float32)) for b in (below, above))
    finite_high = math.copysign(2.0**128, high) if math.isinf(high) else high
    exact = float(value)
    down, up = abs(exact - low), abs(finite_high - exact)
    take_low = down < up or (down == up and (bits >> 16) % 2 == 0)
    return np.float32(low if take_low else high)


def rounder(name: str) -> Callable[[Any], Any]:
    """How a number in the working precision becomes one of the type."""
    return {
        "float16": lambda x: np.float32(np.float16(x)),
        "bfloat16": round_bfloat16,
        "float32": np.float32,
        "float64": np.float64,
    }[name]


def float_truth(column: Sequence[Any], name: str, op: ReduceOp, prescale: float, postscale: float) -> Any:
    real: Any = np.float64 if name == "float64" else np.float32
    to_type = rounder(name)
    values = [to_type(real(x) * real(prescale)) for x in column]
    combine: Callable[[Any, Any], Any] = {
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.PRODUCT: lambda a, b: a * b,
    }.get(op, lambda a, b: a + b)
    total = fold(combine, values)
    if op is ReduceOp.AVERAGE:
        total = total / real(len(column))
    return to_type(total * real(postscale))


def storage_of(values: NDArray[Any], name: str) -> NDArray[Any]:
    if name != "bfloat16":
        return values.astype(DTYPES[name].storage)
    rounded = np.array([round_bfloat16(np.float32(v)) for v in values], np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def values_of(stored: NDArray[Any], name: str) -> NDArray[Any]:
    return (stored.astype(np.uint32) << 16).view(np.float32) if name == "bfloat16" else stored


def truth(inputs: Sequence[NDArray[Any]], name: str, op: ReduceOp, prescale: float, postscale: float) -> NDArray[Any]:
    """The numbers that the reduction should give."""
    columns = zip(*(values_of(x, name) for x in inputs), strict=True)
    with np.errstate(all="ignore"):
        if name == "bool":
            logic = any if op in (ReduceOp.SUM, ReduceOp.MAX) else all
            return np.array([logic(column) for column in columns], bool)
        if name in INTEGERS:
            numbers = [integer_truth(column, name, op, prescale, postscale) for column in columns]
            return np.array(numbers, dtype=name)
        numbers = [float_truth(column, name, op, prescale, postscale) for column in columns]
        return np.array(numbers, np.float64 if name == "float64" else np.float32)


# --- all types, operators, numbers of ranks, places of the result ------------------------------------------------


def sample(name: str, length: int, num_ranks: int) -> list[NDArray[Any]]:
    random = np.random.default_rng([length, num_ranks, sorted(DTYPES).index(name)])
    if name == "bool":
        return [random.integers(0, 2, length).astype(bool) for _ in range(num_ranks)]
    if name in INTEGERS:
        info = np.iinfo(name)
        return [random.integers(info.min, info.max, length, dtype=name, endpoint=True) for _ in range(num_ranks)]
    return [storage_of(random.standard_normal(length) * 3, name) for _ in range(num_ranks)]


def scales_of(name: str, op: ReduceOp) -> list[tuple[float, float]]:
    return SCALES[:1] if name == "bool" else SCALES


def check_everywhere(inputs: list[NDArray[Any]], reduction: Reduction) -> None:
    """The result is right apart from the inputs and in the place of each; other inputs are left alone."""
    name = reduction.dtype.name
    expected = truth(inputs, name, reduction.op, reduction.prescale, reduction.postscale)
    reducer = BlockReducer(reduction)
    for place in [None, *range(len(inputs))]:
        given_inputs = [x.copy() for x in inputs]
        out = np.empty_like(inputs[0]) if place is None else given_inputs[place]
        reducer.reduce(given_inputs, out)
        np.testing.assert_array_equal(values_of(out, name), expected, err_msg=f"{reduction} out={place}")
        for rank, (before, after) in enumerate(zip(inputs, given_inputs, strict=True)):
            assert rank == place or before.tobytes() == after.tobytes()


CASES = [(name, op) for name, op in itertools.product(sorted(DTYPES), OPS) if (name, op) != ("bool", ReduceOp.AVERAGE)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("name", "op"), CASES)
def test_every_type_operator_and_place(name: str, op: ReduceOp, num_ranks: int) -> None:
    for (prescale, postscale), length in itertools.product(scales_of(name, op), [0, 1, 37]):
        inputs = sample(name, length, num_ranks)
        check_everywhere(inputs, Reduction(dtype_named(name), op, num_ranks, prescale, postscale))


# --- integers ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=7))
def test_average_of_int64_is_the_wrapped_sum_divided_toward_zero(column: list[int]) -> None:
    inputs = [np.array([x], np.int64) for x in column]
    BlockReducer(Reduction(dtype_named("int64"), ReduceOp.AVERAGE, len(inputs))).reduce(inputs, inputs[0])
    total = wrapped(sum(column), "int64")
    assert int(inputs[0][0]) == (abs(total) // len(column)) * (1 if total >= 0 else -1)


@settings(max_examples=50)
@given(st.integers(-(2**31), 2**31 - 1), st.integers(1, 2**31 - 1))
def test_average_of_int32_is_exact_for_any_count(total: int, count: int) -> None:
    out = np.array([total], np.int32)
    BlockReducer(Reduction(dtype_named("int32"), ReduceOp.AVERAGE, count)).reduce([out], out)
    assert int(out[0]) == math.trunc(Fraction(total, count))


def test_more_ranks_than_a_small_type_can_count() -> None:
    out = np.array([100], np.int8)
    BlockReducer(Reduction(dtype_named("int8"), ReduceOp.AVERAGE, 300)).reduce([out], out)
    assert out[0] == 0


@pytest.mark.parametrize(("name", "expected"), [("uint8", [0, 255]), ("int16", [-(2**15), 2**15 - 1])])
def test_scaled_integers_stop_at_the_ends_of_the_type(name: str, expected: list[int]) -> None:
    inputs = np.array([1, 1], name)
    for factor, end in zip((-1e300, 1e300), expected, strict=True):
        out = np.empty_like(inputs)
        BlockReducer(Reduction(dtype_named(name), ReduceOp.SUM, 1, postscale=factor)).reduce([inputs], out)
        assert out.tolist() == [end, end]


# --- floating point ----------------------------------------------------------------------------------------------


def test_sums_are_taken_in_rank_order() -> None:
    column = [1e8, 1.0, -1e8, 1.0]  # in float32 the first 1 is lost, the last is not
    inputs = [np.full(9, x, np.float32) for x in column]
    BlockReducer(Reduction(dtype_named("float32"), ReduceOp.SUM, 4)).reduce(inputs, inputs[2])
    assert inputs[2].tolist() == [1.0] * 9


@pytest.mark.parametrize(("name", "step"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_types_round_once(name: str, step: float) -> None:
    # Each step is half of the last place of 1: rounding after each addition would lose them all.
    inputs = [storage_of(np.array([x]), name) for x in (1.0, step, step, step, step)]
    BlockReducer(Reduction(dtype_named(name), ReduceOp.SUM, 5)).reduce(inputs, inputs[4])
    assert values_of(inputs[4], name).tolist() == [1.0 + 4 * step]


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 6e4, -6e4, 3e38, -3e38, 1e-45, 6e-8, 1e-41]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", OPS)
def test_special_values_follow_ieee_and_warn_of_nothing(name: str, op: ReduceOp) -> None:
    with np.errstate(all="ignore"):
        pairs = np.array(list(itertools.product(SPECIAL, SPECIAL))).T
        inputs = [storage_of(x, name) for x in pairs]
    for prescale, postscale in [(1.0, 1.0), (2.0, 1e30), (math.inf, 1.0), (1.0, math.nan)]:
        check_everywhere(inputs, Reduction(dtype_named(name), op, 2, prescale, postscale))


@pytest.mark.parametrize("name", ["float32", "float64"])
@given(data=st.data())
def test_average_over_a_power_of_two_equals_the_division(name: str, data: st.DataObject) -> None:
    width = 32 if name == "float32" else 64
    total = data.draw(st.floats(width=width, allow_nan=False))
    count = 2 ** data.draw(st.integers(0, 12))
    out = np.array([total], name)
    with np.errstate(all="ignore"):
        expected = out / np.dtype(name).type(count)
    BlockReducer(Reduction(dtype_named(name), ReduceOp.AVERAGE, count)).reduce([out], out)
    assert out.tobytes() == expected.tobytes()


def test_callers_error_state_is_left_alone() -> None:
    huge = np.full(3, 3e38, np.float32)
    with np.errstate(over="raise"):
        BlockReducer(Reduction(dtype_named("float32"), ReduceOp.SUM, 2)).reduce([huge, huge], huge)
        assert np.geterr()["over"] == "raise"
    assert np.isinf(huge).all()


# --- blocks and scratch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_one_reducer_serves_blocks_of_any_length_and_cuts_do_not_show(name: str) -> None:
    inputs = sample(name, 1001, 3)
    reduction = Reduction(dtype_named(name), ReduceOp.SUM, 3, 1.0 if name == "bool" else 0.7)
    whole = np.empty_like(inputs[0])
    BlockReducer(reduction).reduce(inputs, whole)
    reducer, pieces = BlockReducer(reduction), np.empty_like(whole)
    for begin, end in itertools.pairwise([0, 3, 500, 500, 507, 1001]):
        reducer.reduce([x[begin:end] for x in inputs], pieces[begin:end])
    assert pieces.tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", FLOATS)
def test_both_halves_are_the_whole(name: str) -> None:
    """What combines to more than the type holds is no infinity before it is divided."""
    dtype = dtype_named(name)
    reducer = BlockReducer(Reduction(dtype, ReduceOp.AVERAGE, 4, 0.5, 3.0))
    inputs = [np.arange(1, 8).astype(np.float32) * 8000 for _ in range(4)]
    if name == "bfloat16":
        inputs = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in inputs]
    stored = [array.astype(dtype.storage) for array in inputs]
    whole, total, out = np.empty_like(stored[0]), np.empty(7, reducer.working), np.empty_like(stored[0])
    reducer.reduce(stored, whole)
    reducer.combine(stored, total)
    assert total.dtype == (np.float64 if name == "float64" else np.float32)
    assert np.isfinite(total).all()
    reducer.finish(total, out)
    assert out.tobytes() == whole.tobytes()


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "scale"), [(ReduceOp.AVERAGE, 1.0), (ReduceOp.SUM, 2.0)])
def test_bool_is_neither_averaged_nor_scaled(op: ReduceOp, scale: float) -> None:
    with pytest.raises(UnsupportedTypeError, match="bool cannot be"):
        Reduction(dtype_named("bool"), op, 2, scale)


def test_reductions_that_make_no_sense() -> None:
    with pytest.raises(ArgumentError, match="ADASUM"):
        Reduction(dtype_named("float32"), ReduceOp.ADASUM, 2)
    with pytest.raises(ArgumentError, match="at least 1 rank"):
        Reduction(dtype_named("float32"), ReduceOp.SUM, 0)
    with pytest.raises(ArgumentError, match="int32 cannot be scaled by inf"):
        Reduction(dtype_named("int32"), ReduceOp.SUM, 2, prescale=math.inf)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32", "int64"])
def test_scratch_ends_with_its_reducer(name: str) -> None:
    """Not when the garbage collector comes: hundreds of batches may be reduced until then."""
    dtype = dtype_named(name)
    reducer = BlockReducer(Reduction(dtype, ReduceOp.AVERAGE, 2, 0.5, 2.0))
    arrays = [np.zeros(8, dtype.storage) for _ in range(3)]
    gc.disable()
    try:
        reducer.reduce(arrays[:2], arrays[2])
        alive = weakref.ref(reducer)
        del reducer
        assert alive() is None
    finally:
        gc.enable()
