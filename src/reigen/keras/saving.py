"""Models that were saved with a DistributedOptimizer, or with a plain optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from reigen.api.saved_models import find_horovods, read_optimizer
from reigen.errors import ArgumentError
from reigen.keras.compression import Compression
from reigen.keras.distributed_optimizer import DistributedOptimizer, DistributedOptimizerMixin


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model, with its optimizer wrapped in a DistributedOptimizer that has the saved one's state.

    Args:
        filepath: of a model that was saved with or without Reigen, or by Horovod. Of HDF5 files (``.h5``) Keras 3 does
            not read the optimizer's state, but for the number of its steps.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions that it does not know, by name. Under the name of the optimizer's
            class there may be a function that makes it, also a distributed one.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake, as False: Keras 3 has no legacy optimizers.

    Raises:
        ArgumentError: ``legacy_opts``.
        ValueError: Keras cannot read the file.
    """
    if legacy_opts:
        raise ArgumentError("Keras 3 has no legacy optimizers: legacy_opts must be False")
    saved = read_optimizer(filepath)
    known = find_horovods(saved, keras.optimizers) | {each.__name__: each for each in custom_optimizers or ()}
    known |= dict(custom_objects or {})
    name = str(saved.get("class_name", ""))
    if inspect.isfunction(known.get(name)):
        known[name] = _class_of(known[name], name)
    model = keras.saving.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        optimizer = _with_variables(optimizer, model.trainable_variables)
        is_distributed = isinstance(optimizer, DistributedOptimizerMixin)
        model.optimizer = optimizer if is_distributed else DistributedOptimizer(optimizer, compression=compression)
    return model


def _with_variables(optimizer: Any, variables: list[Any]) -> Any:
    """Return the optimizer; of an HDF5 file, for which Keras 3 builds it without variables, a new one for them."""
    if not optimizer.built or len(optimizer._trainable_variables) == len(variables):
        return optimizer
    made = type(optimizer).from_config(optimizer.get_config())
    made.build(variables)
    made.iterations.assign(optimizer.iterations)
    return made


def _class_of(make: Any, name: str) -> type:
    """Return a class for Keras, which looks for one, whose instances a function makes of a configuration."""
    return type(name, (), {"from_config": staticmethod(lambda config, custom_objects=None: make(**config))})
