"""Estimators and models of Spark ML, as far as they are the same for all frameworks."""

from __future__ import annotations

import math
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pyspark.ml import Estimator, Model
from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import types as T  # noqa: N812 - as everybody names it

from reigen.errors import ArgumentError
from reigen.spark.data_parquet import Columns, open_rows
from reigen.spark.data_prepare import PreparedData, check_columns, quoted, write_rows
from reigen.spark.data_rows import RowPlan
from reigen.spark.estimator_backend import EstimatorBackend, SparkBackend
from reigen.spark.estimator_saving import SavableParams
from reigen.spark.estimator_task import TrainingTask
from reigen.spark.params import ESTIMATOR_PARAMETERS, MODEL_PARAMETERS, with_params


@with_params(ESTIMATOR_PARAMETERS)
class DistributedEstimator(Estimator, SavableParams, MLWritable, MLReadable):
    """Estimator of Spark ML that trains a model in processes of a job.

    The DataFrame is written to the store as Parquet files, of which each process reads its part: each row is used once
    an epoch, by one process.
    """

    _needed: tuple[str, ...] = ("store", "model", "loss", "optimizer", "feature_cols", "label_cols")

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: int | str | None = None) -> Any:
        """Train on Parquet files that are in the store already, at ``train_path`` and, for validation, ``val_path``.

        Args:
            params: Params for this call only, as for ``fit``.
            dataset_idx: ``idx`` of the store's paths.

        Raises:
            ArgumentError: there are none; params are missing, or make no sense.
        """
        same = self.copy(dict(params)) if params else self
        backend = same._check()
        store = same.getOrDefault("store")
        has_validation = store.is_parquet_dataset(store.get_val_data_path(dataset_idx))
        return same._train(backend, dataset_idx, has_validation, same._choose_seed())

    def _fit(self, dataset: DataFrame) -> Any:
        backend, seed = self._check(), self._choose_seed()
        columns, validation = self._columns(), self.getOrDefault("validation")
        check_columns(dataset, columns, transformed=self.getOrDefault("transformation_fn") is not None)
        if isinstance(validation, str) and validation not in dataset.columns:
            raise ArgumentError(f"validation: the DataFrame has no column {validation!r}")
        num_partitions = self.getOrDefault("partitions_per_process") * backend.num_processes()
        split_seed = self.getOrDefault("random_seed") or 0
        store = self.getOrDefault("store")
        data: PreparedData = write_rows(dataset, store, columns, validation, num_partitions, split_seed)
        return self._train(backend, data.index, data.has_validation, seed)

    def _train(self, backend: EstimatorBackend, index: int | str | None, has_validation: bool, seed: int) -> Any:
        store = self.getOrDefault("store")
        train_rows = open_rows(store, store.get_train_data_path(index))
        val_rows = open_rows(store, store.get_val_data_path(index)) if has_validation else None
        size = backend.num_processes()
        RowPlan(train_rows.group_rows, size, 0, self.getOrDefault("batch_size")).check_enough_rows()
        run_id = self.getOrDefault("run_id") or f"run_{int(time.time())}_{secrets.token_hex(3)}"
        store.get_run_path(run_id)  # raises
        task = TrainingTask(
            store=store,
            run_id=run_id,
            train_rows=train_rows,
            val_rows=val_rows if val_rows is not None and val_rows.num_rows else None,
            features=self.getOrDefault("feature_cols"),
            labels=self.getOrDefault("label_cols"),
            sample_weights=self.getOrDefault("sample_weight_col"),
            label_shapes=self.getOrDefault("label_shapes"),
            batch_size=self.getOrDefault("batch_size"),
            val_batch_size=self.getOrDefault("val_batch_size") or self.getOrDefault("batch_size"),
            epochs=self.getOrDefault("epochs"),
            shuffle=self.getOrDefault("shuffle"),
            seed=seed,
            verbose=self.getOrDefault("verbose"),
            train_steps=self.getOrDefault("train_steps_per_epoch"),
            val_steps=self.getOrDefault("validation_steps_per_epoch"),
            transformation=self.getOrDefault("transformation_fn"),
            removed_fields=self.getOrDefault("transformation_removed_fields") or (),
            in_memory=self.getOrDefault("inmemory_cache_all"),
            train_workers=self.getOrDefault("train_reader_num_workers"),
            val_workers=self.getOrDefault("val_reader_num_workers"),
            passes=self.getOrDefault("backward_passes_per_step"),
            compression=self.getOrDefault("gradient_compression"),
            use_gpu=self.getOrDefault("use_gpu"),
            start_method=self.getOrDefault("mp_start_method"),
        )
        kinds = [train_rows.kinds.get(label, "float") for label in task.labels]
        return self._train_model(backend, task, kinds)

    @abstractmethod
    def _train_model(self, backend: EstimatorBackend, task: TrainingTask, label_kinds: Sequence[str]) -> Any:
        """Train, and return the model."""

    def _check(self) -> EstimatorBackend:
        """Check the params, and return where to train.

        Raises:
            ArgumentError: (a ValueError) some are missing, or do not go together.
        """
        missing = [name for name in self._needed if not self._has(name)]
        if missing:
            raise ArgumentError(f"{type(self).__name__} needs {', '.join(missing)}")
        return self._choose_backend()

    def _choose_backend(self) -> EstimatorBackend:
        backend, num_proc = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        if backend is not None and num_proc is not None:
            raise ArgumentError("backend and num_proc are two ways to say the same thing: give one of them")
        chosen: EstimatorBackend = SparkBackend(num_proc) if backend is None else backend
        return chosen

    def _has(self, name: str) -> bool:
        value = self.getOrDefault(name)
        return value is not None and value != []

    def _columns(self) -> list[str]:
        weights = self.getOrDefault("sample_weight_col")
        columns = [
            *self.getOrDefault("feature_cols"),
            *self.getOrDefault("label_cols"),
            *([weights] if weights else []),
        ]
        return list(dict.fromkeys(columns))

    def _choose_seed(self) -> int:
        seed = self.getOrDefault("random_seed")
        return secrets.randbits(31) if seed is None else int(seed)


@with_params(MODEL_PARAMETERS)
class TrainedModel(Model, SavableParams, MLWritable, MLReadable):
    """Model of Spark ML that adds columns with the outputs of a trained model."""

    def getOutputCols(self) -> list[str]:  # noqa: N802 - Spark's name
        """Return the names of the columns that ``transform`` adds."""
        given = self.getOrDefault("output_cols")
        return given or [f"{label}__output" for label in self.getOrDefault("label_columns")]

    def _transform(self, dataset: DataFrame) -> DataFrame:
        features, labels = self.getOrDefault("feature_columns"), self.getOrDefault("label_columns")
        check_columns(dataset, features, transformed=False)
        outputs = self.getOutputCols()
        if len(outputs) != len(labels):
            raise ArgumentError(f"output_cols are {outputs}, and there must be one for each of the labels {labels}")
        predict = self._make_predictor()
        first = dataset.limit(1).collect()
        sizes = [array.shape[1] for array in predict(rows_to_columns(first, features))] if first else [1] * len(outputs)
        kinds = [_output_kind(kind, size) for kind, size in zip(self._kinds(), sizes, strict=True)]
        batch_size = self.getOrDefault("batch_size")

        def predict_rows(rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
            for batch in batches_of(rows, batch_size):
                predicted = predict(rows_to_columns(batch, features))
                cells = [
                    [_cell(values, kind) for values in array] for array, kind in zip(predicted, kinds, strict=True)
                ]
                for row, *added in zip(batch, *cells, strict=True):
                    yield (*row, *added)

        added = [T.StructField(name, _OUTPUT_TYPES[kind], True) for name, kind in zip(outputs, kinds, strict=True)]
        kept = [each for each in dataset.schema if each.name not in outputs]
        source = (
            dataset.select(*[dataset[quoted(each.name)] for each in kept])
            if len(kept) < len(dataset.columns)
            else dataset
        )
        return dataset.sparkSession.createDataFrame(
            source.rdd.mapPartitions(predict_rows), T.StructType([*kept, *added])
        )

    def _kinds(self) -> list[str]:
        return self.getOrDefault("label_kinds") or ["float"] * len(self.getOrDefault("label_columns"))

    @abstractmethod
    def _make_predictor(self) -> Any:
        """Return a function of columns, which returns an array (rows, elements) for each output, and can be pickled."""


_OUTPUT_TYPES: dict[str, Any] = {"int": T.LongType(), "float": T.DoubleType(), "vector": VectorUDT()}


def _output_kind(label_kind: str, size: int) -> str:
    """Return the kind of output for a label: a number for a number, a rounded one for an integer, or a vector."""
    return label_kind if size == 1 and label_kind in {"int", "float"} else "vector"


def _cell(values: Any, kind: str) -> Any:
    if kind == "vector":
        return DenseVector(values.astype(np.float64))
    number = float(values[0])
    if kind == "float":
        return number
    return round(number) if math.isfinite(number) else None


def batches_of(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of up to ``size`` rows."""
    batch: list[Any] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def rows_to_columns(rows: Sequence[Any], names: Sequence[str]) -> Columns:
    """Return columns of Spark's rows as arrays of shape (rows,), or (rows, elements) for vectors and lists.

    Raises:
        ArgumentError: a value is missing, or vectors differ in size.
    """
    found: Columns = {}
    for name in names:
        cells = [row[name] for row in rows]
        if any(cell is None for cell in cells):
            raise ArgumentError(f"column {name!r} has missing values: fill them, or leave these rows out")
        arrays = [np.asarray(cell.toArray() if hasattr(cell, "toArray") else cell) for cell in cells]
        arrays = [
            array.astype(np.float64) if array.dtype == object else array.reshape(-1) if array.ndim else array
            for array in arrays
        ]
        try:
            found[name] = np.stack(arrays)
        except ValueError as error:
            raise ArgumentError(f"column {name!r} has vectors of different sizes") from error
    return found
