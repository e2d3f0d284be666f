"""Jobs of frameworks whose gradients are values: reduced when all are there, and then applied, with nothing between.

a. `ArrayJob.average` is the only thing that communicates in a step. It is all or nothing on each rank: all sums of all
   gradients, or an error.
b. Behind it the weights are changed, within `ArrayJob.update`, which communicates nothing. So a member has applied a
   step as a whole or not at all, and undoing one that it has not applied leaves its weights alone.
c. What members give each other, digests and checkpoints are made of NumPy arrays (`ArrayTraining.read`), in an order
   that is the same on all of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reigen.api.collectives import Collectives, resolve_reduction
from reigen.api.job import rank
from reigen.api.numpy_adapter import NumpyAdapter
from reigen.api.operations import ALLREDUCE, BROADCAST, Sum
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.elastic.cursor import Cursor, Part
from reigen.elastic.job import BaseJob
from reigen.elastic.membership import WARM_SPARES_TEXT
from reigen.elastic.pauses import BroadcastPauses
from reigen.elastic.state import Departure
from reigen.elastic.state_transfer import digest_of, read_from_source
from reigen.elastic.training import (
    LocalState,
    TrainingState,
    generator_states,
    reading_checkpoint,
    set_generator_states,
)
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError, CollectiveError, StepOrderError
from reigen.files import write_atomically

_COLLECTIVES = Collectives(NumpyAdapter())
_SUM = resolve_reduction(None, Sum, 1.0, 1.0)

Values = list[NDArray[Any]]


class GradientBackend(Protocol):
    """Interface to a framework; see `reigen.keras.backend.KerasBackend`, which is one."""

    def reduce_gradients(
        self, tensors: Sequence[Any], reduction: ReductionSpec, name: str, process_set: ProcessSet
    ) -> list[Any]:
        """Return dense tensors, reduced as one operation, all or none."""

    def wait_for(self, values: Sequence[Any]) -> None:
        """Return when tensors have been computed."""

    def change_job(self, change: Callable[[], None]) -> None:
        """Call ``change``, which leaves the job and enters another."""

    def collective_errors(self) -> AbstractContextManager[None]:
        """Return a context in which the framework's errors of failed collectives become CollectiveErrors."""

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which an optimizer is applied: the framework computes no gradients of that."""

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether it is a gradient of rows and their numbers."""

    def to_dense(self, gradient: Any) -> Any:
        """Return a sparse gradient as a tensor."""


class _ArraysOfRanks:
    """Implementation of `LocalState` where what each rank has for itself is among its arrays, and cannot be known."""

    is_empty = True

    def find_problem(self) -> str:
        """Implement `LocalState.find_problem`."""
        return WARM_SPARES_TEXT

    def copy(self) -> None:
        """Implement `LocalState.copy`."""

    def load(self, local: Any) -> None:
        """Implement `LocalState.load`."""


class ArrayTraining(TrainingState, ABC):
    """Training whose weights and optimizer state can be read and written as arrays.

    It has no hooks, no gradients of its own, and no small state that is not in the arrays.

    Args:
        backend: of the framework.
    """

    def __init__(self, backend: GradientBackend) -> None:
        self.backend = backend
        self.local: LocalState = _ArraysOfRanks()
        self.update: AbstractContextManager[None] | None = None
        self._generators: dict[str, Any] = {}
        self._broadcasts = BroadcastPauses()

    @abstractmethod
    def read(self) -> Values:
        """Return what members have in common, as arrays that stay as they are."""

    @abstractmethod
    def write(self, values: Values) -> None:
        """Take what `read` has returned on another member, or before."""

    @abstractmethod
    def zeros(self) -> list[Any]:
        """Return gradients of zeros, for a rank that has no samples."""

    def attach(self, update: AbstractContextManager[None], complete: Callable[[CollectiveError], bool]) -> None:
        """Implement `TrainingState.attach`."""
        self.update = update

    def detach(self) -> None:
        """Implement `TrainingState.detach`."""
        self.update = None

    def registered_bytes(self) -> int:
        """Implement `TrainingState.registered_bytes`."""
        return 0

    def warm_up(self) -> None:
        """Implement `TrainingState.warm_up`."""

    def change_view(self, change: Callable[[], None]) -> None:
        """Implement `TrainingState.change_view`."""
        self.backend.change_job(change)

    def collective_error(self, error: BaseException) -> BaseException:
        """Implement `TrainingState.collective_error`."""
        try:
            with self.backend.collective_errors():
                raise error
        except BaseException as found:  # noqa: BLE001  it is returned
            return found
        finally:
            del error  # its traceback has this frame

    def begin_step(self) -> None:
        """Implement `TrainingState.begin_step`."""
        self._generators = generator_states()

    def failed_update(self) -> bool | None:
        """Implement `TrainingState.failed_update`."""
        return False

    def gradients(self) -> Any:
        """Implement `TrainingState.gradients`."""
        return None

    def small_state(self) -> Any:
        """Implement `TrainingState.small_state`."""
        return None

    def undo_step(self) -> None:
        """Implement `TrainingState.undo_step`."""
        set_generator_states(self._generators)

    def finish_gradients(self) -> None:
        """Implement `TrainingState.finish_gradients`."""

    def begin_part(self, part: Part, step: int, size: int) -> None:
        """Implement `TrainingState.begin_part`."""

    def end_parts(self) -> None:
        """Implement `TrainingState.end_parts`."""

    def drop_gradients(self) -> None:
        """Implement `TrainingState.drop_gradients`."""

    def describe_view(self) -> Any:
        """Implement `TrainingState.describe_view`."""
        return None

    def enter_view(self, described: Sequence[Any], *, keeps_gradients: bool) -> None:
        """Implement `TrainingState.enter_view`."""

    def renew(self) -> None:
        """Implement `TrainingState.renew`."""

    def set_gradients(self, gradients: Any) -> None:
        """Implement `TrainingState.set_gradients`."""

    def load_small_state(self, small: Any) -> None:
        """Implement `TrainingState.load_small_state`."""

    def backup(self) -> Any:
        """Implement `TrainingState.backup`."""
        return self.read()

    def recover(self, backup: Any) -> None:
        """Implement `TrainingState.recover`."""
        self.write(backup)

    def offer(self) -> None:
        """Implement `TrainingState.offer`: arrays are copies, which undoing a step would make old ones."""

    def transfer(self, source: int, receivers: frozenset[int], **_: Any) -> None:
        """Implement `TrainingState.transfer`; receivers always have everything."""
        receives = rank() in receivers
        arrays = [
            np.empty_like(array, order="C") if receives else np.asarray(array, order="C") for array in self.read()
        ]
        layout = "\n".join(f"{array.dtype.name} {array.shape}" for array in arrays)
        contents = list(map(_bytes_of, arrays))
        if not read_from_source(contents, layout, source, receivers):
            names = (f"elastic.state.{number}" for number in range(len(contents)))
            num_bytes = sum(each.nbytes for each in contents)
            with self._broadcasts.measured(num_bytes, receivers, is_source=rank() == source):
                handles = [_COLLECTIVES.start(BROADCAST, c, source, n) for c, n in zip(contents, names, strict=False)]
                received = [handle.wait() for handle in handles]
            if receives:
                arrays = [r.view(each.dtype).reshape(each.shape) for r, each in zip(received, arrays, strict=True)]
        if receives:
            self.write(arrays)

    def digest(self) -> bytes:
        """Implement `TrainingState.digest`."""
        return digest_of(map(_bytes_of, self.read()))

    def state_dict(self) -> dict[str, Any]:
        """Implement `TrainingState.state_dict`."""
        return {"arrays": self.read()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implement `TrainingState.load_state_dict`."""
        own, given = ([(each.dtype, each.shape) for each in values] for values in (self.read(), state["arrays"]))
        if own != given:
            raise ArgumentError("the state that is loaded has not the arrays of this model and its optimizer")
        self.write(state["arrays"])


class ArrayJob(BaseJob):
    """Job whose program gives the gradients to the job, and changes the weights when it has them back.

    Args:
        training: what is trained.
        data: the samples.
        min_size: with fewer members steps wait.
        resume: a checkpoint to begin with, if it is there; where ranks have different ones, the latest.
        on_leave: called with a `Departure` when this process leaves the job after a notice, before it ends.
    """

    training: ArrayTraining
    counts_steps = True

    def __init__(
        self,
        training: ArrayTraining,
        data: Cursor,
        *,
        min_size: int,
        resume: str | os.PathLike[str] | None,
        on_leave: Callable[[Departure], None] | None,
    ) -> None:
        super().__init__(training, data, min_size=min_size, resume=resume, on_leave=on_leave)

    def average(self, gradients: Sequence[Any]) -> Any:
        """Collective: return the gradient of the mean loss over all samples of the step, of all ranks.

        Args:
            gradients: for each of this rank's ``step.parts`` the gradients of the mean loss over it, in the order of
                the variables; none where there is no part.

        Returns:
            Gradients, as those of a part; None for a variable that has none in any part.

        Raises:
            CollectiveError: it failed: members change, and ``with step:`` undoes the step. Or the program is wrong.
            ArgumentError, StepOrderError: it is called in a wrong way.
        """
        return self._average([list(each) for each in gradients], self.training.zeros)

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Change weights and optimizer state within this context; once a step, behind `average`.

        Nothing in it may communicate. The step is applied when it ends.

        Raises:
            StepOrderError: outside of a step, or twice in one; or a collective has failed in it, which ends this
                process's part in the job.
            PeerLostError: members change, and ``with step:`` undoes the step.
        """
        self._check_in_step()
        assert self.training.update is not None
        with self.training.update:
            try:
                with self.training.backend.collective_errors():
                    yield
            except CollectiveError as error:
                raise StepOrderError(
                    f"a collective has failed within the update of the weights, of which a part may have been made: "
                    f"call collectives before it. {error}"
                ) from error

    def save(self, state: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write a state to a file, of NumPy's npz; atomically."""
        arrays: Values = state["training"]["arrays"]
        header = {"number": state["number"], "data": state["data"]}
        header["arrays"] = [[array.dtype.name, list(array.shape)] for array in arrays]
        file = io.BytesIO()
        parts = {str(number): _bytes_of(array) for number, array in enumerate(arrays)}
        np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **parts)  # type: ignore[arg-type]
        write_atomically(path, [file.getbuffer()])

    def load(self, path: str | os.PathLike[str]) -> bool:
        """Load a checkpoint, if it is there; return whether it was. Before the job's `with` block.

        Raises:
            ArgumentError: it is none, truncated or damaged, or that of another model or optimizer.
        """
        if not Path(path).exists():
            return False
        own = self.training.read()
        with reading_checkpoint(path), Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            number, data = header["number"], header["data"]
            if header["arrays"] != [[array.dtype.name, list(array.shape)] for array in own]:
                raise ArgumentError(f"{os.fspath(path)} has not the arrays of this model and its optimizer")
            arrays = [file[str(place)].view(array.dtype).reshape(array.shape) for place, array in enumerate(own)]
        self.load_state_dict({"number": number, "data": data, "training": {"arrays": arrays}})
        return True

    def _average(self, gradients: Sequence[list[Any]], zeros: Callable[[], list[Any]]) -> list[Any]:
        parts = self._check_in_step().parts[:]
        if len(gradients) != len(parts):
            raise ArgumentError(f"average() takes the gradients of {len(parts)} part(s), got {len(gradients)}")
        backend = self.training.backend
        total: list[Any] = zeros() if not gradients or any(each is None for row in gradients for each in row) else []
        is_there = np.zeros(len(total or gradients[0]), np.int32)
        rows = [
            [each if each is None or not backend.is_sparse(each) else backend.to_dense(each) for each in row]
            for row in gradients
        ]
        if any(len(row) != len(is_there) for row in rows):
            raise ArgumentError(f"gradients of {len(is_there)} variables are needed, got {[*map(len, rows)]}")
        for place in range(len(is_there)):
            found = [
                row[place] if part.share == 1.0 else row[place] * part.share
                for row, part in zip(rows, parts, strict=True)
                if row[place] is not None
            ]
            is_there[place] = len(found)
            value = sum(found[1:], found[0]) if found else total[place]
            total[place : place + 1] = [value]
        with backend.collective_errors():
            flags = _COLLECTIVES.start(ALLREDUCE, is_there, _SUM, "elastic.gradients.are_there")
            reduced = backend.reduce_gradients(total, _SUM, "elastic.gradients", global_process_set) if total else []
            backend.wait_for(reduced)
        return [value if count else None for value, count in zip(reduced, flags.wait(), strict=True)]

    def _check_in_step(self) -> Any:
        if self._step is None:
            raise StepOrderError("gradients are averaged, and weights changed, within the `with step:` block")
        return self._step


class VariableValues(Protocol):
    """Access to a framework's variables."""

    def read(self, variable: Any) -> NDArray[Any]:
        """Return a variable's value, as an array that stays as it is."""

    def zeros(self, variable: Any) -> Any:
        """Return a tensor of zeros of its shape and dtype."""


class VariableTraining(ArrayTraining):
    """Training of variables, which are changed in place.

    Args:
        backend: of the framework.
        access: to its variables.
        variables: by name, what is changed within the update and nowhere else: first those that gradients are of.
        buffers: what a step changes elsewhere, such as BatchNorm's statistics; undone with it.
        local: likewise, but each member has its own: seeds of layers, and metrics.
    """

    def __init__(
        self,
        backend: GradientBackend,
        access: VariableValues,
        variables: Mapping[str, Sequence[Any]],
        buffers: Sequence[Any] = (),
        local: Sequence[Any] = (),
    ) -> None:
        super().__init__(backend)
        self._access = access
        self._shared = {name: list(each) for name, each in variables.items()} | {"buffers": list(buffers)}
        self._changing = [*buffers, *local]
        self._kept: Values = []

    def zeros(self) -> list[Any]:
        """Implement `ArrayTraining.zeros`."""
        return [self._access.zeros(variable) for variable in next(iter(self._shared.values()))]

    def read(self) -> Values:
        """Implement `ArrayTraining.read`."""
        return [self._access.read(variable) for each in self._shared.values() for variable in each]

    def write(self, values: Values) -> None:
        """Implement `ArrayTraining.write`."""
        variables = [variable for each in self._shared.values() for variable in each]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def begin_step(self) -> None:
        """Implement `TrainingState.begin_step`."""
        super().begin_step()
        self._kept = [self._access.read(variable) for variable in self._changing]

    def undo_step(self) -> None:
        """Implement `TrainingState.undo_step`."""
        super().undo_step()
        for variable, value in zip(self._changing, self._kept, strict=True):
            variable.assign(value)

    def failed_update(self) -> bool | None:
        """Implement `TrainingState.failed_update`: some variables may have been changed, and others not."""
        return None

    def describe(self) -> dict[str, list[str]]:
        """Implement `TrainingState.describe`."""
        found = {}
        for name, variables in self._shared.items():
            values = [self._access.read(variable) for variable in variables]
            found[name] = [f"{place}: {value.dtype.name} {value.shape}" for place, value in enumerate(values)]
        return found


class VariableJob(ArrayJob):
    """Job of variables and an optimizer that changes them in place.

    Args:
        backend: of the framework.
        access: to its variables.
        variables: that gradients are of.
        optimizer: a plain one of Keras's kind; None: the program changes the variables itself.
        data: the samples.
        buffers, local: see `VariableTraining`.
        options: of `ArrayJob`.

    Raises:
        ArgumentError: there are no variables, or an optimizer of another kind.
    """

    def __init__(
        self,
        backend: GradientBackend,
        access: VariableValues,
        variables: Sequence[Any],
        optimizer: Any,
        data: Cursor,
        *,
        buffers: Sequence[Any] = (),
        local: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        if not variables:
            raise ArgumentError("a Job needs variables that are trained")
        if optimizer is not None and (not hasattr(optimizer, "build") or hasattr(optimizer, "register_local_var")):
            raise ArgumentError(
                f"the job averages gradients by itself, and takes a plain optimizer of Keras, got {optimizer!r:.60}"
            )
        if optimizer is not None and not optimizer.built:
            optimizer.build(variables)
        self._variables, self._optimizer = list(variables), optimizer
        shared = {"variables": self._variables, "optimizer": [] if optimizer is None else list(optimizer.variables)}
        super().__init__(VariableTraining(backend, access, shared, buffers, local), data, **options)

    def apply(self, gradients: Sequence[Any]) -> None:
        """Collective: average the gradients of this rank's parts, as `average` does, and have the optimizer apply them.

        Raises:
            CollectiveError: it failed: members change, and ``with step:`` undoes the step. Or the program is wrong.
            ArgumentError, StepOrderError: it is called in a wrong way; or the job has no optimizer.
        """
        if self._optimizer is None:
            raise ArgumentError("the job was made without an optimizer: change the variables in `with job.update():`")
        averaged = self.average(gradients)
        pairs = [pair for pair in zip(averaged, self._variables, strict=True) if pair[0] is not None]
        with self.update(), self.training.backend.without_gradients():
            if pairs:
                self._optimizer.apply_gradients(pairs)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
