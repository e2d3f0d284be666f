"""Tasks of training processes, as far as they are the same for all frameworks."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reigen.spark.data_parquet import BatchReader, ParquetRows, ReadOptions
from reigen.spark.data_rows import RowPlan
from reigen.spark.store import Store


@dataclass(frozen=True)
class TrainingTask:
    """Choices of an estimator, without its model, for the training processes.

    Attributes:
        seed: of the order of the rows, and of the ranks' random numbers.
        sample_weights: name of the column with weights, or None.
    """

    store: Store
    run_id: str
    train_rows: ParquetRows
    val_rows: ParquetRows | None
    features: Sequence[str]
    labels: Sequence[str]
    sample_weights: str | None
    label_shapes: Sequence[Sequence[int]] | None
    batch_size: int
    val_batch_size: int
    epochs: int
    shuffle: bool
    seed: int
    verbose: int
    train_steps: int | None
    val_steps: int | None
    transformation: Callable[[Any], Any] | None
    removed_fields: Sequence[str]
    in_memory: bool
    train_workers: int
    val_workers: int
    passes: int
    compression: Any
    use_gpu: bool
    start_method: str | None

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read, each once."""
        return list(
            dict.fromkeys([*self.features, *self.labels, *([self.sample_weights] if self.sample_weights else [])])
        )

    def train_plan(self, rank: int, size: int) -> RowPlan:
        """Return a rank's part of the rows for training."""
        rows = self.train_rows.group_rows
        return RowPlan(rows, size, rank, self.batch_size, self.shuffle, self.seed, same_part=self.in_memory)

    def train_reader(self, rank: int, size: int) -> BatchReader:
        """Return the batches of a rank for training."""
        return BatchReader(self.train_rows, self.train_plan(rank, size), self._options(self.train_workers))

    def val_reader(self, rank: int, size: int) -> BatchReader | None:
        """Return the batches of a rank for validation, or None."""
        if self.val_rows is None:
            return None
        plan = RowPlan(self.val_rows.group_rows, size, rank, self.val_batch_size, shuffle=False)
        return BatchReader(self.val_rows, plan, self._options(self.val_workers))

    def set_start_method(self) -> None:
        """Choose how multiprocessing starts processes, if the user has."""
        if self.start_method is not None:
            multiprocessing.set_start_method(self.start_method, force=True)

    @property
    def checkpoint_path(self) -> str | None:
        """Path of the checkpoint, or None: the store keeps none."""
        return self.store.get_checkpoint_path(self.run_id) if self.store.saving_runs() else None

    def read_checkpoint(self) -> bytes | None:
        """Return the checkpoint of a run that was begun before, or None."""
        path = self.checkpoint_path
        return self.store.read(path) if path is not None and self.store.exists(path) else None

    def write_checkpoint(self, content: bytes, history: object) -> None:
        """Replace the checkpoint, and the history beside the logs, unless the store keeps none."""
        if self.checkpoint_path is None:
            return
        self.store.write(self.checkpoint_path, content)
        self.store.write_text(f"{self.store.get_logs_path(self.run_id)}/history.json", json.dumps(history, indent=1))

    def _options(self, num_workers: int) -> ReadOptions:
        return ReadOptions(self.columns, self.transformation, self.removed_fields, num_workers, self.in_memory)


@dataclass(frozen=True)
class Progress:
    """Epochs of a run.

    Attributes:
        begin: epochs that had been trained when the last ``fit`` of the run began.
        done: epochs that have been trained.
        wanted: epochs that this ``fit`` was to train.
    """

    begin: int = 0
    done: int = 0
    wanted: int = 0

    def next_fit(self, epochs: int) -> Progress:
        """Return the progress at the beginning of another ``fit``.

        If the last one was interrupted, this one goes on with it; if it trained all its epochs, this one trains
        as many more as it is to.
        """
        begin = self.begin if self.done < self.begin + self.wanted else self.done
        return Progress(begin, self.done, epochs)

    @property
    def end(self) -> int:
        """Epochs after this ``fit``."""
        return self.begin + self.wanted

    def after(self, epoch: int) -> Progress:
        """Return the progress after an epoch (0, 1, ...)."""
        return Progress(self.begin, epoch + 1, self.wanted)
