"""Callbacks for ``fit`` of the legacy Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from reigen.api.keras_callbacks import (
    BestModelCheckpointLogic,
    BroadcastLogic,
    LearningRateScheduleLogic,
    LearningRateWarmupLogic,
    MetricAverageLogic,
)
from reigen.tensorflow.functions import broadcast_
from reigen.tensorflow.keras.legacy_optimizer import inner_optimizer, make_variables, variables_of

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class LegacyAccess:
    """A `reigen.api.keras_callbacks.ModelAccess`."""

    def prepare(self, model: Any) -> None:
        """Do nothing: ``fit`` reads and writes the variables."""

    def is_built(self, model: Any) -> bool:
        """Make the optimizer's variables, and return whether all exist."""
        if model.built and model.optimizer is not None:
            make_variables(inner_optimizer(model.optimizer), model.trainable_variables)
        return bool(model.built)

    def broadcast(self, model: Any, root_rank: int, local_variables: Sequence[Any]) -> None:
        """Overwrite the variables of the model and of its optimizer."""
        local = set(map(id, local_variables))
        own = [] if model.optimizer is None else variables_of(model.optimizer)
        broadcast_([each for each in [*model.variables, *own] if id(each) not in local], root_rank, "keras.variables")

    def get_learning_rate(self, model: Any) -> float:
        """Return it."""
        return float(tf.keras.backend.get_value(model.optimizer.learning_rate))

    def set_learning_rate(self, model: Any, value: float) -> None:
        """Change it."""
        tf.keras.backend.set_value(model.optimizer.learning_rate, value)

    def correct_momentum(self, model: Any, ratio: float) -> None:
        """Scale the optimizer's velocities: its ``momentum`` is a constant of compiled programs."""
        optimizer = inner_optimizer(model.optimizer)
        if not isinstance(optimizer, (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD)):
            return
        for variable in variables_of(optimizer):
            if "momentum" in variable.name or variable.name.startswith("m/"):
                variable.assign(variable * tf.cast(ratio, variable.dtype))

    def restore_momentum(self, model: Any) -> None:
        """Do nothing: no change was for one batch only."""


_ACCESS = LegacyAccess()


class BroadcastGlobalVariablesCallback(BroadcastLogic, tf.keras.callbacks.Callback):  # noqa: D101 - inherited
    __doc__ = BroadcastLogic.__doc__
    access = _ACCESS


class MetricAverageCallback(MetricAverageLogic, tf.keras.callbacks.Callback):  # noqa: D101 - inherited
    __doc__ = MetricAverageLogic.__doc__


class LearningRateScheduleCallback(LearningRateScheduleLogic, tf.keras.callbacks.Callback):  # noqa: D101 - inherited
    __doc__ = LearningRateScheduleLogic.__doc__
    access = _ACCESS


class LearningRateWarmupCallback(LearningRateWarmupLogic, tf.keras.callbacks.Callback):  # noqa: D101 - inherited
    __doc__ = LearningRateWarmupLogic.__doc__
    access = _ACCESS


class BestModelCheckpoint(BestModelCheckpointLogic, tf.keras.callbacks.ModelCheckpoint):
    """Saves the best model of all epochs, on rank 0 only; the metric should be averaged before.

    Args:
        monitor: name of the metric.
        verbose: 1: print a line when it is saved.
        mode: ``min``, ``max`` or ``auto``.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: of the model; it may be set as an attribute later.
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
            filepath=filepath or "best.h5",  # Keras wants one here
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath
