"""Logic of the callbacks for Keras, without Keras: the classes for Keras 3 and for legacy tf_keras inherit it.

A subclass is of a class here and of its Keras's ``Callback``, in this order, and says in ``access`` how its Keras's
models are read and changed.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np

from reigen import context
from reigen.errors import ArgumentError
from reigen.types import DTYPES, ReduceOp

Logs = MutableMapping[str, Any]


class ModelAccess(Protocol):
    """Access to a Keras's models while ``fit`` runs."""

    def prepare(self, model: Any) -> None:
        """Have the values of the model's variables in the variables, and read from there by the next batch."""

    def is_built(self, model: Any) -> bool:
        """Return whether all variables of the model and of its optimizer exist."""

    def broadcast(self, model: Any, root_rank: int, local_variables: Sequence[Any]) -> None:
        """Overwrite the variables of the model and of its optimizer, without the local ones, with the root's."""

    def get_learning_rate(self, model: Any) -> float:
        """Return the optimizer's learning rate."""

    def set_learning_rate(self, model: Any, value: float) -> None:
        """Change the optimizer's learning rate."""

    def correct_momentum(self, model: Any, ratio: float) -> None:
        """Have the next batch's momentum term multiplied by ``ratio``, if the optimizer's has the rate in it."""

    def restore_momentum(self, model: Any) -> None:
        """After that batch: take back what `correct_momentum` has changed for one batch only."""


class BroadcastLogic:
    """Starts all ranks with the root's variables.

    Where all ranks have built their model when training begins, the broadcast is then; otherwise after the first batch.

    Args:
        root_rank: whose values all get.
        device: accepted for Horovod's sake.
        local_variables: variables that stay as they are on each rank.
    """

    access: ModelAccess
    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.local_variables = list(local_variables or ())
        self.broadcast_done = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Broadcast, if every rank can."""
        if not self.broadcast_done:
            built = np.array([self.access.is_built(self.model)], np.int32)
            if _combine(built, ReduceOp.MIN, "keras.broadcast.built")[0]:
                self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Broadcast after the first batch, if it was not possible before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        self.access.prepare(self.model)
        self.access.broadcast(self.model, self.root_rank, self.local_variables)
        self.broadcast_done = True


class MetricAverageLogic:
    """Averages the metrics of an epoch over all ranks, for the callbacks that come after this one in the list.

    Every rank has the same metrics; an average of ranks with different numbers of samples is that of their averages.

    Args:
        device: accepted for Horovod's sake.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Overwrite the numbers in ``logs`` with their averages.

        Raises:
            CollectiveError: the ranks have different numbers of metrics, or the job is broken.
        """
        if not logs:
            return
        names = sorted(logs)
        values = np.array([float(logs[name]) for name in names], np.float64)
        for name, value in zip(names, _combine(values, ReduceOp.AVERAGE, "keras.metrics").tolist(), strict=True):
            logs[name] = value


class LearningRateScheduleLogic:
    """Sets the learning rate to ``initial_lr`` times a multiplier of the epoch.

    Args:
        initial_lr: learning rate that is multiplied.
        multiplier: a number, or a function of the epoch; of fractions of it, too, unless ``staircase``.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the first one after it in which it is not; None: there is none.
        staircase: set it at the beginning of an epoch only, not before every batch.
        momentum_correction: where the rate is part of the momentum (SGD, RMSprop), scale that with it.
        steps_per_epoch: batches in an epoch; None: as ``fit`` knows.

    Raises:
        ArgumentError: there is no ``initial_lr``; or, when training begins, the number of steps is needed and unknown.
    """

    access: ModelAccess
    model: Any
    params: Any

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ArgumentError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find out how many batches an epoch has."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ArgumentError(
                    f"could not find out the number of steps per epoch: give steps_per_epoch to {type(self).__name__}()"
                )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the learning rate, where it is time to."""
        past = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or past or (self.staircase and batch != 0):
            return
        begun = self.current_epoch
        self._adjust(begun if self.staircase else begun + batch / (self.steps_per_epoch or 1))

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Undo changes that were for one batch."""
        self.access.restore_momentum(self.model)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the learning rate, as ``lr``."""
        if logs is not None:
            logs["lr"] = self.access.get_learning_rate(self.model)

    def _adjust(self, epoch: float) -> None:
        self.access.prepare(self.model)
        before = self.access.get_learning_rate(self.model)
        after = self.initial_lr * self.multiplier(epoch)
        self.access.set_learning_rate(self.model, after)
        if self.momentum_correction and before > 0 and after != before:
            self.access.correct_momentum(self.model, after / before)


class LearningRateWarmupLogic(LearningRateScheduleLogic):
    """Raises the learning rate, batch by batch, from ``initial_lr`` divided by the number of ranks to ``initial_lr``.

    After Goyal et al., Accurate, Large Minibatch SGD, section 2.2.

    Args:
        initial_lr: learning rate after the warm-up.
        warmup_epochs: how many epochs it takes.
        momentum_correction: see `LearningRateScheduleLogic`.
        steps_per_epoch: batches in an epoch; None: as ``fit`` knows.
        verbose: 1: print a line when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = context.current().size
            done = epoch + 1.0 / (self.steps_per_epoch or 1)  # the last batch of an epoch has a round number
            return (done * (size - 1) / warmup_epochs + 1) / size

        # Horovod's own: a fraction of an epoch ends with the epoch in which it lies
        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,  # type: ignore[arg-type]
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the learning rate; print it when the warm-up is done."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = self.access.get_learning_rate(self.model)
            print(  # noqa: T201 - as Keras's own callbacks do
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}."
            )


class BestModelCheckpointLogic:
    """Saves the best model of all epochs, on rank 0 only."""

    filepath: str | None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save the model if it is the best so far."""
        if self._saves():
            super().on_epoch_end(epoch, logs)  # type: ignore[misc]  # Keras's

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save the model, where ``save_freq`` is a number of batches."""
        if self._saves():
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]  # Keras's

    def _saves(self) -> bool:
        if self.filepath is None:  # on all ranks: the others would wait for one that fails
            raise ArgumentError("BestModelCheckpoint has no filepath: give it one, or set its attribute before fit()")
        return context.current().rank == 0


def _combine(array: Any, op: ReduceOp, name: str) -> Any:
    """Allreduce numbers in place, and wait."""
    context.current().allreduce(array, array, DTYPES[array.dtype.name], op=op, name=name, blocking=True).wait()
    return array
