"""TorchEstimator and TorchModel."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray

from reigen.errors import ArgumentError
from reigen.spark.data_parquet import Columns
from reigen.spark.estimator import DistributedEstimator, TrainedModel
from reigen.spark.estimator_backend import EstimatorBackend
from reigen.spark.estimator_task import TrainingTask
from reigen.spark.params import ParamSpec, check_callable, check_shapes, with_params
from reigen.spark.torch.training import TorchParts, load_state, shape_inputs, train

_PARAMETERS = (
    ParamSpec("input_shapes", "shapes of the inputs, -1 for the rows: [[-1, 1, 28, 28]]", None, check_shapes),
    ParamSpec("loss_constructors", "functions that make the losses in the processes", is_object=True),
    ParamSpec("train_minibatch_fn", "function that does a step", None, check_callable, is_object=True),
)
_MODEL_PARAMETERS = (
    ParamSpec("optimizer", "the optimizer, with its state", is_object=True),
    ParamSpec("input_shapes", "shapes of the inputs, -1 for the rows", None, check_shapes),
)


@with_params(_PARAMETERS)
class TorchEstimator(DistributedEstimator):
    """Estimator of Spark ML that trains a PyTorch model on the rows of a DataFrame, in the processes of a job.

    All arguments are keywords, and Params with setters and getters (``setEpochs``, ``getEpochs``);
    docs/spark-estimators.md has them all. ``model``, ``optimizer`` (of the model's parameters), ``loss``,
    ``feature_cols``, ``label_cols`` and ``store`` are needed. Features and labels reach the model and the loss as
    float32.

    Raises:
        TypeError: there is no such argument, or a value is of another type.
        ArgumentError: (a ValueError) a value makes no sense, or two arguments exclude each other.

    Example::

        estimator = TorchEstimator(
            num_proc=4, store=Store.create("/shared/dir"), model=model, loss=torch.nn.functional.mse_loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1), feature_cols=["x"], label_cols=["y"], epochs=5,
        )
        predicted = estimator.fit(df).transform(df)  # with a column y__output
    """

    _needed = ("store", "model", "optimizer", "feature_cols", "label_cols")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._check_losses()
        if self._has("backend") and self._has("num_proc"):
            self._choose_backend()  # raises

    def _check(self) -> EstimatorBackend:
        backend = super()._check()
        self._check_losses()
        if not self._has("loss") and not self._has("loss_constructors"):
            raise ArgumentError("TorchEstimator needs loss, or loss_constructors")
        if self._has("train_minibatch_fn") and self.getOrDefault("backward_passes_per_step") > 1:
            raise ArgumentError("train_minibatch_fn steps by itself: backward_passes_per_step must be 1 with it")
        return backend

    def _check_losses(self) -> None:
        if self._has("loss") and self._has("loss_constructors"):
            raise ArgumentError("loss and loss_constructors are two ways to say the same thing: give one of them")

    def _train_model(self, backend: EstimatorBackend, task: TrainingTask, label_kinds: Sequence[str]) -> TorchModel:
        parts = self._parts(len(task.labels))
        results = backend.run(train, (task, parts))
        content, history = results[0]
        same: TorchParts = cloudpickle.loads(cloudpickle.dumps(parts))
        load_state(content, same.model, same.optimizer)
        return TorchModel(
            model=same.model,
            optimizer=same.optimizer,
            history=history,
            feature_columns=list(task.features),
            label_columns=list(task.labels),
            label_kinds=list(label_kinds),
            input_shapes=self.getOrDefault("input_shapes"),
            run_id=task.run_id,
        )

    def _parts(self, num_labels: int) -> TorchParts:
        model, optimizer = self.getOrDefault("model"), self.getOrDefault("optimizer")
        own = set(map(id, model.parameters()))
        if not all(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            raise ArgumentError("the optimizer has parameters that are not the model's: make it of model.parameters()")
        constructors = self.getOrDefault("loss_constructors")
        return TorchParts(
            model=model,
            optimizer=optimizer,
            losses=_for_each(self.getOrDefault("loss"), num_labels, "loss") if self._has("loss") else (),
            loss_constructors=_for_each(constructors, num_labels, "loss_constructors") if constructors else None,
            loss_weights=_for_each(self.getOrDefault("loss_weights") or 1 / num_labels, num_labels, "loss_weights"),
            metrics=_group_metrics(self.getOrDefault("metrics") or [], num_labels),
            input_shapes=self.getOrDefault("input_shapes"),
            train_minibatch=self.getOrDefault("train_minibatch_fn"),
            callbacks=self.getOrDefault("callbacks") or (),
        )


@with_params(_MODEL_PARAMETERS)
class TorchModel(TrainedModel):
    """Model of Spark ML with a trained PyTorch model; ``getModel()``, ``getHistory()``, ``getOptimizer()``.

    ``transform`` adds the column ``<label>__output`` for each label (``setOutputCols``): a number for a number, rounded
    if the labels are integers, and otherwise a vector.
    """

    def _make_predictor(self) -> TorchPredictor:
        buffer = io.BytesIO()
        model = self.getOrDefault("model")
        cloudpickle.dump(model, buffer)
        return TorchPredictor(
            buffer.getvalue(), self.getOrDefault("feature_columns"), self.getOrDefault("input_shapes")
        )


class TorchPredictor:
    """Function of columns: outputs of a model, which is loaded once in a process. It can be pickled.

    Args:
        content: the model's pickle.
        features: columns that it gets.
        input_shapes: their shapes, or None.
    """

    def __init__(self, content: bytes, features: Sequence[str], input_shapes: Sequence[Sequence[int]] | None) -> None:
        self._content, self._features, self._shapes = content, features, input_shapes
        self._model: torch.nn.Module | None = None

    def __call__(self, columns: Columns) -> list[NDArray[Any]]:
        """Return an array (rows, elements) for each output."""
        if self._model is None:
            self._model = cloudpickle.loads(self._content).eval()
        with torch.no_grad():
            outputs = self._model(*shape_inputs([columns[name] for name in self._features], self._shapes))
        found = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [np.asarray(output.detach().cpu()).reshape(len(output), -1) for output in found]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}


def _for_each(given: Any, count: int, name: str) -> list[Any]:
    """Return a list of one for each label, of a list or of one value for all."""
    found = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(found) != count:
        raise ArgumentError(f"{name} has {len(found)} entries for {count} label columns; give one for each")
    return found


def _group_metrics(given: Sequence[Any] | Mapping[str, Any], count: int) -> list[list[Callable[..., Any]]]:
    """Return the metrics of each label: a list of lists is that already, a plain list is for every label."""
    found = list(given)
    if not found:
        return []
    if all(isinstance(each, list | tuple) for each in found):
        return [list(each) for each in _for_each(found, count, "metrics")]
    return [found for _ in range(count)]
