"""States and callbacks of elastic training, for the legacy Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from reigen.elastic.keras_logic import (
    CommitStateLogic,
    KerasStateLogic,
    UpdateBatchStateLogic,
    UpdateEpochStateLogic,
)
from reigen.tensorflow.functions import broadcast_
from reigen.tensorflow.keras.legacy_optimizer import inner_optimizer, make_variables, variables_of


class LegacyVariables:
    """A `reigen.elastic.keras_logic.VariableAccess`."""

    def prepare(self, model: Any) -> None:
        """Do nothing: ``fit`` reads and writes the variables."""

    def build(self, model: Any, optimizer: Any) -> None:
        """Make the optimizer's variables, if they are not there yet."""
        make_variables(inner_optimizer(optimizer), model.trainable_variables)

    def variables(self, model: Any, optimizer: Any) -> Sequence[Any]:
        """Return the variables of both."""
        return [*model.variables, *(() if optimizer is None else variables_of(optimizer))]

    def own_variables(self, model: Any) -> Sequence[Any]:
        """Return none: all are those of the model."""
        return ()

    def read(self, variable: Any) -> Any:
        """Return a variable's value, as an array that stays as it is."""
        return variable.numpy().copy()

    def overwrite(self, variables: Sequence[Any]) -> None:
        """Collective: overwrite the variables with those of rank 0."""
        broadcast_(list(variables), 0, "elastic.variables")


class KerasState(KerasStateLogic):  # noqa: D101 - as what it inherits
    __doc__ = KerasStateLogic.__doc__
    access = LegacyVariables()


class CommitStateCallback(CommitStateLogic, tf.keras.callbacks.Callback):  # noqa: D101 - inherited
    __doc__ = CommitStateLogic.__doc__


class UpdateBatchStateCallback(UpdateBatchStateLogic, tf.keras.callbacks.Callback):  # noqa: D101 - inherited
    __doc__ = UpdateBatchStateLogic.__doc__


class UpdateEpochStateCallback(UpdateEpochStateLogic, tf.keras.callbacks.Callback):  # noqa: D101 - inherited
    __doc__ = UpdateEpochStateLogic.__doc__
