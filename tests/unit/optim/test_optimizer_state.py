"""States of one piece of a weight: blocks, pieces, half precision, rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ConfigError, UnsupportedTypeError
from reigen.kernels import optimizer_update
from reigen.kernels.half_precision import narrow_bfloat16, widen_bfloat16
from reigen.kernels.optimizer_update import BLOCK
from reigen.optim import OPTIMIZERS, MultiFactorScheduler, Slot, create, optimizer_state
from reigen.types import dtype_named
from tests.unit.optim.formulas import trained

SIZE = 2 * BLOCK + 77
FLOAT32 = dtype_named("float32")
ELEMENTWISE = [name for name, kind in OPTIMIZERS.items() if kind.is_elementwise]
NUMBERS: dict[str, Any] = {"learning_rate": 0.05, "wd": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.7}
WITH_MOMENTUM = {"sgd": {"momentum": 0.9}, "nag": {"momentum": 0.9}, "lars": {"momentum": 0.9}}


def optimizer_named(name: str, **more: Any) -> Any:
    return create(name, **NUMBERS, **WITH_MOMENTUM.get(name, {}), **more)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bits_do_not_depend_on_how_a_weight_is_cut(name: str) -> None:
    """In one piece; in cells of their own; in blocks that threads update in any order."""
    optimizer = optimizer_named(name)
    whole, cells, threaded = normal(1, SIZE), normal(1, SIZE), normal(1, SIZE)
    borders = [0, 1, 33, BLOCK + 32, BLOCK + 64, SIZE]
    ranges = list(pairwise(borders))
    slot, shared = Slot(optimizer, whole, FLOAT32), Slot(optimizer, threaded, FLOAT32)
    slots = [Slot(optimizer, cells[a:b], FLOAT32) for a, b in ranges]
    with ThreadPoolExecutor(4) as pool:
        for t in range(3):
            gradient = normal(10 + t, SIZE)
            slot.update(optimizer, whole, gradient)
            for one, (a, b) in zip(slots, ranges, strict=True):
                one.update(optimizer, cells[a:b], gradient[a:b])
            step = shared.begin(optimizer)
            waited = [pool.submit(shared.apply, step, threaded[a:b], gradient[a:b], a) for a, b in reversed(ranges)]
            for one in waited:
                one.result()
    np.testing.assert_array_equal(cells, whole)
    np.testing.assert_array_equal(threaded, whole)
    for state in slot.arrays:
        np.testing.assert_array_equal(shared.arrays[state], slot.arrays[state])


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.empty(len(values), np.uint16)
    narrow_bfloat16(values.copy(), bits)
    return bits


def wide(values: NDArray[Any]) -> NDArray[np.float64]:
    if values.dtype != np.uint16:
        return values.astype(np.float64)
    result = np.empty(len(values), np.float32)
    widen_bfloat16(values, result)
    return result.astype(np.float64)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_weights_are_updated_through_float32(name: str, half: str) -> None:
    optimizer = optimizer_named(name, multi_precision=True)
    values = normal(2, BLOCK + 9)
    weight: NDArray[Any] = values.astype(np.float16) if half == "float16" else bfloat16(values)
    gradients = [normal(20 + t, BLOCK + 9) for t in range(4)]
    stored = [g.astype(np.float16) if half == "float16" else bfloat16(g) for g in gradients]
    start = wide(weight)
    slot = Slot(optimizer, weight, dtype_named(half))
    for gradient in stored:
        slot.update(optimizer, weight, gradient)
    truth = trained(optimizer, start, [wide(gradient) for gradient in stored])
    close = np.isclose(slot.arrays["master"], truth, rtol=2e-5, atol=5e-6)
    assert close.mean() > 0.9999  # the sign of a sum that is 0 but for rounding
    exact = slot.arrays["master"].astype(np.float16) if half == "float16" else bfloat16(slot.arrays["master"])
    np.testing.assert_array_equal(weight, exact)  # rounded once from the copy


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_without_a_copy_a_half_weight_is_rounded_after_each_update(half: str) -> None:
    optimizer = create("sgd", learning_rate=1e-4)
    weight: NDArray[Any] = np.ones(4, np.float16) if half == "float16" else bfloat16(np.ones(4, np.float32))
    before, ones = weight.copy(), np.ones(4, np.float32)
    slot = Slot(optimizer, weight, dtype_named(half))
    for _ in range(50):
        slot.update(optimizer, weight, ones, grad_type=FLOAT32)
    np.testing.assert_array_equal(weight, before)  # 1 - 1e-4 rounds to 1
    kept = Slot(optimizer.replace(multi_precision=True), weight, dtype_named(half))
    for _ in range(50):
        kept.update(optimizer, weight, ones, grad_type=FLOAT32)
    np.testing.assert_allclose(wide(weight), 1 - 50e-4, rtol=4e-3)
    assert not np.array_equal(weight, before)


@pytest.mark.parametrize("grad_name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("weight_name", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_may_have_another_type(weight_name: str, grad_name: str) -> None:
    """With numbers that every type holds exactly."""
    exact = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
    values, numbers = np.array([1.0, -2.0, 0.5], np.float32), np.array([4.0, 0.5, -3.0], np.float32)
    weight = bfloat16(values) if weight_name == "bfloat16" else values.astype(exact[weight_name])
    grad = bfloat16(numbers) if grad_name == "bfloat16" else numbers.astype(exact[grad_name])
    optimizer = create("sgd", learning_rate=0.25)
    Slot(optimizer, weight, dtype_named(weight_name)).update(optimizer, weight, grad, grad_type=dtype_named(grad_name))
    assert wide(weight).tolist() == [0.0, -2.125, 1.25]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("half", [False, True])
def test_rows_alone_are_updated_or_the_others_with_zeros(
    name: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lazy rule: rows as if they were weights of their own. Another: as with a dense gradient that is 0 elsewhere."""
    for module in (optimizer_state, optimizer_update):
        monkeypatch.setattr(module, "BLOCK", 1000)  # seven rows and a part of one
    optimizer, num_rows, length = optimizer_named(name, multi_precision=half), 300, 130
    dtype = dtype_named("float16" if half else "float32")
    weight = normal(3, num_rows, length).astype(dtype.storage)
    expected = weight.copy()
    slot = Slot(optimizer, weight.reshape(-1), dtype)
    rows = [np.array([0, 5, 299]), np.arange(0, 300, 2), np.array([], np.int64), np.array([5])]
    reference = Slot(optimizer, expected.reshape(-1), dtype)
    single = {row: Slot(optimizer, expected[row], dtype) for row in range(num_rows)}
    for t, chosen in enumerate(rows):
        gradient = normal(30 + t, len(chosen), length).astype(dtype.storage)
        slot.update_rows(optimizer, weight, chosen, gradient)
        if optimizer.is_lazy:
            for row, one in zip(chosen, gradient, strict=True):
                single[row].count = t  # updates are counted by the key, not by the row
                single[row].update(optimizer, expected[row], one)
        else:
            dense = np.zeros_like(expected)
            dense[chosen] = gradient
            reference.update(optimizer, expected.reshape(-1), dense.reshape(-1))
    np.testing.assert_array_equal(weight, expected)
    assert slot.count == len(rows)


def test_rows_that_do_not_fit_are_refused() -> None:
    optimizer, weight = create("sgd"), np.ones((4, 2), np.float32)
    slot = Slot(optimizer, weight.reshape(-1), FLOAT32)
    for rows, shape in (
        ([0, 0], (2, 2)),
        ([1, 0], (2, 2)),
        ([4], (1, 2)),
        ([-1], (1, 2)),
        ([0], (2, 2)),
        ([0], (1, 3)),
    ):
        with pytest.raises(ArgumentError):
            slot.update_rows(optimizer, weight, np.array(rows), np.ones(shape, np.float32))
    with pytest.raises(ArgumentError, match="contiguous"):
        slot.update_rows(optimizer, weight.T, np.array([0]), np.ones((1, 4), np.float32))
    assert slot.count == 0
    np.testing.assert_array_equal(weight, np.ones((4, 2)))


def test_a_schedule_may_count_otherwise_than_the_bias_correction() -> None:
    """Two workers, each applied by itself: the schedule sees each one's own count, Adam all updates."""
    schedule = MultiFactorScheduler(step=[2], factor=0.1, base_lr=1.0)
    plain, adam = create("sgd", lr_scheduler=schedule), create("adam", lr_scheduler=schedule, epsilon=0.0)
    weight = np.zeros(1)
    slot = Slot(plain, weight, dtype_named("float64"))
    for own in (1, 1, 2, 2, 3, 3):
        slot.update(plain, weight, np.ones(1), num_update=own)
    assert weight[0] == pytest.approx(-4.2)
    weight[0] = 0.0
    slot = Slot(adam, weight, dtype_named("float64"))
    for own in (1, 1, 2):
        slot.update(adam, weight, np.ones(1), num_update=own)
    assert weight[0] == pytest.approx(-3.0)  # corrected by t = 1, 2, 3, each step is the rate
    assert slot.count == 3


def test_lars_corrects_momentum_when_the_rate_is_set() -> None:
    first = create("lars", learning_rate=0.1, momentum=0.5, eta=1.0)
    second = first.with_learning_rate(0.05)
    weight, gradient = np.array([3.0, 4.0]), np.array([0.6, 0.8])
    slot = Slot(first, weight, dtype_named("float64"))
    slot.update(first, weight, gradient)  # |w| = 5, |g| = 1: a step of 0.1 * 5 * g
    assert weight.tolist() == pytest.approx([2.7, 3.6])
    slot.update(second, weight, gradient)  # 0.5 * (0.05 / 0.1) * the step before, and 0.05 * 4.5 * g
    assert weight.tolist() == pytest.approx([2.7 - 0.075 - 0.135, 3.6 - 0.1 - 0.18])


def test_updates_may_count_from_elsewhere() -> None:
    optimizer = create("sgd", lr_scheduler=MultiFactorScheduler(step=[10], factor=0.1, base_lr=1.0), begin_num_update=9)
    weight = np.zeros(1)
    slot = Slot(optimizer, weight, dtype_named("float64"))
    slot.update(optimizer, weight, np.ones(1))
    slot.update(optimizer, weight, np.ones(1))
    assert (weight[0], slot.count) == (pytest.approx(-1.1), 11)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_layer_wise_rule_refuses_a_part_of_a_weight(name: str) -> None:
    optimizer, weight = create(name), np.ones(10, np.float32)
    slot = Slot(optimizer, weight, FLOAT32)
    with pytest.raises(ArgumentError, match="needs all 10 elements, not 5"):
        slot.apply(slot.begin(optimizer), weight[:5], np.ones(5, np.float32))


def test_empty_weights_and_wrong_types() -> None:
    empty = np.zeros(0, np.float32)
    for name in OPTIMIZERS:
        optimizer = create(name)
        Slot(optimizer, empty, FLOAT32).update(optimizer, empty, empty)
        Slot(optimizer, empty, FLOAT32).update_rows(
            optimizer, empty.reshape(3, 0), np.array([1]), np.zeros((1, 0), np.float32)
        )
    with pytest.raises(UnsupportedTypeError, match="int32"):
        Slot(create("sgd"), np.zeros(2, np.int32), dtype_named("int32"))
    with pytest.raises(ConfigError, match="the states are momentum; adam with these numbers keeps mean, variance"):
        Slot(create("sgd", momentum=0.9), np.zeros(2, np.float32), FLOAT32).check_fits(create("adam"))
