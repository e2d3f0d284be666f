"""Elastic training with Keras 3, on any of its backends: ``hvd.elastic`` in scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave, membership
from reigen.elastic.keras_logic import (
    CommitStateLogic,
    KerasStateLogic,
    UpdateBatchStateLogic,
    UpdateEpochStateLogic,
)
from reigen.elastic.loop import repeat_in_views
from reigen.keras.backend import load_backend
from reigen.keras.callbacks import Keras3Access
from reigen.keras.functions import broadcast_variables

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "history",
    "leave",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, as `reigen.elastic.run` does; failures in the backend's programs count, too."""
    backend = load_backend()
    return repeat_in_views(func, reset=lambda: backend.change_job(membership.reset), errors=backend.collective_errors)


class Keras3Variables(Keras3Access):
    """A `reigen.elastic.keras_logic.VariableAccess`."""

    def build(self, model: Any, optimizer: Any) -> None:
        """Make the optimizer's variables, if they are not there yet."""
        if not optimizer.built:
            optimizer.build(model.trainable_variables)

    def variables(self, model: Any, optimizer: Any) -> Sequence[Any]:
        """Return the variables of both, without the seeds of layers, of which each rank has its own."""
        return [*model.weights, *(() if optimizer is None else optimizer.variables)]

    def read(self, variable: Any) -> Any:
        """Return a variable's value, as an array that stays as it is."""
        return np.array(ops.convert_to_numpy(variable))

    def overwrite(self, variables: Sequence[Any]) -> None:
        """Collective: overwrite the variables with those of rank 0."""
        broadcast_variables(list(variables), 0)


class KerasState(KerasStateLogic):  # noqa: D101 - as what it inherits
    __doc__ = KerasStateLogic.__doc__
    access = Keras3Variables()


class CommitStateCallback(CommitStateLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = CommitStateLogic.__doc__


class UpdateBatchStateCallback(UpdateBatchStateLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = UpdateBatchStateLogic.__doc__


class UpdateEpochStateCallback(UpdateEpochStateLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = UpdateEpochStateLogic.__doc__
