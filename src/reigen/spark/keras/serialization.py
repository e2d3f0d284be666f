"""Keras's objects as bytes and plain values, between the driver and the training processes: no pickles of Keras's.

A model is a file in Keras's own format (``.keras``), an optimizer, a metric or a loss its configuration.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from reigen.files import write_atomically

_PROGRESS = "reigen.json"
_CONFIGURED = (keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)


@dataclass(frozen=True)
class Configured:
    """Configuration of an object of Keras's."""

    config: dict[str, Any]


@dataclass(frozen=True)
class SavedOptimizer:
    """Configuration of an optimizer, and the values of its variables; none if it was not built."""

    config: dict[str, Any]
    values: tuple[NDArray[Any], ...]


def save_model(model: Any) -> bytes:
    """Return a model as the content of a ``.keras`` file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.keras")
        model.save(path)
        return path.read_bytes()


def load_model(content: bytes, custom_objects: Mapping[str, Any] | None = None, *, compiled: bool = False) -> Any:
    """Return the model of a ``.keras`` file; lambdas in it are refused, as by Keras, unless it is allowed to load them.

    Raises:
        ValueError: Keras cannot load it: a class is missing in ``custom_objects``, for example.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.keras")
        write_atomically(path, [content])
        return keras.saving.load_model(path, custom_objects=dict(custom_objects or {}), compile=compiled)


def load_weights(model: Any, content: bytes) -> None:
    """Load the weights of a ``.keras`` file into a model, and its optimizer's state."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.keras")
        write_atomically(path, [content])
        model.load_weights(path)


def add_progress(content: bytes, progress: Mapping[str, Any]) -> bytes:
    """Return a ``.keras`` file with plain values beside the model, which Keras does not look at."""
    buffer = BytesIO(content)
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(_PROGRESS, json.dumps(progress))
    return buffer.getvalue()


def read_progress(content: bytes) -> dict[str, Any]:
    """Return the values of `add_progress`; none if there are none."""
    with zipfile.ZipFile(BytesIO(content)) as file:
        return json.loads(file.read(_PROGRESS)) if _PROGRESS in file.namelist() else {}


def save_optimizer(optimizer: Any) -> SavedOptimizer:
    """Return an optimizer's configuration, or that of its name, and its state."""
    made = keras.optimizers.get(optimizer)
    values = tuple(np.asarray(keras.ops.convert_to_numpy(each)) for each in made.variables) if made.built else ()
    config = keras.saving.serialize_keras_object(made)
    public = getattr(keras.optimizers, config["class_name"], None)
    if isinstance(public, type) and isinstance(made, public):  # and not the class of this backend alone
        config = {**config, "module": "keras.optimizers", "registered_name": None}
    return SavedOptimizer(config, values)


def load_optimizer(saved: SavedOptimizer, variables: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Return the optimizer of `save_optimizer`, with its state if it has as many variables for this model."""
    optimizer = keras.saving.deserialize_keras_object(saved.config, custom_objects=dict(custom_objects))
    if saved.values:
        optimizer.build(variables)
        if [each.shape for each in optimizer.variables] == [each.shape for each in saved.values]:
            for variable, value in zip(optimizer.variables, saved.values, strict=True):
                variable.assign(value)
    return optimizer


def freeze(value: Any) -> Any:
    """Return a value with configurations in the place of Keras's metrics, losses and optimizers, in containers, too."""
    if isinstance(value, _CONFIGURED):
        return Configured(keras.saving.serialize_keras_object(value))
    if isinstance(value, dict):
        return {name: freeze(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(freeze(each) for each in value)
    return value


def thaw(value: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Return the value of `freeze`."""
    if isinstance(value, Configured):
        return keras.saving.deserialize_keras_object(value.config, custom_objects=dict(custom_objects))
    if isinstance(value, dict):
        return {name: thaw(each, custom_objects) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(thaw(each, custom_objects) for each in value)
    return value
