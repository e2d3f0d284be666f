"""Callbacks for ``fit`` of Keras 3, on any of its backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from reigen.api.keras_callbacks import (
    BestModelCheckpointLogic,
    BroadcastLogic,
    LearningRateScheduleLogic,
    LearningRateWarmupLogic,
    MetricAverageLogic,
)
from reigen.keras.functions import broadcast_variables

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class Keras3Access:
    """A `reigen.api.keras_callbacks.ModelAccess`."""

    def prepare(self, model: Any) -> None:
        """On JAX ``fit`` keeps the values for itself; after this the next batch takes them from the variables."""
        sync = getattr(model, "jax_state_sync", None)
        if sync is not None:
            sync()

    def is_built(self, model: Any) -> bool:
        """Return whether all variables exist."""
        return bool(model.built and (model.optimizer is None or model.optimizer.built))

    def broadcast(self, model: Any, root_rank: int, local_variables: Sequence[Any]) -> None:
        """Seeds are no weights: layers such as Dropout have their own on each rank."""
        local = set(map(id, local_variables))
        own = [] if model.optimizer is None else model.optimizer.variables
        broadcast_variables([each for each in [*model.weights, *own] if id(each) not in local], root_rank)

    def get_learning_rate(self, model: Any) -> float:
        """Return it, with the values that ``fit`` has."""
        self.prepare(model)
        return float(ops.convert_to_numpy(model.optimizer.learning_rate))

    def set_learning_rate(self, model: Any, value: float) -> None:
        """Change it."""
        model.optimizer.learning_rate = value

    def correct_momentum(self, model: Any, ratio: float) -> None:
        """Scale the optimizer's velocities: its ``momentum`` is a constant of compiled programs."""
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if not getattr(optimizer, "momentum", 0.0):
            return
        for variable in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or ():
            variable.assign(variable * ratio)

    def restore_momentum(self, model: Any) -> None:
        """Do nothing: no change was for one batch only."""


_ACCESS = Keras3Access()


class BroadcastGlobalVariablesCallback(BroadcastLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = BroadcastLogic.__doc__
    access = _ACCESS

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the optimizer's variables, as ``fit`` has done on JAX and PyTorch; broadcast, if every rank can."""
        optimizer = self.model.optimizer
        if self.model.built and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        super().on_train_begin(logs)


class MetricAverageCallback(MetricAverageLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = MetricAverageLogic.__doc__


class LearningRateScheduleCallback(LearningRateScheduleLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = LearningRateScheduleLogic.__doc__
    access = _ACCESS


class LearningRateWarmupCallback(LearningRateWarmupLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = LearningRateWarmupLogic.__doc__
    access = _ACCESS


class BestModelCheckpoint(BestModelCheckpointLogic, keras.callbacks.ModelCheckpoint):
    """Saves the best model of all epochs, on rank 0 only; the metric should be averaged before.

    Args:
        monitor: name of the metric.
        verbose: 1: print a line when it is saved.
        mode: ``min``, ``max`` or ``auto``.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: ends with ``.keras``; it may be set as an attribute later.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            filepath=filepath or "best.keras",  # Keras wants one here
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath
