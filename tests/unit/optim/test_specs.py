"""Optimizers and schedules as names and numbers."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.errors import ArgumentError, ConfigError
from reigen.optim import (
    LARS,
    OPTIMIZERS,
    SGD,
    Adam,
    CosineScheduler,
    FactorScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    create,
    from_spec,
)
from reigen.optim.schedules import SCHEDULES
from tests.unit.optim.mxnet_numbers import MXNET_SCHEDULES


@pytest.mark.parametrize("case", range(len(MXNET_SCHEDULES)))
def test_schedules_are_those_of_mxnet(case: int) -> None:
    name, parameters, rates = MXNET_SCHEDULES[case]
    schedule = SCHEDULES[name](**parameters)
    assert [schedule(n) for n in range(1, 11)] == pytest.approx(rates, abs=1e-8)


def test_a_schedule_has_no_memory() -> None:
    schedule = MultiFactorScheduler(step=[10, 20], factor=0.1, base_lr=1.0)
    assert [schedule(n) for n in (25, 5, 15, 10, 11)] == pytest.approx([0.01, 1.0, 0.1, 1.0, 0.1])


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        FactorScheduler(step=7, factor=0.5, warmup_steps=3),
        MultiFactorScheduler(step=[3, 9], factor=0.1),
        PolyScheduler(max_update=100, pwr=3),
        CosineScheduler(max_update=100, final_lr=0.001, warmup_steps=5, warmup_mode="constant"),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_spec_makes_the_same_optimizer_again(name: str, schedule: Any) -> None:
    optimizer = create(name, wd=0.1, lr_scheduler=schedule, lr_mult={"a": 2, 7: 0.5}, param_idx2name={7: "b"})
    spec = optimizer.to_spec()
    assert from_spec(spec) == optimizer
    assert from_spec(json.loads(json.dumps(spec))) == optimizer
    assert from_spec(msgspec.msgpack.decode(msgspec.msgpack.encode(spec))) == optimizer
    assert [from_spec(spec).rate_of(n) for n in (1, 50)] == [optimizer.rate_of(n) for n in (1, 50)]


def test_names_are_found_in_upper_and_lower_case() -> None:
    assert create("SGD", learning_rate=0.1) == create("sgd", learning_rate=0.1) == SGD(learning_rate=0.1)
    assert create("AdaGrad").name == "adagrad"
    optimizer = Adam()
    assert create(optimizer) is optimizer


DEFAULT_RATES = {"adam": 0.001, "adamw": 0.001, "rmsprop": 0.001, "lamb": 0.001, "ftrl": 0.1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_default_rates_are_those_of_mxnet(name: str) -> None:
    assert create(name).learning_rate == DEFAULT_RATES.get(name, 0.01)


def test_a_given_rate_replaces_that_of_the_schedule_and_a_default_does_not() -> None:
    schedule = PolyScheduler(max_update=10, base_lr=0.5)
    assert Adam(lr_scheduler=schedule).learning_rate == 0.5
    given = Adam(lr_scheduler=schedule, learning_rate=0.25)
    assert given.lr_scheduler == PolyScheduler(max_update=10, base_lr=0.25)
    assert given.rate_of(5) == pytest.approx(0.25 * 0.5**2)


def test_an_optimizer_never_changes() -> None:
    optimizer = SGD(learning_rate=0.1, momentum=0.9)
    with pytest.raises(FrozenInstanceError):
        optimizer.learning_rate = 0.2  # type: ignore[misc]
    assert optimizer.with_learning_rate(0.2) == SGD(learning_rate=0.2, momentum=0.9)
    assert optimizer.replace(rescale_grad=0.5).rescale_grad == 0.5
    with pytest.raises(ArgumentError, match="comes from the schedule 'poly'"):
        Adam(lr_scheduler=PolyScheduler(max_update=3)).with_learning_rate(0.1)


def test_numbers_of_numpy_become_plain() -> None:
    spec = SGD(learning_rate=np.float32(0.5), begin_num_update=np.int64(3), momentum=0).to_spec()
    assert type(spec["learning_rate"]) is float
    assert type(spec["begin_num_update"]) is int
    assert type(spec["momentum"]) is float


def test_clipping_can_be_turned_off_as_in_mxnet() -> None:
    for off in (None, 0, -1.0):
        assert SGD(clip_gradient=off).clip_gradient is None


WRONG: list[tuple[Any, str]] = [
    ({"name": "sgdd"}, "no optimizer is called 'sgdd'; there are adagrad, adam, adamw, ftrl, lamb, lars, nag, rmsprop"),
    ({}, "no optimizer is called None"),
    ({"name": ["sgd"]}, "no optimizer is called"),
    ("sgd", "a dict of names"),
    ({1: 2}, "a dict of names"),
    ({"name": "sgd", "momentun": 0.9}, "sgd has no parameter momentun; it has begin_num_update, clip_gradient"),
    ({"name": "sgd", "learning_rate": "0.1"}, "learning_rate='0.1' must be a number"),
    ({"name": "sgd", "learning_rate": True}, "learning_rate=True must be a number"),
    ({"name": "sgd", "learning_rate": float("nan")}, "must be finite"),
    ({"name": "sgd", "momentum": 1.0}, "momentum=1.0 must be below 1.0"),
    ({"name": "sgd", "momentum": None}, "momentum=None must be a number"),
    ({"name": "sgd", "wd": -1}, "wd=-1 must be at least 0.0"),
    ({"name": "sgd", "lazy_update": 1}, "lazy_update=1 must be True or False"),
    ({"name": "sgd", "begin_num_update": 1.5}, "begin_num_update=1.5 must be a whole number"),
    ({"name": "adam", "beta2": -0.1}, "beta2=-0.1 must be at least"),
    ({"name": "sgd", "lr_mult": 3}, "lr_mult must be a dict"),
    ({"name": "sgd", "lr_mult": [[1, 2, 3]]}, "lr_mult must be a dict"),
    ({"name": "sgd", "lr_mult": [[[1], 2]]}, "lr_mult must be a dict"),
    ({"name": "sgd", "lr_mult": {"a": -1}}, "must be a finite number, at least 0"),
    ({"name": "sgd", "lr_mult": {1.5: 1}}, "1.5 is no key"),
    ({"name": "sgd", "learning_rate": 10**400}, "is too large"),
    ({"name": "sgd", "begin_num_update": 2**64}, "is too large"),
    ({"name": "sgd", "wd_mult": {"a": 10**400}}, "must be a finite number"),
    ({"name": "lars", "skip": "bias"}, "list of ends of names"),
    ({"name": "sgd", "lr_scheduler": 5}, "a dict of names"),
    ({"name": "sgd", "lr_scheduler": {"name": "step"}}, "no schedule is called 'step'; there are factor, multifactor"),
    ({"name": "sgd", "lr_scheduler": {"name": "factor"}}, "factor needs step"),
    ({"name": "sgd", "lr_scheduler": {"name": "factor", "step": 0}}, "step=0 must be at least 1"),
    ({"name": "sgd", "lr_scheduler": {"name": "factor", "step": 1, "factor": 2}}, "must be at most 1.0"),
    ({"name": "sgd", "lr_scheduler": {"name": "multifactor", "step": [3, 3]}}, "increasing list"),
    ({"name": "sgd", "lr_scheduler": {"name": "multifactor", "step": 5}}, "increasing list"),
    ({"name": "sgd", "lr_scheduler": {"name": "poly", "max_update": 2, "warmup_steps": 2}}, "above warmup_steps=2"),
    ({"name": "sgd", "lr_scheduler": {"name": "poly", "max_update": 9, "warmup_mode": "x"}}, "neither 'linear' nor"),
    (
        {"name": "sgd", "lr_scheduler": {"name": "poly", "max_update": 9, "warmup_steps": 1, "warmup_begin_lr": 1.0}},
        "above the rate that the warm-up leads to",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_spec_is_refused_in_words(case: int) -> None:
    spec, words = WRONG[case]
    with pytest.raises(ConfigError) as refused:
        from_spec(spec)
    assert words in str(refused.value)


def test_code_is_no_optimizer() -> None:
    class Mine(SGD):
        pass

    with pytest.raises(ConfigError, match="never as code"):
        create(Mine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="given with a sgd optimizer"):
        create(SGD(), momentum=0.9)
    with pytest.raises(ConfigError, match="no schedule of reigen"):
        SGD(lr_scheduler=lambda n: 0.1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sgd has no momentun"):
        SGD().replace(momentun=0.9)
    with pytest.raises(ConfigError, match="list of ends"):
        LARS(skip=[""])


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "linear", "factor", "poly"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "step", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)
_PARAMETERS = sorted({item.name for kind in (*OPTIMIZERS.values(), *SCHEDULES.values()) for item in fields(kind)})
_SPECS = st.dictionaries(st.sampled_from(_PARAMETERS), _PLAIN, max_size=3)


@given(st.sampled_from(sorted(OPTIMIZERS)), _SPECS, st.none() | st.tuples(st.sampled_from(sorted(SCHEDULES)), _SPECS))
def test_any_plain_values_make_an_optimizer_that_works_or_a_named_error(
    name: str, spec: dict[str, Any], schedule: tuple[str, dict[str, Any]] | None
) -> None:
    """What another process says may make no sense; it must not surprise the server."""
    if schedule is not None:
        spec = {**spec, "lr_scheduler": {**schedule[1], "name": schedule[0]}}
    try:
        optimizer = from_spec({**spec, "name": name})
    except ConfigError:
        return
    assert from_spec(optimizer.to_spec()) == optimizer
    optimizer.update(np.ones(2), np.ones(2), [np.zeros(2)] * optimizer.num_states, optimizer.begin_num_update + 1)
