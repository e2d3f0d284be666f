"""Names and parameters that are read of Reigen's source, compared with those of the modules themselves."""

from __future__ import annotations

import importlib
import inspect

import pytest

from reigen.migrate import public_names


@pytest.mark.parametrize(
    "module", ["reigen", "reigen.torch", "reigen.torch.elastic", "reigen.elastic", "reigen.errors"]
)
def test_names_are_those_of_the_module(module: str) -> None:
    loaded = importlib.import_module(module)

    assert set(getattr(loaded, "__all__", ())) <= public_names.attribute_names(module)
    assert {name for name in public_names.star_names(module) if not hasattr(loaded, name)} == set()


@pytest.mark.parametrize("name", ["DistributedOptimizer", "allreduce", "broadcast_parameters", "init", "SyncBatchNorm"])
def test_parameters_are_those_of_the_function(name: str) -> None:
    function = getattr(importlib.import_module("reigen.torch"), name)
    found = public_names.call_parameters("horovod.torch", name)

    assert found is not None
    assert found.names == set(inspect.signature(function).parameters)
    assert not found.takes_any


def test_horovods_modules_are_those_that_as_horovod_gives() -> None:
    assert "allreduce" in public_names.attribute_names("horovod.torch.mpi_ops")
    assert {"callbacks", "DistributedOptimizer"} <= public_names.attribute_names("horovod.tensorflow.keras")
    assert "SyncBatchNormalization" in public_names.attribute_names("horovod.tensorflow")
    assert public_names.find_module("horovod.torch.nothing") is None
    assert public_names.find_module("torch") is None
    assert "data loaders" in str(public_names.import_error("horovod.data"))
    assert public_names.import_error("horovod.torch") is None


@pytest.mark.parametrize(
    ("module", "name", "counterpart"),
    [
        ("horovod", "run", "reigen"),
        ("horovod.torch", None, "reigen.torch"),
        ("horovod.torch.mpi_ops", "allreduce", "reigen.torch"),
        ("horovod.torch.mpi_ops", None, None),
        ("horovod.common.exceptions", "HorovodInternalError", "reigen.errors"),
        ("horovod.common.util", "gpu_available", None),
        ("horovod.keras.callbacks", "MetricAverageCallback", "reigen.keras.callbacks"),
        ("horovod.spark", "run", "reigen.spark"),
        ("horovod.ray", "RayExecutor", "reigen.ray"),
    ],
)
def test_counterparts(module: str, name: str | None, counterpart: str | None) -> None:
    assert public_names.counterpart(module, name) == counterpart


def test_a_literal_of_a_module_that_cannot_be_imported_here() -> None:
    table = public_names.read_literal("reigen.mxnet.optimizer_conversion", "_COUNTERPARTS")

    assert isinstance(table, dict)
    assert {"SGD", "Adam"} <= set(table)
    with pytest.raises(LookupError, match="no constant NOTHING"):
        public_names.read_literal("reigen.errors", "NOTHING")
