"""Codecs, against MXNet's vectors and its rules followed element by element, and against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reigen.compression import Cast, Codec, ErrorFeedback, Int8, Residual, TopK, add_up, chain, from_params
from reigen.compression import base as codecs
from reigen.errors import ArgumentError, UnsupportedTypeError, WireError
from reigen.types import DTYPES

FLOAT32 = DTYPES["float32"]
EVERY: list[dict[str, Any]] = [
    {"type": "2bit"},
    {"type": "1bit", "threshold": 0.0},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "fp32"},
    {"type": "int8"},
    {"type": "int8", "ef": True},
    {"type": "topk", "ratio": 0.1},
    {"type": "topk", "k": 3, "values": "fp16"},
    {"type": "topk", "ratio": 0.5, "values": "int8", "ef": False},
]


def named(params: object) -> str | None:
    return "-".join(str(value) for value in params.values()) if isinstance(params, dict) else None


def sent(codec: Codec, array: NDArray[Any], state: Residual = None) -> bytes:
    out = bytearray(codec.max_bytes(len(array)))
    assert codec.encode(array, state, out) == len(out)
    return bytes(out)


def received(codec: Codec, data: bytes, length: int) -> NDArray[np.float32]:
    out = np.full(length, 7, np.float32)
    codec.decode(data, out)
    return out


def gradient(length: int, seed: int = 0, dtype: str = "float32") -> NDArray[Any]:
    return np.random.default_rng(seed).normal(0, 0.6, length).astype(dtype)


# ---------------------------------------------------------------- MXNet's formats


def two_bits(g: NDArray[np.float32], r: NDArray[np.float32], t: np.float32) -> bytes:
    """MXNet's rule for one element after another."""
    codes = []
    for i in range(len(g)):
        r[i] += g[i]
        code = 0b11 if r[i] >= t else 0b10 if r[i] <= -t else 0
        r[i] = r[i] - t if code == 0b11 else r[i] + t if code == 0b10 else r[i]
        codes.append(code)
    codes += [0] * (-len(g) % 16)
    return bytes(a << 6 | b << 4 | c << 2 | d for a, b, c, d in zip(*[iter(codes)] * 4, strict=True))


def one_bit(g: NDArray[np.float32], r: NDArray[np.float32], t: np.float32) -> bytes:
    """The same for one bit."""
    out = bytearray(4 * math.ceil(len(g) / 32))
    for i in range(len(g)):
        r[i] += g[i]
        if r[i] > t:
            out[i // 8] |= 0x80 >> (i & 7)
            r[i] -= np.float32(1)
        else:
            r[i] += np.float32(1)
    return bytes(out)


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        (
            {"type": "2bit", "threshold": 0.5},
            [("e3800000", [0.1, -0.2, 0.2, 0, 0]), ("c0000000", [0, -0.3, 0.4, 0, 0.1])],
        ),
        (
            {"type": "1bit", "threshold": 0},
            [("b0000000", [-0.4, 0.3, -0.8, -0.5, 0.5]), ("c8000000", [-1, -0.8, 0.4, 0.5, -0.4])],
        ),
    ],
    ids=named,
)
def test_the_vectors_of_mxnets_tests(params: dict[str, Any], steps: list[tuple[str, list[float]]]) -> None:
    codec = from_params(params)
    state = codec.begin(5, FLOAT32)
    gradients = [[0.6, -0.7, 0.2, 0.5, -0.5], [0.4, -0.1, 0.2, 0, 0.1]]
    for values, (codes, residual) in zip(gradients, steps, strict=True):
        assert sent(codec, np.array(values, np.float32), state).hex() == codes
        np.testing.assert_allclose(state, residual, atol=1e-6)


@pytest.mark.parametrize("rule", ["2bit", "1bit"])
@pytest.mark.parametrize("threshold", [0.5, 0.1, 1e-3])
def test_every_byte_and_every_residual_is_that_of_mxnets_rule(rule: str, threshold: float) -> None:
    codec = from_params({"type": rule, "threshold": threshold})
    for length in (1, 3, 4, 15, 16, 17, 31, 32, 33, 127, 300):
        state, expected = codec.begin(length, FLOAT32), np.zeros(length, np.float32)
        assert state is not None
        for step in range(4):
            g = gradient(length, seed=step)
            truth = (two_bits if rule == "2bit" else one_bit)(g, expected, np.float32(threshold))
            data = sent(codec, g, state)
            assert data == truth
            np.testing.assert_array_equal(state.view(np.uint32), expected.view(np.uint32))
            assert len(data) == 4 * math.ceil(length / (16 if rule == "2bit" else 32))


@pytest.mark.parametrize("values", [[0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0)), -0.0, 0.0]])
def test_what_is_exactly_at_the_threshold(values: list[float]) -> None:
    g = np.array(values, np.float32)
    assert received(from_params({"type": "2bit"}), sent(from_params({"type": "2bit", "ef": False}), g), 5).tolist() == [
        0.5, -0.5, 0, 0, 0,
    ]  # fmt: skip
    # One bit: above, not at.
    assert received(from_params({"type": "1bit"}), sent(from_params({"type": "1bit", "ef": False}), g), 5).tolist() == [
        -1, -1, -1, -1, -1,
    ]  # fmt: skip


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("params", EVERY, ids=named)
def test_the_size_of_codes_depends_on_the_length_alone(params: dict[str, Any]) -> None:
    codec = from_params(params)
    for length in (0, 1, 2, 255, 256, 257, 1000):
        for values in (np.zeros(length, np.float32), gradient(length), np.full(length, np.nan, np.float32)):
            out = bytearray(b"\xaa" * (codec.max_bytes(length) + 9))
            assert codec.encode(values, codec.begin(length, FLOAT32), out) == codec.max_bytes(length)
            assert out[codec.max_bytes(length) :] == b"\xaa" * 9
            received(codec, bytes(out[: codec.max_bytes(length)]), length)


@pytest.mark.parametrize("params", [p for p in EVERY if p["type"] != "topk"], ids=named)
def test_codes_of_parts_put_together_are_the_codes_of_the_whole(params: dict[str, Any]) -> None:
    codec = from_params(params)
    block_multiple = codec.block_multiple
    assert block_multiple is not None
    g, cut = gradient(2000), 3 * block_multiple
    whole = sent(codec, g, codec.begin(2000, FLOAT32))
    parts = [sent(codec, part.copy(), codec.begin(len(part), FLOAT32)) for part in (g[:cut], g[cut:])]
    assert b"".join(parts) == whole
    assert codec.max_bytes(cut) == len(parts[0])


@pytest.mark.parametrize("params", EVERY, ids=named)
def test_arrays_of_several_blocks(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    codec, g = from_params(params), gradient(3000)
    in_one = codec.begin(3000, FLOAT32)
    whole = sent(codec, g, in_one)
    numbers = received(codec, whole, 3000)
    monkeypatch.setattr(codecs, "BLOCK", 512)
    in_blocks = codec.begin(3000, FLOAT32)
    assert sent(codec, g, in_blocks) == whole
    if in_one is not None:
        np.testing.assert_array_equal(in_blocks, in_one)
    np.testing.assert_array_equal(received(codec, whole, 3000), numbers)


@pytest.mark.parametrize("params", EVERY, ids=named)
def test_encoding_leaves_the_array_alone(params: dict[str, Any]) -> None:
    codec, g = from_params(params), gradient(700)
    before = g.copy()
    sent(codec, g, codec.begin(700, FLOAT32))
    np.testing.assert_array_equal(g, before)


@pytest.mark.parametrize("params", EVERY, ids=named)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_every_floating_point_type_goes_in_and_out(params: dict[str, Any], dtype: str) -> None:
    codec = from_params(params)
    numbers = np.random.default_rng(1).integers(-8, 9, 600) / np.float32(8)  # all types hold these
    storage: NDArray[Any] = numbers.astype(np.float32)
    stored = (storage.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else storage.astype(dtype)
    state, wide_state = codec.begin(600, DTYPES[dtype]), codec.begin(600, FLOAT32)
    data = sent(codec, stored, state)
    assert data == sent(codec, storage, wide_state)
    expected = received(codec, data, 600).astype(np.float64)
    for accumulate in (False, True):
        out = stored.copy()
        codec.decode(data, out, accumulate)
        got = (out.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else out
        truth = expected + storage if accumulate else expected
        bits = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 24}[dtype]
        np.testing.assert_allclose(got.astype(np.float64), truth, rtol=2.0**-bits, atol=1e-12)


@pytest.mark.parametrize("params", EVERY, ids=named)
def test_accumulating_adds(params: dict[str, Any]) -> None:
    codec = from_params(params)
    data = sent(codec, gradient(600), codec.begin(600, FLOAT32))
    total = gradient(600, seed=5)
    expected = total + received(codec, data, 600)
    codec.decode(data, total, accumulate=True)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("params", EVERY, ids=named)
def test_codecs_travel_as_names_and_values(params: dict[str, Any]) -> None:
    codec = from_params(params)
    assert from_params(codec.params()) == codec
    assert all(isinstance(value, str | int | float | bool) for value in codec.params().values())
    assert {**codec.params(), **params} == codec.params()


# ---------------------------------------------------------------- what arrives


def test_half_precision_is_numpys_and_that_of_exact_rounding() -> None:
    g = np.array([1 / 3, -2.5, 70000.0, 1e-8, 65504.0], np.float32)
    np.testing.assert_array_equal(received(Cast("fp16"), sent(Cast("fp16"), g), 5)[:2], g[:2].astype(np.float16))
    assert received(Cast("fp16"), sent(Cast("fp16"), g), 5).tolist()[2:] == [math.inf, 0.0, 65504.0]
    # The upper halves of the float32 numbers, one more where the lower half is above 0x8000, or at it and they are odd.
    upper = [0x3EAB, 0xC020, 0x4789, 0x322C, 0x4780]
    assert np.frombuffer(sent(Cast("bf16"), g), "<u2").tolist() == upper
    expected = (np.array(upper, np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(received(Cast("bf16"), sent(Cast("bf16"), g), 5), expected)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=600))
@settings(max_examples=60, deadline=None)
def test_int8_is_within_half_a_step_of_each_group(values: list[float]) -> None:
    g = np.array(values, np.float32)
    out = received(Int8(), sent(Int8(), g), len(g))
    for begin in range(0, len(g), 256):
        part = [Fraction(float(value)) for value in g[begin : begin + 256]]
        step = max(map(abs, part)) / 127
        slack = Fraction(1, 10**5) * step * 127 + Fraction(1, 10**36)  # float32 and groups that count as zero
        for value, got in zip(part, out[begin : begin + 256], strict=True):
            assert abs(Fraction(float(got)) - value) <= step / 2 + slack


def test_a_group_of_int8_with_infinity_is_nan_and_the_others_are_not_touched() -> None:
    g = np.ones(600, np.float32)
    g[300] = np.inf
    out = received(Int8(), sent(Int8(), g), 600)
    assert np.isnan(out[256:512]).all()
    np.testing.assert_allclose(np.delete(out, np.s_[256:512]), 1, rtol=1e-6)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.5, 1e-40, math.inf]), min_size=1), st.integers(1, 40))
def test_topk_sends_the_largest_and_of_equal_ones_the_first(values: list[float], k: int) -> None:
    g = np.array(values, np.float32)
    chosen = sorted(sorted(range(len(g)), key=lambda i: (-abs(float(g[i])), i))[:k])
    expected = np.zeros(len(g), np.float32)
    expected[chosen] = g[chosen]
    codec = TopK(k=k)
    data = sent(codec, g)
    assert np.frombuffer(data, "<u4", min(k, len(g))).tolist() == chosen
    np.testing.assert_array_equal(received(codec, data, len(g)), expected)


@pytest.mark.parametrize("k", [1, 70, 500, 9000])
@pytest.mark.parametrize("kind", ["normal", "mostly zero", "equal", "large where the sample looks", "small there"])
def test_topk_of_long_arrays_is_exact_whatever_a_sample_says(kind: str, k: int) -> None:
    g = gradient(20_000)
    if kind == "mostly zero":
        g[np.arange(20_000) % 50 > 0] = 0
    elif kind == "equal":
        g = np.where(g > 0, np.float32(1), np.float32(-1))
    elif kind != "normal":
        g[::64] *= 1000 if kind.startswith("large") else 1e-6
    truth = sorted(np.argsort(-np.abs(g.astype(np.float64)), kind="stable")[:k].tolist())
    assert np.frombuffer(sent(TopK(k=k), g), "<u4", k).tolist() == truth


def test_topk_of_nan_sends_nan() -> None:
    g = np.array([1, 2, np.nan, 3], np.float32)
    out = received(TopK(k=2), sent(TopK(k=2), g), 4)
    assert np.isnan(out[2])
    assert out.tolist()[3] == 3


# ---------------------------------------------------------------- error feedback


@pytest.mark.parametrize("params", [p for p in EVERY if from_params(p).params()["ef"]], ids=named)
def test_what_has_been_sent_and_the_residual_are_all_that_was_given(params: dict[str, Any]) -> None:
    codec = from_params(params)
    state = codec.begin(300, FLOAT32)
    given_so_far, sent_so_far = np.zeros(300), np.zeros(300)
    for step in range(20):
        g = gradient(300, seed=step)
        given_so_far += g
        sent_so_far += received(codec, sent(codec, g, state), 300)
    assert state is not None
    np.testing.assert_allclose(sent_so_far + state, given_so_far, atol=1e-4)


def test_the_mean_of_what_is_sent_comes_near_a_constant_gradient() -> None:
    g = np.linspace(-0.45, 0.45, 91, dtype=np.float32)
    codec = from_params({"type": "2bit", "threshold": 0.5})
    state = codec.begin(91, FLOAT32)
    total = sum(received(codec, sent(codec, g, state), 91).astype(np.float64) for _ in range(200))
    np.testing.assert_allclose(total / 200, g, atol=0.5 / 200 + 1e-6)


@pytest.mark.parametrize("params", [p for p in EVERY if from_params(p).params()["ef"]], ids=named)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_remembered(params: dict[str, Any], bad: float) -> None:
    codec = from_params(params)
    state = codec.begin(600, FLOAT32)
    g = gradient(600)
    g[5] = bad
    sent(codec, g, state)
    assert state is not None
    assert np.isfinite(state).all()
    assert state[5] == 0


def test_a_residual_can_be_saved_and_continued() -> None:
    codec = from_params({"type": "topk", "ratio": 0.01})
    state = codec.begin(500, FLOAT32)
    sent(codec, gradient(500), state)
    assert state is not None
    again = codec.begin(500, FLOAT32, saved=state)
    assert again is not state
    assert sent(codec, gradient(500, 1), again) == sent(codec, gradient(500, 1), state)


def test_a_residual_can_be_cut_and_put_together_like_the_array() -> None:
    codec, g = from_params({"type": "2bit"}), gradient(640)
    state = codec.begin(640, FLOAT32)
    sent(codec, g, state)
    assert state is not None
    halves = [codec.begin(320, FLOAT32, saved=state[:320]), codec.begin(320, FLOAT32, saved=state[320:])]
    data = b"".join(sent(codec, g[320 * i : 320 * (i + 1)], half) for i, half in enumerate(halves))
    assert data == sent(codec, g, state)


@pytest.mark.parametrize("params", [{"type": "2bit"}, {"type": "1bit", "threshold": 0.0}, {"type": "int8"}], ids=named)
def test_sums_of_many_ranks_do_not_lag_behind(params: dict[str, Any]) -> None:
    """As on a server: five ranks that always agree; the sum of their codes is coded again."""
    ranks, codec = 5, from_params(params)
    answers = codec.for_sums(ranks)
    g = np.full(64, 0.4, np.float32)
    states = [codec.begin(64, FLOAT32) for _ in range(ranks)]
    state, pulled = answers.begin(64, FLOAT32), np.zeros(64)
    for _ in range(100):
        total = np.zeros(64, np.float32)
        for each in states:
            codec.decode(sent(codec, g, each), total, accumulate=True)
        pulled += received(answers, sent(answers, total, state), 64)
    np.testing.assert_allclose(pulled / 100, ranks * g, rtol=0.04)


def test_one_bit_with_a_scale() -> None:
    codec = from_params({"type": "1bit", "threshold": 0.0, "scale": 0.25})
    state = codec.begin(3, FLOAT32)
    assert received(codec, sent(codec, np.array([0.5, -1, 0.1], np.float32), state), 3).tolist() == [0.25, -0.25, 0.25]
    np.testing.assert_allclose(state, [0.25, -0.75, -0.15], atol=1e-6)


# ---------------------------------------------------------------- sums of ranks


@pytest.mark.parametrize("params", EVERY, ids=named)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_codes_of_ranks_are_added_up_in_their_order(params: dict[str, Any], dtype: str) -> None:
    codec = from_params(params)
    codes = [sent(codec, gradient(700, seed=rank), codec.begin(700, FLOAT32)) for rank in range(3)]
    numbers = [received(codec, data, 700) for data in codes]
    if dtype == "float64":
        truth = ((numbers[0].astype(np.float64) + numbers[1]) + numbers[2]) * 0.25
    else:
        truth = ((numbers[0] + numbers[1]) + numbers[2]) * np.float32(0.25)
    out: NDArray[Any] = np.full(700, 9, DTYPES[dtype].storage)
    add_up(codec, [np.frombuffer(data, np.uint8) for data in codes], out, factor=0.25)
    if dtype == "bfloat16":
        wide = (out.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(wide, truth, rtol=2.0**-8)
    else:
        np.testing.assert_array_equal(out, truth.astype(dtype))


def test_a_rank_whose_codes_are_too_short() -> None:
    with pytest.raises(WireError, match="8 bytes of 2bit codes for 40 elements, which take 12"):
        add_up(from_params({"type": "2bit"}), [np.zeros(12, np.uint8), np.zeros(8, np.uint8)], np.zeros(40, np.float32))


# ---------------------------------------------------------------- composition


def test_a_chain_codes_the_numbers_that_topk_sends() -> None:
    codec = chain(ErrorFeedback(TopK(ratio=0.01)), Cast("fp16"))
    assert codec == from_params({"type": "topk", "ratio": 0.01, "values": "fp16"})
    assert codec.max_bytes(1000) == 10 * (4 + 2)
    # What rounding loses is in the residual, too.
    g = np.zeros(1000, np.float32)
    g[3] = 1 / 3
    state = codec.begin(1000, FLOAT32)
    sent(codec, g, state)
    assert state is not None
    assert state[3] == g[3] - np.float32(np.float16(g[3])) != 0


def test_a_chain_of_one_is_that_one() -> None:
    assert chain(Int8()) == Int8()


@pytest.mark.parametrize(
    "parts",
    [
        (Cast("fp16"), Int8()),
        (TopK(k=3), Cast("fp16"), Int8()),
        (TopK(k=3), ErrorFeedback(Int8())),
        (TopK(k=3), TopK(k=2)),
    ],
)
def test_chains_that_make_no_sense(parts: tuple[Codec, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"chain|around|travel as"):
        chain(*parts)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"type": "3bit"}, "unknown type of compression '3bit'; there are 1bit, 2bit, bf16, fp16, fp32, int8, topk"),
        ({"type": None}, "unknown type of compression None"),
        ({"threshold": 0.5}, 'a dict with a "type"'),
        ("2bit", 'a dict with a "type"'),
        ({"type": "2bit", "treshold": 1}, "no parameter 'treshold'; it takes type, threshold, ef"),
        ({"type": "fp16", "threshold": 1}, "no parameter 'threshold'; it takes type, ef"),
        ({"type": "2bit", "threshold": 0}, "above zero, got 0"),
        ({"type": "2bit", "threshold": -1}, "above zero, got -1"),
        ({"type": "2bit", "threshold": 1e-60}, "above zero, got 1e-60"),
        ({"type": "2bit", "threshold": "0.5"}, "must be a number float32 can hold: '0.5'"),
        ({"type": "1bit", "threshold": math.inf}, "must be a number float32 can hold: inf"),
        ({"type": "1bit", "threshold": 1e300}, "must be a number float32 can hold: 1e"),
        ({"type": "2bit", "threshold": math.nan}, "must be a number float32 can hold: nan"),
        ({"type": "1bit", "scale": 0}, "the scale of 1bit compression must be above zero, got 0"),
        ({"type": "2bit", "threshold": 10**400}, "must be a number float32 can hold"),
        ({"type": "2bit", "ef": 1}, "must be True or False, got 1"),
        ({"type": "topk"}, 'one of "ratio" and "k"'),
        ({"type": "topk", "k": 2, "ratio": 0.1}, 'one of "ratio" and "k"'),
        ({"type": "topk", "ratio": 0}, "above 0 and at most 1, got 0"),
        ({"type": "topk", "ratio": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"type": "topk", "k": 0}, "a whole number above 0, got 0"),
        ({"type": "topk", "k": 2.5}, "a whole number above 0, got 2.5"),
        ({"type": "topk", "k": 2, "values": "2bit"}, "one of fp32, fp16, bf16, int8, got '2bit'"),
    ],
)
def test_wrong_parameters(params: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        from_params(params)
    assert message in str(raised.value)


@pytest.mark.parametrize("params", EVERY, ids=named)
def test_integers_cannot_be_compressed(params: dict[str, Any]) -> None:
    codec = from_params(params)
    with pytest.raises(UnsupportedTypeError, match="not for int64"):
        codec.begin(4, DTYPES["int64"])
    with pytest.raises(ArgumentError, match="int64"):
        codec.encode(np.zeros(4, np.int64), None, bytearray(100))


@pytest.mark.parametrize("params", EVERY, ids=named)
def test_arrays_and_memory_that_do_not_fit(params: dict[str, Any]) -> None:
    codec = from_params(params)
    state = codec.begin(40, FLOAT32)
    with pytest.raises(ArgumentError, match="writable memory"):
        codec.encode(gradient(40), state, bytearray(codec.max_bytes(40) - 1))
    with pytest.raises(ArgumentError, match="writable memory"):
        codec.encode(gradient(40), state, memoryview(bytes(codec.max_bytes(40))))
    with pytest.raises(ArgumentError, match="contiguous"):
        codec.encode(gradient(80)[::2], state, bytearray(1000))
    with pytest.raises(ArgumentError, match="contiguous"):
        codec.decode(bytes(codec.max_bytes(40)), np.zeros((8, 5), np.float32))
    with pytest.raises(ArgumentError, match="residual"):
        codec.encode(gradient(40), None if state is not None else np.zeros(40, np.float32), bytearray(1000))


def test_residuals_of_something_else() -> None:
    with pytest.raises(ArgumentError, match="should be float32 of"):
        from_params({"type": "2bit"}).begin(4, FLOAT32, saved=np.zeros(5, np.float32))
    with pytest.raises(ArgumentError, match="without error feedback has none"):
        from_params({"type": "fp16"}).begin(4, FLOAT32, saved=np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match="error feedback around"):
        ErrorFeedback(ErrorFeedback(Int8()))


@pytest.mark.parametrize("params", EVERY, ids=named)
@pytest.mark.parametrize("more", [-1, 1])
def test_codes_of_another_length(params: dict[str, Any], more: int) -> None:
    codec = from_params(params)
    with pytest.raises(WireError, match="for 40 elements, which take"):
        codec.decode(bytes(codec.max_bytes(40) + more), np.zeros(40, np.float32))


@pytest.mark.parametrize("positions", [[1, 40], [5, 5], [7, 3], [0, 2**32 - 1]])
@pytest.mark.parametrize("accumulate", [False, True])
def test_positions_that_a_liar_sends(positions: list[int], accumulate: bool) -> None:
    data = np.array(positions, "<u4").tobytes() + bytes(8)
    with pytest.raises(WireError, match="not ascending, or not below 40"):
        TopK(k=2).decode(data, np.zeros(40, np.float32), accumulate)


@pytest.mark.parametrize("params", EVERY, ids=named)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_whatever_bytes_come_are_numbers_or_an_error(params: dict[str, Any], data: st.DataObject) -> None:
    codec = from_params(params)
    length = data.draw(st.integers(0, 600))
    nbytes = codec.max_bytes(length)
    codes = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    around = np.zeros(length + 2, np.float32)
    try:
        codec.decode(codes, around[1:-1], accumulate=data.draw(st.booleans()))
    except WireError:
        assert params["type"] == "topk"
    assert around[0] == around[-1] == 0
