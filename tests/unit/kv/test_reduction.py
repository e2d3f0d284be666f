"""Sums of contributions: in rank order, of all dtypes and forms, against float64 and hand-made truths."""

import numpy as np
import pytest

from reigen.compression import from_params
from reigen.kv.server.buffers import ReductionScratch
from reigen.kv.server.reduction import BLOCK_ELEMENTS, PushData, ShardSum, accumulation_dtype, sum_rows
from reigen.types import dtype_named

LENGTHS = [0, 1, 33, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 7]


def total(dtype, parts, scale=1.0):
    """The sum as it is stored, and as an optimizer gets it."""
    kind = dtype_named(dtype)
    length = len(parts[0].data) if parts[0].codec is None else LENGTH_OF_CODES
    out = np.full(length, 77, kind.storage)
    ShardSum(kind, length, parts, scale, ReductionScratch()).into(out)
    again = ShardSum(kind, length, parts, scale, ReductionScratch())
    blocks = [again.block(b, min(b + BLOCK_ELEMENTS, length)).copy() for b in range(0, length, BLOCK_ELEMENTS)]
    return out, np.concatenate(blocks) if blocks else np.empty(0, accumulation_dtype(kind).storage)


LENGTH_OF_CODES = 1000


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_float32_is_added_in_rank_order(length, num_parts):
    rng = np.random.default_rng(length + num_parts)
    values = [rng.standard_normal(length).astype(np.float32) for _ in range(num_parts)]
    expected = values[0].copy()
    for value in values[1:]:
        expected = expected + value  # one rounding for each, in this order
    stored, given = total("float32", [PushData(value) for value in values])
    assert stored.tobytes() == given.tobytes() == expected.tobytes()


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_half_types_are_rounded_once(num_parts):
    rng = np.random.default_rng(num_parts)
    values = [rng.standard_normal(BLOCK_ELEMENTS + 5).astype(np.float16) for _ in range(num_parts)]
    exact = sum(value.astype(np.float64) for value in values).astype(np.float32)
    stored, given = total("float16", [PushData(value) for value in values], scale=2.0)
    np.testing.assert_allclose(given, 2 * exact, rtol=1e-6)
    assert given.dtype == np.float32
    assert (stored == given.astype(np.float16)).all()


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float64"])
def test_other_types(dtype):
    values = [np.arange(100).astype(dtype), np.full(100, 3, dtype), np.full(100, 200, dtype)]
    stored, given = total(dtype, [PushData(value) for value in values])
    expected = (np.arange(100) + 203).astype(dtype)
    assert (stored == expected).all()
    assert (given == expected).all()


def test_lost_workers_are_made_up_for():
    values = [np.array([1, 2], np.float32), np.array([3, 5], np.float32)]
    stored, given = total("float32", [PushData(value) for value in values], scale=1.5)
    assert list(stored) == list(given) == [6, 10.5]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_codes_and_plain_values_together(dtype):
    codec = from_params({"type": "2bit", "threshold": 0.5, "ef": False})
    one = np.where(np.arange(LENGTH_OF_CODES) % 2, 0.75, -0.75).astype(dtype)
    codes = np.empty(codec.max_bytes(LENGTH_OF_CODES), np.uint8)
    codec.encode(one, None, codes)
    plain = np.full(LENGTH_OF_CODES, 2, dtype)
    for parts in ([PushData(codes, codec), PushData(plain)], [PushData(plain), PushData(codes, codec)]):
        kind = dtype_named(dtype)
        out = np.empty(LENGTH_OF_CODES, kind.storage)
        ShardSum(kind, LENGTH_OF_CODES, parts, 1.0, ReductionScratch()).into(out)
        assert set(out[::2]) == {1.5}
        assert set(out[1::2]) == {2.5}


def test_rows_are_added_up():
    first = PushData(np.array([1, 2, 3, 4], np.float32), rows=np.array([0, 7], np.int64))
    second = PushData(np.array([10, 20], np.float32), rows=np.array([7], np.int64))
    nothing = PushData(np.empty(0, np.float32), rows=np.empty(0, np.int64))
    rows, sums = sum_rows(dtype_named("float32"), 2, [first, nothing, second], 1.0)
    assert list(rows) == [0, 7]
    assert sums.tolist() == [[1, 2], [13, 24]]
    rows, sums = sum_rows(dtype_named("float32"), 2, [nothing], 2.0)
    assert sums.shape == (0, 2)
