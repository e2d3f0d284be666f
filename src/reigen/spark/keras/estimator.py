"""KerasEstimator and KerasModel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import keras

from reigen.spark.estimator import DistributedEstimator, TrainedModel
from reigen.spark.estimator_backend import EstimatorBackend
from reigen.spark.estimator_task import TrainingTask
from reigen.spark.keras.serialization import (
    SavedOptimizer,
    freeze,
    load_model,
    load_optimizer,
    save_model,
    save_optimizer,
    thaw,
)
from reigen.spark.keras.training import KerasParts, train
from reigen.spark.keras_predictor import KerasPredictor
from reigen.spark.params import ParamSpec, with_params

_CUSTOM = ParamSpec("custom_objects", "classes and functions of the model that Keras does not know", is_object=True)
_PARAMETERS = (
    _CUSTOM,
    ParamSpec("checkpoint_callback", "ModelCheckpoint that chooses the model to keep", is_object=True),
    ParamSpec("backend_env", "environment variables of the processes", is_object=True),
)
_MODEL_PARAMETERS = (_CUSTOM, ParamSpec("floatx", "type of floating-point numbers"))
_MODEL_FILE = "model.keras"


@with_params(_PARAMETERS)
class KerasEstimator(DistributedEstimator):
    """Estimator of Spark ML that trains a Keras 3 model on the rows of a DataFrame, in the processes of a job.

    All arguments are keywords, and Params with setters and getters (``setEpochs``, ``getEpochs``);
    docs/spark-estimators.md has them all. ``model``, ``optimizer``, ``loss``, ``feature_cols``, ``label_cols`` and
    ``store`` are needed; optimizer and loss may also come from ``model.compile()``. The processes have the driver's
    backend of Keras, unless ``backend_env`` names another: ``{"KERAS_BACKEND": "jax"}``.

    Raises:
        TypeError: there is no such argument, or a value is of another type.
        ArgumentError: (a ValueError) a value makes no sense, or two arguments exclude each other.

    Example::

        estimator = KerasEstimator(
            num_proc=4, store=Store.create("/shared/dir"), model=model, optimizer=keras.optimizers.Adam(), loss="mse",
            feature_cols=["x"], label_cols=["y"], epochs=5,
        )
        predicted = estimator.fit(df).transform(df)  # with a column y__output
    """

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        if self._has("backend") and self._has("num_proc"):
            self._choose_backend()  # raises

    def _check(self) -> EstimatorBackend:
        compiled = getattr(self.getOrDefault("model"), "_compile_loss", None)
        same = self
        if compiled is not None:
            model = self.getOrDefault("model")
            given = {"optimizer": model.optimizer, "loss": compiled._user_loss}
            same = self.copy()
            same._set(**{name: value for name, value in given.items() if not self._has(name)})
        return super(KerasEstimator, same)._check()

    def _train_model(self, backend: EstimatorBackend, task: TrainingTask, label_kinds: Sequence[str]) -> KerasModel:
        parts = self._parts()
        env = {"KERAS_BACKEND": keras.backend.backend(), **(self.getOrDefault("backend_env") or {})}
        results = backend.run(train, (task, parts), env=env)
        content, history = results[0]
        return KerasModel(
            model=load_model(content, parts.custom_objects),
            history=history,
            custom_objects=self.getOrDefault("custom_objects"),
            floatx=keras.config.floatx(),
            feature_columns=list(task.features),
            label_columns=list(task.labels),
            label_kinds=list(label_kinds),
            run_id=task.run_id,
        )

    def _parts(self) -> KerasParts:
        model = self.getOrDefault("model")
        compiled = getattr(model, "_compile_loss", None)
        return KerasParts(
            model=save_model(_without_compilation(model, self.getOrDefault("custom_objects") or {})),
            optimizer=save_optimizer(self.getOrDefault("optimizer") if self._has("optimizer") else model.optimizer),
            loss=freeze(self.getOrDefault("loss") if self._has("loss") else compiled._user_loss if compiled else None),
            loss_weights=self.getOrDefault("loss_weights"),
            metrics=freeze(self.getOrDefault("metrics") or []),
            callbacks=self.getOrDefault("callbacks") or [],
            checkpoint_callback=self.getOrDefault("checkpoint_callback"),
            custom_objects=self.getOrDefault("custom_objects") or {},
        )

    def _to_files(self, objects: dict[str, Any]) -> dict[str, bytes]:
        objects = dict(objects)
        model = objects.pop("model", None)
        if "optimizer" in objects:
            objects["optimizer"] = save_optimizer(objects["optimizer"])
        frozen = {name: freeze(value) if name in {"loss", "metrics"} else value for name, value in objects.items()}
        return {**super()._to_files(frozen), **({} if model is None else {_MODEL_FILE: save_model(model)})}

    def _from_files(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        objects = super()._from_files(files)
        known = objects.get("custom_objects") or {}
        if _MODEL_FILE in files:
            objects["model"] = load_model(files[_MODEL_FILE], known, compiled=True)
        if isinstance(objects.get("optimizer"), SavedOptimizer):
            variables = objects["model"].trainable_variables if "model" in objects else []
            objects["optimizer"] = load_optimizer(objects["optimizer"], variables, known)
        return {name: thaw(value, known) if name in {"loss", "metrics"} else value for name, value in objects.items()}


def _without_compilation(model: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Return the same model as if it had not been compiled: the processes compile it anew."""
    if not getattr(model, "compiled", False):
        return model
    return load_model(save_model(model), custom_objects)


@with_params(_MODEL_PARAMETERS)
class KerasModel(TrainedModel):
    """Model of Spark ML with a trained Keras model; ``keras()`` or ``getModel()``, ``getHistory()``.

    ``transform`` adds the column ``<label>__output`` for each label (``setOutputCols``): a number for a number, rounded
    if the labels are integers, and otherwise a vector.
    """

    def keras(self) -> Any:
        """Return the trained model of Keras."""
        return self.getOrDefault("model")

    def _make_predictor(self) -> KerasPredictor:
        known = cloudpickle.dumps(self.getOrDefault("custom_objects") or {})
        content, backend = save_model(self.getOrDefault("model")), keras.backend.backend()
        return KerasPredictor(content, known, self.getOrDefault("feature_columns"), backend)

    def _to_files(self, objects: dict[str, Any]) -> dict[str, bytes]:
        others = {name: value for name, value in objects.items() if name != "model"}
        return {**super()._to_files(others), _MODEL_FILE: save_model(objects["model"])}

    def _from_files(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        objects = super()._from_files(files)
        return {**objects, "model": load_model(files[_MODEL_FILE], objects.get("custom_objects"))}
