"""Every update rule, against float64 formulas, MXNet 1.9.1's own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.kernels import optimizer_update
from reigen.optim import OPTIMIZERS, SGD, FactorScheduler, Optimizer, Updater, create
from reigen.types import dtype_named
from tests.unit.optim.formulas import FORMULAS, trained
from tests.unit.optim.mxnet_numbers import (
    GRADIENTS,
    HALF_PARAMETERS,
    MXNET,
    MXNET_HALF,
    MXNET_SPARSE,
    SPARSE_ROWS,
    WEIGHT,
)

#: Every branch of every rule: with and without momentum, decay, clipping, schedule.
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1},
    "sgd, decay": {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 0.25},
    "sgd, all": {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9, "clip_gradient": 0.7, "rescale_grad": 0.5},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "nag, all": {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9, "clip_gradient": 0.7},
    "nag, no momentum": {"learning_rate": 0.1, "wd": 0.01},
    "signum": {"wd": 0.01, "wd_lh": 0.02},
    "signum, no momentum": {"momentum": 0.0, "wd": 0.01},
    "adam": {},
    "adam, all": {"learning_rate": 0.02, "wd": 0.1, "clip_gradient": 0.7, "rescale_grad": 0.5, "epsilon": 0.01},
    "adamw": {"wd": 0.01},
    "adamw, all": {"learning_rate": 0.02, "wd": 0.1, "clip_gradient": 0.7, "rescale_grad": 0.5, "epsilon": 0.01},
    "adagrad": {},
    "adagrad, all": {"learning_rate": 0.02, "wd": 0.1, "clip_gradient": 0.7, "rescale_grad": 0.5, "eps": 0.01},
    "rmsprop": {},
    "rmsprop, all": {"learning_rate": 0.02, "wd": 0.1, "clip_gradient": 0.7, "rescale_grad": 0.5, "clip_weights": 1.0},
    "rmsprop, centred": {"centered": True, "epsilon": 0.01, "gamma2": 0.8},
    "ftrl": {},
    "ftrl, all": {"learning_rate": 0.05, "wd": 0.1, "clip_gradient": 0.7, "rescale_grad": 0.5, "lamda1": 0.3},
    "lamb": {"wd": 0.01},
    "lamb, all": {"learning_rate": 0.02, "clip_gradient": 0.7, "lower_bound": 5.0, "upper_bound": 7.0},
    "lamb, not corrected": {"bias_correction": False, "upper_bound": 0.5},
    "lars": {"wd": 0.01, "momentum": 0.9},
    "lars, no momentum": {"wd": 0.01, "clip_gradient": 0.7, "eps": 0.1},
    "test": {"rescale_grad": 0.25},
}


def made(variant: str, **more: Any) -> Optimizer:
    return create(variant.partition(",")[0], **VARIANTS[variant], **more)


def data(size: int, dtype: Any = np.float64, steps: int = 4) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    random = np.random.default_rng(size)
    return random.standard_normal(size).astype(dtype), [
        random.standard_normal(size).astype(dtype) for _ in range(steps)
    ]


def updated(optimizer: Optimizer, weight: NDArray[Any], gradients: list[NDArray[Any]], key: Any = 0) -> NDArray[Any]:
    result, updater = weight.copy(), Updater(optimizer)
    for gradient in gradients:
        before = gradient.copy()
        updater(key, gradient, result)
        np.testing.assert_array_equal(gradient, before)  # only read
    return result


def test_there_is_a_formula_for_every_optimizer() -> None:
    assert set(FORMULAS) == set(OPTIMIZERS) == {variant.partition(",")[0] for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1, 64, 133])
def test_float64_weights_follow_the_formulas(variant: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_update, "BLOCK", 64)
    weight, gradients = data(size)
    optimizer = made(variant)
    result = updated(optimizer, weight, gradients)
    np.testing.assert_allclose(result, trained(optimizer, weight, gradients), rtol=1e-10, atol=1e-12)
    assert not np.array_equal(result, weight)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_weights_follow_the_formulas(variant: str) -> None:
    weight, gradients = data(optimizer_update.BLOCK + 3, np.float32)
    optimizer = made(variant)
    result = updated(optimizer, weight, gradients)
    assert result.dtype == np.float32
    truth = trained(optimizer, weight.astype(np.float64), gradients)
    if "signum" in variant:  # a sum that is zero but for rounding has no sign to agree on
        assert np.mean(np.abs(result - truth) > 1e-5) < 1e-4
    else:
        np.testing.assert_allclose(result, truth, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "test"])
def test_a_schedule_decides_about_each_update(variant: str) -> None:
    weight, gradients = data(100)
    schedule = FactorScheduler(step=2, factor=0.3, warmup_steps=2, warmup_begin_lr=0.001)
    rate = VARIANTS[variant].get("learning_rate", 0.05)
    optimizer = made(variant).replace(learning_rate=rate, lr_scheduler=schedule)
    constant = optimizer.replace(lr_scheduler=None)
    result = updated(optimizer, weight, gradients)
    truth = trained(optimizer, weight, gradients)
    if optimizer.name == "nag":  # the rate is in the state: the formula with the rate outside holds for a constant one
        assert not np.array_equal(result, updated(constant, weight, gradients))
        return
    np.testing.assert_allclose(result, truth, rtol=1e-10, atol=1e-12)
    assert not np.allclose(result, trained(constant, weight, gradients))


@pytest.mark.parametrize("case", MXNET)
def test_numbers_are_those_of_mxnet(case: str) -> None:
    name, parameters, expected = MXNET[case]
    gradients = [np.array(gradient, np.float32) for gradient in GRADIENTS]
    result = updated(create(name, **parameters), np.array(WEIGHT, np.float32), gradients)
    np.testing.assert_allclose(result, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("case", MXNET_SPARSE)
def test_sparse_updates_are_those_of_mxnet(case: str) -> None:
    name, parameters, expected = MXNET_SPARSE[case]
    updater, weight = Updater(create(name, **parameters)), np.array(WEIGHT, np.float32).reshape(3, 2)
    for gradient, rows in zip(GRADIENTS, SPARSE_ROWS, strict=True):
        updater.update_rows("w", np.array(rows), np.array(gradient, np.float32).reshape(3, 2)[rows], weight)
    np.testing.assert_allclose(weight.reshape(-1), expected, rtol=3e-6, atol=3e-6)


def test_float16_with_a_float32_copy_is_that_of_mxnet() -> None:
    gradients = [np.array(gradient, np.float16) for gradient in GRADIENTS]
    result = updated(create("sgd", **HALF_PARAMETERS), np.array(WEIGHT, np.float16), gradients)
    assert result.tolist() == MXNET_HALF


def test_the_test_optimizer_is_exact_in_every_type() -> None:
    """1 + r * k * n (n + 1) / 2, when n workers push rank + 1 in each of k rounds."""
    optimizer, workers, rounds = create("Test", rescale_grad=2.0), 5, 8
    for name in ("float16", "float32", "float64"):
        weight = np.ones(50, name)
        gradient = np.full(50, workers * (workers + 1) // 2, name)
        assert set(updated(optimizer, weight, [gradient] * rounds).tolist()) == {1 + 2 * rounds * 15}
    bits = np.full(50, 0x3F80, np.uint16)  # bfloat16's 1
    updater = Updater(optimizer)
    updater(0, np.full(50, 0x4170, np.uint16), bits, dtype_named("bfloat16"))  # 15
    assert set(bits.tolist()) == {0x41F8}  # 31


def test_multipliers_belong_to_keys_and_names() -> None:
    weight, gradients = data(10)
    optimizer = create("sgd", learning_rate=0.1, wd=0.5, momentum=0.9)
    by_key = optimizer.replace(lr_mult={3: 0.5}, wd_mult={3: 0.0, "bias": 7.0})
    truth = trained(optimizer.replace(learning_rate=0.05, wd=0.0), weight, gradients)
    np.testing.assert_allclose(updated(by_key, weight, gradients, key=3), truth, rtol=1e-12)
    np.testing.assert_allclose(updated(by_key, weight, gradients, key=4), trained(optimizer, weight, gradients))
    by_name = optimizer.replace(lr_mult={"fc.bias": 0.5}, wd_mult={"fc.bias": 0}, param_idx2name={3: "fc.bias"})
    np.testing.assert_allclose(updated(by_name, weight, gradients, key=3), truth, rtol=1e-12)
    direct = weight.copy()
    optimizer.update(direct, gradients[0], [np.zeros(10)], 1, lr_mult=0.5, wd_mult=0.0)
    np.testing.assert_allclose(direct, weight - 0.05 * gradients[0], rtol=1e-12)


def test_lars_leaves_biases_and_normalization_out() -> None:
    weight, gradients = data(10)
    optimizer = create("lars", learning_rate=0.1, momentum=0.9, param_idx2name={1: "bn.gamma"})
    plain = updated(create("sgd", learning_rate=0.1, momentum=0.9), weight, gradients)
    np.testing.assert_array_equal(updated(optimizer, weight, gradients, key="fc.bias"), plain)
    np.testing.assert_array_equal(updated(optimizer, weight, gradients, key=1), plain)
    assert not np.allclose(updated(optimizer, weight, gradients, key="fc.weight"), plain)
    assert not np.allclose(updated(optimizer.replace(skip=()), weight, gradients, key="fc.bias"), plain)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_norm_of_zero_leaves_the_rate_as_it_is(name: str) -> None:
    optimizer, zeros = create(name, learning_rate=0.1), np.zeros(4)
    gradient = np.array([1.0, -1.0, 1.0, 1.0])
    assert np.abs(updated(optimizer, zeros, [gradient]) + 0.1 * gradient).max() < 1e-6
    np.testing.assert_array_equal(updated(optimizer, np.ones(4), [zeros]), np.ones(4))


def test_a_centred_rmsprop_survives_a_constant_gradient() -> None:
    optimizer = create("rmsprop", centered=True, epsilon=1e-12, gamma1=0.5)
    result = updated(optimizer, np.ones(64, np.float32), [np.full(64, 0.3, np.float32)] * 60)
    assert np.isfinite(result).all()


def test_ftrl_learns_nothing_at_rate_0() -> None:
    optimizer = create("ftrl", learning_rate=0.0)
    np.testing.assert_array_equal(updated(optimizer, np.ones(3), [np.ones(3)]), np.ones(3))


def test_nan_reaches_the_weight() -> None:
    for variant in VARIANTS:
        gradient = np.array([np.nan, 1.0])
        result = updated(made(variant), np.ones(2), [gradient])
        assert np.isnan(result[0]), variant


def test_a_small_decay_is_not_rounded_away() -> None:
    """A factor 1 - 1e-7 would be 1 - 1.2e-7 in float32; here the weight shrinks by what was asked for, on average."""
    weight = np.random.default_rng(1).uniform(1.0, 2.0, 1 << 16).astype(np.float32)
    before = weight.astype(np.float64).sum()
    optimizer, gradient = SGD(learning_rate=0.5, wd=2e-7), np.zeros_like(weight)
    for t in range(1, 11):
        optimizer.update(weight, gradient, (), t)
    lost = 1 - weight.astype(np.float64).sum() / before
    assert lost == pytest.approx(10 * 1e-7, rel=0.05)


def test_arrays_that_do_not_fit_are_refused() -> None:
    optimizer, ones = create("sgd", momentum=0.9), np.ones(3, np.float32)
    with pytest.raises(ArgumentError, match="keeps 1 states, not 0"):
        optimizer.update(ones, ones, (), 1)
    with pytest.raises(ArgumentError, match="equally long"):
        optimizer.update(ones, np.ones(2, np.float32), [np.zeros(3, np.float32)], 1)
    with pytest.raises(UnsupportedTypeError, match="int32"):
        optimizer.update(ones, np.ones(3, np.int32), [np.zeros(3, np.float32)], 1)
    with pytest.raises(UnsupportedTypeError, match="float16"):
        optimizer.update(ones.astype(np.float16), ones, [np.zeros(3, np.float32)], 1)
