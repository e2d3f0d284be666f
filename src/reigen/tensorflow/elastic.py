"""Elastic training with TensorFlow: ``hvd.elastic`` in scripts; with Keras, see `reigen.tensorflow.keras.elastic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from reigen.api.job import rank
from reigen.api.lazy_names import make_lazy_names
from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave
from reigen.elastic.array_job import VariableJob
from reigen.elastic.cursor import Cursor
from reigen.elastic.loop import repeat_in_views
from reigen.elastic.state import Departure
from reigen.errors import ArgumentError
from reigen.tensorflow.errors import collective_errors
from reigen.tensorflow.functions import broadcast_, broadcast_object
from reigen.tensorflow.keras_backend import BACKEND

__all__ = [
    "Cursor",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Job",
    "ObjectState",
    "State",
    "TensorFlowState",
    "history",
    "leave",
    "run",
]

#: needs Keras, which takes longer to import than all else here
__getattr__, __dir__ = make_lazy_names(__name__, {"TensorFlowKerasState": "reigen.tensorflow.keras.elastic"})


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, as `reigen.elastic.run` does; failures of collectives in graphs count, too."""
    return repeat_in_views(func, errors=collective_errors)


class TensorFlowState(ObjectState):
    """State of variables of TensorFlow; other keyword arguments are attributes as of `ObjectState`.

    Args:
        variables: None: the global variables of the default graph.
        session: of ``tf.compat.v1``; None: the default one, or eager execution.
        kwargs: names and first values of attributes.

    Raises:
        ArgumentError: there are no variables: eager code has to name them.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.session = session
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        if variables is None and not self.variables:
            raise ArgumentError("TensorFlowState needs variables: there are no global ones with eager execution")
        self._saved_values: list[Any] = []
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Keep copies of the variables and the attributes."""
        if self._is_eager:
            self._saved_values = [variable.numpy().copy() for variable in self.variables]
        else:
            self._saved_values = self._session.run(self.variables)
        super().save()

    def restore(self) -> None:
        """Go back to the saved values."""
        self._assign(self._saved_values)
        super().restore()

    def sync(self) -> None:
        """Collective: variables and attributes become those of rank 0, and are saved."""
        if self._is_eager:
            broadcast_(self.variables, 0, "elastic.variables")
        else:
            self._assign(broadcast_object(self._session.run(self.variables), name="elastic.variables"))
        super().sync()

    @property
    def _is_eager(self) -> bool:
        return self.session is None and tf.executing_eagerly()

    @property
    def _session(self) -> Any:
        session = self.session or tf.compat.v1.get_default_session()
        if session is None:
            raise ArgumentError(
                "TensorFlowState needs a session in a graph: give it one, or enter session.as_default()"
            )
        return session

    def _assign(self, values: Sequence[Any]) -> None:
        if self._is_eager:
            for variable, value in zip(self.variables, values, strict=True):
                variable.assign(value)
            return
        for variable, value in zip(self.variables, values, strict=True):
            variable.load(value, self._session)


class EagerVariables:
    """A `reigen.elastic.array_job.VariableValues`."""

    def read(self, variable: Any) -> Any:
        """Return a variable's value, as an array that stays as it is."""
        return variable.numpy().copy()

    def zeros(self, variable: Any) -> Any:
        """Return a tensor of zeros of its shape and dtype."""
        return tf.zeros(variable.shape, variable.dtype)


class Job(VariableJob):
    """Elastic training with TensorFlow in which no step and no sample is lost when processes die.

    Where members change in ``with step:``, the step is undone, and comes again from `steps` with its samples dealt to
    the members that there are now; nothing is raised. A step that some members had applied is not run again: the others
    get its result.

    `apply` averages the gradients, and applies them when all averages are there. Gradients may be computed in a
    ``tf.function``, which must not average or apply them. Behind `apply` the block must not communicate.

    Args:
        variables: that gradients are of; changed by the optimizer, or in `update`, and nowhere else.
        optimizer: a plain one of Keras; None: the program changes the variables itself, in ``with job.update():``
            behind `average`.
        data: the samples.
        others: variables besides, such as statistics that a forward pass changes, or slots that the program keeps:
            undone with a step, and given to newcomers.
        min_size: with fewer members steps wait.
        resume: a checkpoint to begin with, if it is there; where ranks have different ones, the latest.
        on_leave: called with a `Departure` when this process leaves the job after a notice, before it ends.

    Raises:
        ArgumentError: an argument makes no sense; or, in a newcomer, its variables are not those of the members.

    Example::

        with hvd.elastic.Job(model.trainable_variables, optimizer, data=data, min_size=2) as job:
            for step in job.steps(epochs=10):
                with step:
                    job.apply([gradients_of(images[part.indices], labels[part.indices]) for part in step.parts])
    """

    def __init__(
        self,
        variables: Sequence[Any],
        optimizer: Any = None,
        *,
        data: Cursor,
        others: Sequence[Any] = (),
        min_size: int = 1,
        resume: str | os.PathLike[str] | None = None,
        on_leave: Callable[[Departure], None] | None = None,
    ) -> None:
        options: dict[str, Any] = {"min_size": min_size, "resume": resume, "on_leave": on_leave}
        super().__init__(BACKEND, EagerVariables(), variables, optimizer, data, buffers=others, **options)
