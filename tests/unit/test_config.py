"""Knobs: defaults, variables, origins, errors."""

from __future__ import annotations

from dataclasses import fields

import pytest

from reigen.config import Config, load
from reigen.errors import ConfigError

VARIABLES = {
    "REIGEN_DEADLINE": ("deadline_seconds", "1.5", 1.5),
    "REIGEN_START_TIMEOUT": ("start_timeout_seconds", "7", 7.0),
    "HOROVOD_START_TIMEOUT": ("start_timeout_seconds", "8", 8.0),
    "REIGEN_FUSION_THRESHOLD": ("fusion_threshold_bytes", "0", 0),
    "HOROVOD_FUSION_THRESHOLD": ("fusion_threshold_bytes", "1024", 1024),
    "REIGEN_CACHE_CAPACITY": ("cache_capacity", "0", 0),
    "HOROVOD_CACHE_CAPACITY": ("cache_capacity", "5", 5),
    "REIGEN_BUCKET_BYTES": ("bucket_bytes", "4096", 4096),
    "REIGEN_PLANE": ("plane", "shm", "shm"),
}


def test_without_variables_everything_is_at_its_default() -> None:
    assert load({}) == Config()
    assert load({}).origins == {}
    assert load({"HOME": "/", "REIGEN_RANK": "3"}) == Config()


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_sets_its_knob_alone_and_is_its_origin(variable: str) -> None:
    knob, text, value = VARIABLES[variable]
    config = load({variable: text})
    assert getattr(config, knob) == value
    assert config.origins == {knob: variable}
    for other in {f.name for f in fields(Config)} - {knob, "origins"}:
        assert getattr(config, other) == getattr(Config(), other)


def test_every_knob_has_a_variable() -> None:
    assert {knob for knob, *_ in VARIABLES.values()} == {f.name for f in fields(Config)} - {"origins"}


def test_reigens_variable_wins() -> None:
    config = load({"REIGEN_CACHE_CAPACITY": "1", "HOROVOD_CACHE_CAPACITY": "2"})
    assert (config.cache_capacity, config.origins["cache_capacity"]) == (1, "REIGEN_CACHE_CAPACITY")


def test_an_empty_variable_counts_as_unset() -> None:
    config = load({"REIGEN_CACHE_CAPACITY": "", "HOROVOD_CACHE_CAPACITY": "2", "REIGEN_PLANE": ""})
    assert config.origins == {"cache_capacity": "HOROVOD_CACHE_CAPACITY"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REIGEN_DEADLINE", "0"),
        ("REIGEN_DEADLINE", "-1"),
        ("REIGEN_DEADLINE", "nan"),
        ("REIGEN_DEADLINE", "inf"),
        ("REIGEN_DEADLINE", "soon"),
        ("HOROVOD_START_TIMEOUT", "0"),
        ("REIGEN_FUSION_THRESHOLD", "-1"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB"),
        ("REIGEN_CACHE_CAPACITY", "1.5"),
        ("REIGEN_BUCKET_BYTES", "0"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}={value}: "):
        load({variable: value})
