"""Elastic training with Keras, without Keras: states and callbacks that Keras 3 and legacy tf_keras inherit."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

from reigen.api.functions import broadcast_object
from reigen.api.job import rank
from reigen.elastic.state import ObjectState, State

Logs = MutableMapping[str, Any]

#: What Keras has traced for a model, with what was agreed on in the job of that time.
_PROGRAMS = ("train_function", "test_function", "predict_function", "train_tf_function")


class VariableAccess(Protocol):
    """Access to the variables of a Keras's models."""

    def prepare(self, model: Any) -> None:
        """Have the values of the model's variables in the variables, and read from there by the next batch."""

    def build(self, model: Any, optimizer: Any) -> None:
        """Make the optimizer's variables, if they are not there yet."""

    def variables(self, model: Any, optimizer: Any) -> Sequence[Any]:
        """Return the variables of both, in the same order on every rank."""

    def own_variables(self, model: Any) -> Sequence[Any]:
        """Return variables of which each rank has its own, as the seeds of layers."""

    def read(self, variable: Any) -> Any:
        """Return a variable's value, as an array that stays as it is."""

    def overwrite(self, variables: Sequence[Any]) -> None:
        """Collective: overwrite the variables with those of rank 0."""


class KerasStateLogic(ObjectState):
    """State of a model of Keras and its optimizer; other keyword arguments are attributes as of `ObjectState`.

    After a change of members the model's programs are traced anew: what ranks agree on for their gradients is in them.

    Args:
        model: it has to be built: given its input's shape, or called once.
        optimizer: None: that with which the model was compiled.
        kwargs: names and first values of more attributes, such as ``epoch=0, batch=0``.

    Raises:
        ArgumentError (a ValueError): a value cannot be copied.
        ValueError: the model is not built.
    """

    access: ClassVar[VariableAccess]

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", False):
            raise ValueError(
                "the model has no variables yet: build() it, call it on a batch, or give its first layer an input_shape"
            )
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        self._saved_values: list[Any] = []
        self._saved_own_values: list[Any] = []
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Keep copies of the variables and the attributes."""
        self.access.prepare(self.model)
        self._saved_values = [self.access.read(variable) for variable in self._variables()]
        self._saved_own_values = [self.access.read(variable) for variable in self.access.own_variables(self.model)]
        super().save()

    def restore(self) -> None:
        """Go back to the saved values; variables that an optimizer has made since then become zero."""
        variables, values = self._variables(), self._saved_values
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)
        for variable in variables[len(values) :]:
            variable.assign(0 * self.access.read(variable))
        for variable, value in zip(self.access.own_variables(self.model), self._saved_own_values, strict=False):
            variable.assign(value)  # an interrupted program may have left none, or its error
        super().restore()

    def sync(self) -> None:
        """Collective: variables and attributes become those of rank 0, and are saved."""
        if self.optimizer is not None:
            self.access.build(self.model, self.optimizer)
        self.access.prepare(self.model)
        self.access.overwrite(self._variables())
        super().sync()

    def reset(self) -> None:
        """Have the model's programs traced anew."""
        for name in _PROGRAMS:
            if getattr(self.model, name, None) is not None:
                setattr(self.model, name, None)

    def _variables(self) -> list[Any]:
        return list(self.access.variables(self.model, self.optimizer))


class CommitStateLogic:
    """Commits the state after every so many batches, and at the end of each epoch.

    Args:
        state: what is committed.
        batches_per_commit: a commit is a copy of the variables: with fewer of them less time is spent, and more of the
            work is done again after an error.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Count from the beginning."""
        self._left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Commit, where it is time to."""
        self._left -= 1
        if self._left <= 0:
            self._left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateLogic:
    """Keeps ``state.batch``: how many batches of the epoch are done; before `CommitStateLogic` in the list.

    Where ``fit`` goes on in the middle of an epoch, its batches count from where that was left, and ``params["steps"]``
    is what is left of them, for a progress bar. How many batches it takes is what ``fit`` was given.

    Args:
        state: with an attribute ``batch``.
    """

    params: Any

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._num_steps: int | None = None
        self._begun = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the number of steps."""
        self._num_steps = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Go on from the state's batch."""
        self._begun = self.state.batch
        params = self.params or {}
        if params.get("steps"):
            self._num_steps = self._num_steps or params["steps"]
            params["steps"] = self._num_steps - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count the batch."""
        self.state.batch = self._begun + batch + 1

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin anew."""
        self.state.batch = 0


class UpdateEpochStateLogic:
    """Keeps ``state.epoch``: how many epochs are over, in all calls of ``fit``; before `CommitStateLogic` in the list.

    Args:
        state: with an attribute ``epoch``. ``fit`` gets ``epochs=total - state.epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Remember where this ``fit`` begins."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Count the epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
