"""Elastic training with Keras 3, on any of its backends: ``hvd.elastic`` in scripts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave, membership
from reigen.elastic.array_job import VariableJob
from reigen.elastic.cursor import Cursor
from reigen.elastic.keras_logic import (
    CommitStateLogic,
    KerasStateLogic,
    UpdateBatchStateLogic,
    UpdateEpochStateLogic,
)
from reigen.elastic.loop import repeat_in_views
from reigen.elastic.state import Departure
from reigen.errors import ArgumentError
from reigen.keras.backend import load_backend
from reigen.keras.callbacks import Keras3Access
from reigen.keras.functions import broadcast_variables

__all__ = [
    "CommitStateCallback",
    "Cursor",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Job",
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

    def own_variables(self, model: Any) -> Sequence[Any]:
        """Return the seeds of layers."""
        weights = {id(variable) for variable in model.weights}
        return [variable for variable in model.variables if id(variable) not in weights]

    def read(self, variable: Any) -> Any:
        """Return a variable's value, as an array that stays as it is."""
        return np.array(ops.convert_to_numpy(variable))

    def zeros(self, variable: Any) -> Any:
        """Return a tensor of zeros of its shape and dtype."""
        return ops.zeros(variable.shape, variable.dtype)

    def overwrite(self, variables: Sequence[Any]) -> None:
        """Collective: overwrite the variables with those of rank 0."""
        broadcast_variables(list(variables), 0)


class KerasState(KerasStateLogic):  # noqa: D101 - as what it inherits
    __doc__ = KerasStateLogic.__doc__
    access = Keras3Variables()


class Job(VariableJob):
    """Elastic training with Keras 3, in a loop of your own, in which no step and no sample is lost when processes die.

    Where members change in ``with step:``, the step is undone, and comes again from `steps` with its samples dealt to
    the members that there are now; nothing is raised. A step that some members had applied is not run again: the others
    get its result.

    `apply` averages the gradients, and applies them when all averages are there. Gradients may be computed in a
    program (``tf.function``, ``jax.jit``), which must not average or apply them. Behind `apply` the block must not
    communicate. Not for ``fit``, which computes and applies gradients in one program.

    Args:
        model: it has to be built.
        optimizer: a plain one; None: that with which the model was compiled.
        data: the samples.
        min_size: with fewer members steps wait.
        resume: a checkpoint to begin with, if it is there; where ranks have different ones, the latest.
        on_leave: called with a `Departure` when this process leaves the job after a notice, before it ends.

    Raises:
        ArgumentError: an argument makes no sense; or, in a newcomer, its model is not that of the members.

    Example::

        with hvd.elastic.Job(model, keras.optimizers.Adam(), data=data, min_size=2) as job:
            for step in job.steps(epochs=10):
                with step:
                    job.apply([gradients_of(images[part.indices], labels[part.indices]) for part in step.parts])
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        data: Cursor,
        min_size: int = 1,
        resume: str | os.PathLike[str] | None = None,
        on_leave: Callable[[Departure], None] | None = None,
    ) -> None:
        if not getattr(model, "built", False):
            raise ArgumentError("the model has no variables yet: build() it, or call it on a batch")
        optimizer = optimizer or model.optimizer
        trained, weights = model.trainable_variables, {id(each) for each in model.weights}
        changing = [each for each in model.variables if not any(each is one for one in trained)]
        buffers = [each for each in changing if id(each) in weights]
        local = [each for each in changing if id(each) not in weights]
        options: dict[str, Any] = {"min_size": min_size, "resume": resume, "on_leave": on_leave}
        backend, access = load_backend(), Keras3Variables()
        super().__init__(backend, access, trained, optimizer, data, buffers=buffers, local=local, **options)


class CommitStateCallback(CommitStateLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = CommitStateLogic.__doc__


class UpdateBatchStateCallback(UpdateBatchStateLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = UpdateBatchStateLogic.__doc__


class UpdateEpochStateCallback(UpdateEpochStateLogic, keras.callbacks.Callback):  # noqa: D101 - as what it inherits
    __doc__ = UpdateEpochStateLogic.__doc__
