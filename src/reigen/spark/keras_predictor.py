"""Prediction of a Keras model in Spark's tasks, where Keras's backend is to be chosen before Keras is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from reigen.spark.data_parquet import Columns


class KerasPredictor:
    """Function of columns: outputs of a model, which is loaded once in a process. It can be pickled.

    Args:
        content: the model's ``.keras`` file.
        custom_objects: classes and functions that Keras does not know, as a pickle.
        features: columns that it gets.
        backend: Keras's backend, where this process has not chosen one.
    """

    def __init__(self, content: bytes, custom_objects: bytes, features: Sequence[str], backend: str) -> None:
        self._content, self._known, self._features, self._backend = content, custom_objects, features, backend
        self._model: Any = None

    def __call__(self, columns: Columns) -> list[NDArray[Any]]:
        """Return an array (rows, elements) for each output."""
        if "keras" not in sys.modules:
            os.environ["KERAS_BACKEND"] = self._backend
        from reigen.spark.keras.serialization import load_model
        from reigen.spark.keras.training import shape_inputs

        if self._model is None:
            self._model = load_model(self._content, cloudpickle.loads(self._known))
        outputs = self._model.predict_on_batch(shape_inputs([columns[name] for name in self._features], self._model))
        found = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        return [np.asarray(output).reshape(len(output), -1) for output in found]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}
