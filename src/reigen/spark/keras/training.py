"""Training of a Keras model in one of the processes of a job."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from reigen.spark.data_parquet import BatchReader, Columns
from reigen.spark.estimator_task import Progress, TrainingTask
from reigen.spark.keras.serialization import (
    SavedOptimizer,
    add_progress,
    load_model,
    load_optimizer,
    load_weights,
    read_progress,
    save_model,
    thaw,
)


@dataclass(frozen=True)
class KerasParts:
    """Objects of the user's.

    Attributes:
        model: a ``.keras`` file.
        loss: frozen, as ``metrics``.
        checkpoint_callback: chooses the models that are kept; None: that of every epoch is.
    """

    model: bytes
    optimizer: SavedOptimizer
    loss: Any
    loss_weights: Sequence[float] | None
    metrics: Any
    callbacks: Sequence[Any]
    checkpoint_callback: Any
    custom_objects: Mapping[str, Any]


def train(task: TrainingTask, parts: KerasParts) -> tuple[bytes, dict[str, list[float]]] | None:
    """Train, as each rank does; returns the compiled model and the history on rank 0."""
    import reigen.keras as hvd

    task.set_start_method()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    _choose_devices(task.use_gpu, hvd.local_rank())
    keras.utils.set_random_seed((task.seed + rank) % 2**32)
    content = hvd.broadcast_object(task.read_checkpoint() if rank == 0 else None)
    model, progress, history = _restore(content, parts, task)
    _separate_seeds(model, rank)
    plan, reader = task.train_plan(rank, size), task.train_reader(rank, size)
    steps = task.train_steps or plan.num_steps
    with tempfile.TemporaryDirectory() as directory:
        keeper = _Checkpoint(task, parts.checkpoint_callback, Path(directory, "model.keras"), progress, history)
        validation = _Validation(task.val_reader(rank, size), task, plan.num_rows)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), validation, *parts.callbacks]
        if rank == 0:
            callbacks += [*([parts.checkpoint_callback] if parts.checkpoint_callback else []), keeper]
        fitted = model.fit(
            _batches(reader, task, model, progress.done * steps, steps * (progress.end - progress.done), plan.is_even),
            steps_per_epoch=steps,
            epochs=progress.end,
            initial_epoch=progress.done,
            callbacks=callbacks,
            verbose=task.verbose if rank == 0 else 0,
            shuffle=False,
        )
        result = (keeper.content or save_model(model), merge(history, fitted.history)) if rank == 0 else None
    hvd.shutdown()
    return result


def _restore(
    content: bytes | None, parts: KerasParts, task: TrainingTask
) -> tuple[Any, Progress, dict[str, list[float]]]:
    """Return the compiled model, of the checkpoint if there is one, where the run stands, and its history."""
    import reigen.keras as hvd

    compression = hvd.Compression.none if task.compression is None else task.compression
    model = load_model(parts.model, parts.custom_objects)
    optimizer = load_optimizer(parts.optimizer, model.trainable_variables, parts.custom_objects)
    if content is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    model.compile(
        optimizer=hvd.DistributedOptimizer(optimizer, compression=compression, backward_passes_per_step=task.passes),
        loss=thaw(parts.loss, parts.custom_objects),
        loss_weights=parts.loss_weights,
        metrics=thaw(parts.metrics, parts.custom_objects),
    )
    if content is None:
        return model, Progress(wanted=task.epochs), {}
    load_weights(model, content)
    saved = read_progress(content)
    return model, Progress(**saved["progress"]).next_fit(task.epochs), saved["history"]


def _separate_seeds(model: Any, rank: int) -> None:
    """Give the layers that draw random numbers, such as Dropout, others on each rank: they are loaded from one file."""
    for variable in model.variables:
        if variable.path.endswith("seed_generator_state"):
            state = np.asarray(keras.ops.convert_to_numpy(variable)).astype(np.int64)
            variable.assign(((state + np.array([rank * 1_000_003, 0])) % 2**31).astype("uint32"))


def _choose_devices(use_gpu: bool, local_rank: int) -> None:
    """Choose this rank's GPU, or none, before the backend uses any."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        found = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([found[local_rank % len(found)]] if found and use_gpu else [], "GPU")
    elif backend == "torch":
        import torch

        if use_gpu and torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())


def _batches(
    reader: BatchReader, task: TrainingTask, model: Any, first: int, count: int, is_even: bool
) -> Iterator[tuple[Any, ...]]:
    """Yield inputs, labels and, where rows have weights or ranks differ in their rows, weights of the samples."""
    for columns, weight in reader.batches(first, count):
        inputs, labels, weights = shape_columns(columns, task, model)
        if weights is None and is_even:
            yield inputs, labels
            continue
        rows = len(columns[task.labels[0]])
        given = np.ones(rows, np.float32) if weights is None else weights
        yield inputs, labels, _for_each_output(given * np.float32(weight), labels)


def _for_each_output(weights: NDArray[Any], labels: Any) -> Any:
    return tuple(weights for _ in labels) if isinstance(labels, tuple) else weights


def shape_columns(columns: Columns, task: TrainingTask, model: Any) -> tuple[Any, Any, NDArray[Any] | None]:
    """Return inputs and labels in the shapes that a model has, and the weights of the samples or None."""
    inputs = shape_inputs([columns[name] for name in task.features], model)
    shapes: Sequence[Any] = task.label_shapes or [None] * len(task.labels)
    outputs = _shapes_of(getattr(model, "outputs", None), len(task.labels))
    labels = tuple(
        _reshape(columns[name], shape or output)
        for name, shape, output in zip(task.labels, shapes, outputs, strict=True)
    )
    weights = None if task.sample_weights is None else columns[task.sample_weights].astype(np.float32)
    return inputs, labels if len(labels) > 1 else labels[0], weights


def shape_inputs(arrays: Sequence[NDArray[Any]], model: Any) -> Any:
    """Return arrays in the shapes of a model's inputs, floating-point ones in Keras's ``floatx``."""
    shapes = _shapes_of(getattr(model, "inputs", None), len(arrays))
    shaped = tuple(_reshape(array, shape) for array, shape in zip(arrays, shapes, strict=True))
    return shaped if len(shaped) > 1 else shaped[0]


def _shapes_of(tensors: Any, count: int) -> list[Any]:
    """Return shapes with -1 for unknown sizes; None for each where the model has none yet."""
    found = [] if tensors is None else [[-1 if size is None else size for size in each.shape] for each in tensors]
    return found if len(found) == count else [None] * count


def _reshape(array: NDArray[Any], shape: Sequence[int] | None) -> NDArray[Any]:
    if array.dtype == np.float64:
        array = array.astype(keras.config.floatx())
    if shape is None or shape.count(-1) > 1:
        return array
    sizes = [len(array), *shape[1:]]
    fits = -1 in sizes or np.prod(sizes) == array.size
    return array.reshape(sizes) if fits else array.reshape(len(array), -1)


class _Validation(keras.callbacks.Callback):
    """Makes the metrics of an epoch those of all ranks' rows, and adds those of validation."""

    def __init__(self, reader: BatchReader | None, task: TrainingTask, num_rows: int) -> None:
        super().__init__()
        self._reader, self._task, self._num_rows = reader, task, num_rows

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Evaluate this rank's rows, and average; collective."""
        if logs is None:
            return
        logs.update(average_logs(self._num_rows, logs))
        if self._reader is not None:
            found = self._evaluate(self._reader)
            logs.update({f"val_{name}": value for name, value in average_logs(*found).items()})

    def _evaluate(self, reader: BatchReader) -> tuple[int, dict[str, float]]:
        """Return the number of rows, and their metrics; nothing where this rank has no rows.

        Each batch counts by its rows, which Keras's own means of losses do not do in all of its versions.
        """
        from reigen.keras.callbacks import Keras3Access

        Keras3Access().prepare(self.model)
        total, sums = 0, dict[str, float]()
        for columns in itertools.islice(reader.all_batches(), self._task.val_steps):
            inputs, labels, weights = shape_columns(columns, self._task, self.model)
            given = None if weights is None else _for_each_output(weights, labels)
            # on PyTorch Keras gives arrays to metrics as they are
            inputs, labels = keras.tree.map_structure(keras.ops.convert_to_tensor, (inputs, labels))
            self.model.reset_metrics()
            found = self.model.test_on_batch(inputs, labels, given, return_dict=True)
            rows = len(columns[self._task.labels[0]])
            total += rows
            sums = {name: sums.get(name, 0.0) + float(value) * rows for name, value in found.items()}
        return total, {name: value / total for name, value in sums.items()}


def average_logs(rows: int, logs: Mapping[str, Any]) -> dict[str, float]:
    """Collective: return the means of numbers, in which each rank counts by its rows."""
    import reigen.keras as hvd

    found = hvd.allgather_object((rows, {name: float(value) for name, value in logs.items()}))
    total = sum(number for number, _ in found)
    names = list(dict.fromkeys(name for number, values in found if number for name in values))
    return {name: sum(number * values[name] for number, values in found if number) / total for name in names}


class _Checkpoint(keras.callbacks.Callback):
    """Writes the model of each epoch to the store, or the one that the user's callback has chosen.

    Attributes:
        content: the last one that was kept.
    """

    def __init__(
        self, task: TrainingTask, chosen: Any, path: Path, progress: Progress, history: Mapping[str, list[float]]
    ) -> None:
        super().__init__()
        self._task, self._chosen, self._path, self._progress = task, chosen, path, progress
        self._before = history
        self._logs: dict[str, list[float]] = {}
        self.content = b""
        if chosen is not None:
            chosen.filepath = str(path)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep the model."""
        self._progress = self._progress.after(epoch)
        self._logs = merge(self._logs, {name: [float(value)] for name, value in (logs or {}).items()})
        if self._chosen is None:
            self.content = save_model(self.model)
        elif self._path.exists():
            self.content = self._path.read_bytes()
        else:
            return  # it has not chosen one yet
        history = merge(self._before, self._logs)
        kept = add_progress(self.content, {"progress": asdict(self._progress), "history": history})
        self._task.write_checkpoint(kept, history)


def merge(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return lists of numbers by name, put together.

    Example:
        >>> merge({"loss": [2.0]}, {"loss": [1.0], "val_loss": [3.0]})
        {'loss': [2.0, 1.0], 'val_loss': [3.0]}
    """
    names = list(dict.fromkeys([*first, *second]))
    return {name: [float(value) for value in [*first.get(name, []), *second.get(name, [])]] for name in names}
