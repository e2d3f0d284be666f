"""Parameters and optimizer state that exist once a host: those of one `Reducer`.

`reigen.api.gradients.sharding` tells what a step is, `SharedLayout` what lies where. Every owner writes its own pieces,
and says how far it has come; all ranks read.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reigen.api.gradients.replica_check import check_replicas, fingerprint
from reigen.api.gradients.sharding import ShardGranularity, UpdateProgress
from reigen.errors import ArgumentError, StepOrderError
from reigen.torch.adapter import tensor_bytes
from reigen.torch.reducer.reducer import GradientShard, Reducer
from reigen.torch.shared_parameters import heap
from reigen.torch.shared_parameters.layout import (
    SharedLayout,
    StateLayouts,
    StateTensors,
    piece_elements,
    to_shared_order,
)
from reigen.torch.shared_parameters.runs import (
    RUN_BYTES,
    OwnedPiece,
    ParameterRun,
    RunEntry,
    join_numbered,
    join_pieces,
)
from reigen.torch.shared_parameters.state_layout import group_options
from reigen.torch.shared_parameters.update_chunks import (
    CHUNK_BYTES,
    UpdateChunks,
    is_update_begun,
    undo_slot_bytes,
)
from reigen.types import ReduceOp

_log = logging.getLogger(__name__)

#: What an optimizer keeps, by parameter.
OptimizerStates = MutableMapping[Any, Any]

#: Makes an optimizer without parameters, and tells in which of its groups each parameter is.
Recovery = Callable[[], tuple[torch.optim.Optimizer, Mapping[torch.Tensor, int]]]

#: How long to look whether the owners that live come to the end of an update in which one was lost.
_SETTLE_SECONDS, _LOOK_SECONDS = 1.0, 0.01


class SharedParameters:
    """Makes the parameters of a reducer, whose gradients have been reduced once, common to the ranks of each host.

    Collective. Every ``p.data`` is a view of the shared weights afterwards.

    Args:
        reducer: whose parameters.
        layouts: what the optimizer keeps, by parameter.
        joins: whether one tensor may stand for several parameters.
        recovery: in a job whose steps survive deaths, makes what `finish` needs: an optimizer without parameters, and
            the group of each parameter. Its object is not kept alive.

    Attributes:
        own: what this rank updates.
        runs: the same as its optimizer sees it, once `join` has been called.

    Raises:
        ReplicaError: the ranks hold different weights.
        ArgumentError: parameters overlap in memory.
        SharedMemoryError: a host has not enough memory.
        CollectiveError: the job is broken.
    """

    def __init__(
        self, reducer: Reducer, layouts: StateLayouts, *, joins: bool, recovery: Recovery | None = None
    ) -> None:
        self.reducer, self.reduce_group = reducer, reducer.reduce_group
        self.parameters = reducer.parameters
        problem = _explain_overlap(self.parameters, reducer.names)
        if problem_ranks := self.reduce_group.where(bool(problem), "apart"):
            raise ArgumentError(
                problem or f"the parameters of rank(s) {problem_ranks} cannot be shared; it is said there why"
            )
        check_replicas(self.reduce_group, [tensor_bytes(p) for p in self.parameters], reducer.names)
        memory = reducer.owned_memory
        self._owner = memory.region.owner
        is_cut = memory.division is ShardGranularity.ELEMENTS
        self._recovery = None if recovery is None else weakref.WeakMethod(recovery)
        slot_bytes = 0
        if self.is_recoverable:
            slot_bytes = undo_slot_bytes(self.parameters, layouts, memory.shares.pieces, cuts=is_cut)
        self._layout = SharedLayout(self.parameters, layouts, memory.shares.pieces, slot_bytes)
        # What a user has taken from ``state_dict()`` may live longer than the optimizer.
        self._memory = self.reduce_group.memory_of(self.reduce_group.allocate(self._layout.nbytes, shared=True))
        self._progress = self._layout.progress(self._memory)
        self._given_up = self._layout.given_up(self._memory)
        self._marks = self._layout.marks(self._memory)
        self._run_numbers = self._layout.run_numbers(self._memory)
        #: updates that this rank has begun; and how many there were when the step began
        self.num_updates = self._num_before_step = 0
        #: fingerprints of this rank's pieces after an update that is to be looked at: REIGEN_CHECK_REPLICAS
        self._remembered: list[int] | None = None
        weights = [self._layout.weight(self._memory, index) for index in range(len(self.parameters))]
        self.own = self._pieces_of(self._owner)
        self.runs: list[ParameterRun] = []
        self._cuts = is_cut
        self._run_bytes = (CHUNK_BYTES if self.is_recoverable else RUN_BYTES) if joins else 0
        #: of ``runs``, where others can finish the update
        self._chunks: UpdateChunks | None = None
        #: what the optimizer holds for each of ``own`` while there are no runs
        self._held: list[StateTensors] = [{} for _ in self.own]
        #: which of ``own`` had a gradient when they were joined; None while there are no runs
        self._present: list[bool] | None = None
        for own in self.own:
            parameter = self.parameters[own.piece.parameter]
            own.weight.data.copy_(
                piece_elements(to_shared_order(parameter, parameter.data), own.piece).view_as(own.weight)
            )
        self.reduce_group.barrier("shared")
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data = weight
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        #: what the user's optimizer was given as the state of each parameter; it may have been replaced since
        self._given: list[tuple[StateTensors, list[torch.Tensor | None]] | None] = [None] * len(self.parameters)
        #: where they and their first gradients lay before: reserved from the first update on
        self._reserved_blocks: list[NDArray[np.uint8]] | None = None
        reducer.before_pass = self.check
        if self.is_recoverable:
            self.reduce_group.context.shared_updates.append(self)

    @property
    def is_recoverable(self) -> bool:
        """Return whether those who are left finish an update in which an owner dies."""
        return self._recovery is not None

    def check(self) -> None:
        """Raise StepOrderError, and give up the job, unless all parameters are still where they were put."""
        addresses = [parameter.data_ptr() for parameter in self.parameters]
        if addresses == self._addresses:
            return
        index = next(index for index, address in enumerate(self._addresses) if addresses[index] != address)
        error = StepOrderError(
            f"parameter {self.reducer.names[index]} no longer lies in the memory that the ranks of this host "
            "share: the module was moved or converted, or p.data was replaced. With share_parameters that has "
            "to happen before the first step; to change values, write into the parameter (p.copy_())"
        )
        self.reduce_group.context.give_up(error)  # the others may have moved nothing
        raise error

    def take_state(self, states: OptimizerStates, inner: torch.optim.Optimizer) -> None:
        """Take the state of the user's optimizer, where that was replaced since it was given (load_state_dict).

        Raises:
            ArgumentError: it is not what this class of optimizer kept when the parameters were shared.
        """
        held_now = [states.get(parameter) for parameter in self.parameters]
        replaced = {
            index: held
            for index, (held, given) in enumerate(zip(held_now, self._given, strict=True))
            if not _is_same(held, given)
        }
        if not replaced:
            return
        self.part(inner)
        for place, own in enumerate(self.own):
            if own.piece.parameter in replaced:
                held = replaced[own.piece.parameter]
                self._held[place] = self._filled(own, held) if held else {}
                self._marks[own.number] = bool(held)
        for index in replaced:
            self._given[index] = None

    def join(self, inner: torch.optim.Optimizer, group_of: Mapping[torch.Tensor, int]) -> bool:
        """Put the pieces into runs for an update of those that have a gradient; whether the runs are new ones."""
        present = [own.weight.grad is not None for own in self.own]
        if present == self._present:
            return False
        self.part(inner)
        self._present = present
        groups = [group_of.get(self.parameters[own.piece.parameter]) for own in self.own]
        entries = [RunEntry(*entry) for entry in zip(self.own, groups, self._held, strict=True)]
        self.runs = join_pieces(entries, self._memory, self.reducer.owned_memory.region.array, self._run_bytes)
        held_of = {entry.own.number: entry.held for entry in entries}
        for run in self.runs:
            if held := held_of[run.owns[0].number]:
                inner.state[run.weight] = {n: None if v is None else run.state[n] for n, v in held.items()}
        if self._owner is not None and self.is_recoverable:
            self._chunks = self._divide(self._owner, self.runs)
        return True

    def _divide(self, owner: int, runs: Sequence[ParameterRun]) -> UpdateChunks:
        """Return an owner's runs in chunks; others can find out which pieces are in which run."""
        for number, run in enumerate(runs):
            self._run_numbers[run.owns[0].number : run.owns[-1].number + 1] = number
        gradients = self.reducer.owned_memory.region.owned[owner]
        return UpdateChunks(runs, self._memory, gradients, self._layout.slot(self._memory, owner), cuts=self._cuts)

    def step(self, inner: torch.optim.Optimizer) -> None:
        """Let the optimizer update this rank's slice so that others can finish that."""
        if self._chunks is not None and self._owner is not None:
            unknown = self._chunks.step(inner, self.num_updates, self._progress[self._owner, 2:])
            if unknown is not None:
                raise self._unknown(self.own[0].piece.parameter, unknown)

    # -- see `reigen.backends.base.SharedUpdate` ----------------------------------------------------------------------

    @property
    def owner(self) -> int | None:
        """Number of this rank among the owners of the host; None: it owns nothing."""
        return self._owner

    def begin_step(self) -> None:
        """A step begins: no update is under way."""
        self._num_before_step = int(self._progress[:, 1].max())

    @property
    def is_begun(self) -> bool:
        """Return whether some owner has begun the update of this step."""
        return bool(self._progress[:, 0].max() > self._num_before_step)

    def finish(self, owners: Sequence[int | None], place: int) -> None:
        """Finish this rank's slice, and its share of those of the dead; the update of the step is made when all have.

        Args:
            owners: numbers of those who do this, one for each; all others are dead.
            place: of this rank among them.
        """
        update = self._num_before_step + 1
        lost = [owner for owner in range(len(self._progress)) if owner not in owners]
        for owner in ([] if self._owner is None else [self._owner]) + lost[place :: len(owners)]:
            if self._progress[owner, 1] < update:
                self._finish_slice(owner, update)
        self.num_updates = update

    def _finish_slice(self, owner: int, update: int) -> None:
        recovery = None if self._recovery is None else self._recovery()
        assert recovery is not None
        inner, group_of = recovery()
        pieces = self._pieces_of(owner)
        entries: list[RunEntry] = []
        for own in pieces:
            parameter = self.parameters[own.piece.parameter]
            own.weight.grad = None if parameter.grad is None else own.gradient
            entries.append(RunEntry(own, group_of.get(parameter), own.state if self._marks[own.number] else {}))
        gradients, word = self.reducer.owned_memory.region.owned[owner], self._progress[owner, 2:]
        if is_update_begun(word, update):  # numbers of its pieces may be of this update or of the last one
            numbers = self._run_numbers[[own.number for own in pieces]].tolist()
            runs = join_numbered(entries, numbers, self._memory, gradients)
        else:
            runs = join_pieces(entries, self._memory, gradients, self._run_bytes)
        for run in runs:
            if self._marks[run.owns[0].number]:
                inner.state[run.weight] = dict(run.state)
        chunks = self._divide(owner, runs)
        self._progress[owner, 0] = update
        if (unknown := chunks.step(inner, update, word)) is not None:
            raise self._unknown(pieces[0].piece.parameter, unknown)
        for run in runs:
            if run.group is not None and run.weight.grad is not None and run.state:
                self._marks[run.owns[0].number : run.owns[-1].number + 1] = 1
        self._progress[owner, 1] = update

    def part(self, inner: torch.optim.Optimizer) -> None:
        """Divide all runs, since some of the pieces have changed; `join` comes next."""
        held_of: dict[int, StateTensors] = {}
        for run in self.runs:
            state = inner.state.pop(run.weight, {})
            for own in run.owns:
                held_of[own.number] = {n: None if v is None else own.state[n] for n, v in state.items()}
        if self.runs:
            self._held = [held_of[own.number] for own in self.own]
        self.runs, self._present, self._chunks = [], None, None

    def begin(self) -> bool:
        """Begin to update this rank's slice (step c). False: another rank has announced the weights.

        Who says so looks at what is written here a while after it has written what is read here: one of the two sees
        the other.
        """
        self.num_updates += 1
        if self._owner is not None:
            self._progress[self._owner, 0] = self.num_updates
        if not self._given_up[0]:
            return True
        self.num_updates -= 1
        if self._owner is not None:
            self._progress[self._owner, 0] = self.num_updates
        return False

    def end(self, inner: torch.optim.Optimizer) -> None:
        """End the update (step c): move the optimizer's new state into shared memory."""
        for run in self.runs:
            state = inner.state.get(run.weight)
            if not state:
                continue
            if self._chunks is None and (name := run.settle(state)) is not None:
                raise self._unknown(run.owns[0].piece.parameter, name)
            self._marks[run.owns[0].number : run.owns[-1].number + 1] = 1
        if self._owner is not None:
            self._progress[self._owner, 1] = self.num_updates

    def norm_of_all(self, norm: torch.Tensor, norm_type: float) -> float:
        """Collective: return the p-norm of all gradients, from that of this rank's slices. The same on all ranks.

        The owners of another host have the same numbers, so each owner's is the largest that any rank has for it.
        """
        norms = np.zeros(len(self._progress), np.float64)
        if self._owner is not None:
            norms[self._owner] = norm.double().item()
        self.reduce_group.combine(norms, ReduceOp.MAX, "norm")
        return float(torch.linalg.vector_norm(torch.from_numpy(norms), norm_type))

    def check_unmodified(self, every: int) -> None:
        """Warn if this rank's part of the weights was changed since `remember`, and not by the optimizer."""
        if not every or self._remembered is None:
            return
        names = [self.reducer.names[own.piece.parameter] for own in self.own]
        changed = [
            name for name, old, new in zip(names, self._remembered, self._fingerprints(), strict=True) if old != new
        ]
        self._remembered = None
        if changed:
            _log.warning(
                "shared parameters were changed outside the optimizer between updates %d and %d: %s%s. All ranks of "
                "the host have one copy: what each of them does to it happens as often as there are ranks. If that was "
                "load_state_dict(), with the same values on all ranks, all is well",
                self.num_updates,
                self.num_updates + 1,
                ", ".join(changed[:5]),
                " ..." if len(changed) > 5 else "",
            )

    def remember(self, every: int) -> None:
        """Take a fingerprint of this rank's part of the weights, every so many updates."""
        if every and self.num_updates % every == 0:
            self._remembered = self._fingerprints()

    def check_options(self, groups: Sequence[Mapping[str, Any]], every: int) -> None:
        """Collective: every so many updates, before one, compare the options with which each rank updates its part.

        Raises:
            ReplicaError: they differ; no rank has begun.
        """
        if every and (self.num_updates + 1) % every == 0:
            names = [f"the options of parameter group {number}" for number in range(len(groups))]
            check_replicas(
                self.reduce_group,
                [np.frombuffer(_describe_options(group).encode(), np.uint8) for group in groups],
                names,
            )

    def _fingerprints(self) -> list[int]:
        return [fingerprint(tensor_bytes(own.weight)) for own in self.own]

    def give_state(self, states: OptimizerStates) -> None:
        """Let the user's optimizer hold the whole state of every parameter: views of shared memory."""
        has_moved = False
        for index, given in enumerate(self._given):
            numbers = self._layout.numbers[index]
            if given is None and numbers and self._marks[numbers[0]]:
                whole = states[self.parameters[index]] = self._layout.state(self._memory, index)
                self._given[index] = whole, list(whole.values())
                has_moved = True
        if has_moved or self._reserved_blocks is None:
            heap.trim_heap()
        if self._reserved_blocks is None:
            left = [parameter.nbytes for parameter in self.parameters]  # by weights, and by the first gradients
            self._reserved_blocks = heap.reserve_blocks(left * 2)

    def progress(self, update: int) -> UpdateProgress:
        """Return the owners' progress in an update; waits a moment for those that may still come to its end.

        If the job is over, no rank begins one after that: one that was stopped, and goes on, does not make untrue what
        is said now.
        """
        until = time.monotonic() + _SETTLE_SECONDS
        while self._progress[:, 1].min() < update and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        if not self.reduce_group.context.is_operational:
            self._given_up[0] = 1
            time.sleep(_LOOK_SECONDS)
        return UpdateProgress(update, self._progress[:, 0].tolist(), self._progress[:, 1].tolist())

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        self.reducer.before_pass = None
        self._reserved_blocks = None
        if self in self.reduce_group.context.shared_updates:
            self.reduce_group.context.shared_updates.remove(self)
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.numel() and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def _pieces_of(self, owner: int | None) -> list[OwnedPiece]:
        """Return the pieces that an owner of this host updates."""
        if owner is None:
            return []
        shards = self.reducer.owned(owner)
        weights = {shard.piece.parameter: self._layout.weight(self._memory, shard.piece.parameter) for shard in shards}
        first = self._layout.first_numbers[owner]
        return [self._own_piece(n, shard, weights[shard.piece.parameter]) for n, shard in enumerate(shards, first)]

    def _own_piece(self, number: int, owned: GradientShard, whole: torch.Tensor) -> OwnedPiece:
        weight = torch.nn.Parameter(piece_elements(whole, owned.piece))
        if owned.is_direct:
            gradient = owned.gradient.as_strided(weight.shape, weight.stride())
        else:
            gradient = torch.empty_like(weight, requires_grad=False)
        state = self._layout.state_of_piece(self._memory, number)
        return OwnedPiece(owned.piece, weight, owned, gradient, number, state)

    def _filled(self, own: OwnedPiece, held: StateTensors) -> StateTensors:
        """Write the piece's part of a loaded tensor to its place."""
        parameter = self.parameters[own.piece.parameter]
        for name, value in held.items():
            view = own.state.get(name)
            if value is None:
                continue
            if view is None or not isinstance(value, torch.Tensor):
                raise self._unknown(own.piece.parameter, name)
            if view.dim() == 0 and value.numel() == 1 and parameter.dim():
                begin = self._memory.ctypes.data
                if (
                    not begin <= value.data_ptr() < begin + self._memory.nbytes
                ):  # else it is another piece's, whose owner may be one step ahead
                    view.copy_(value.reshape(()))
            elif value.shape == view.shape and own.piece.numel == parameter.numel():
                view.copy_(value)
            elif value.shape == parameter.shape:
                view.copy_(piece_elements(to_shared_order(parameter, value), own.piece).view_as(view))
            else:
                raise ArgumentError(
                    f"the state {name!r} of {self.reducer.names[own.piece.parameter]} has the shape "
                    f"{tuple(value.shape)}, the parameter {tuple(parameter.shape)}: it belongs to another model"
                )
        return {name: None if value is None else own.state[name] for name, value in held.items()}

    def _unknown(self, index: int, name: str) -> ArgumentError:
        return ArgumentError(
            f"the optimizer keeps {name!r} for {self.reducer.names[index]}, which it did not when the parameters were "
            "shared; with share_parameters, change such options before the first step"
        )


def _describe_options(group: Mapping[str, Any]) -> str:
    options = group_options(group).items()
    return repr(sorted((key, repr(v.tolist() if isinstance(v, torch.Tensor) else v)) for key, v in options))


def _is_same(held: StateTensors | None, given: tuple[StateTensors, list[torch.Tensor | None]] | None) -> bool:
    """Return whether an optimizer still holds the given state: the same dict with the same tensors."""
    if held is None or given is None:
        return not held and given is None
    return held is given[0] and len(held) == len(given[1]) and all(map(operator.is_, held.values(), given[1]))


def _explain_overlap(parameters: list[torch.Tensor], names: list[str]) -> str:
    """Explain a fault: parameters not on the host, or with elements in common; empty for none."""
    begins: list[tuple[int, int, str]] = []
    for parameter, name in zip(parameters, names, strict=True):
        if parameter.device.type != "cpu":
            return f"share_parameters needs parameters on the host, {name} is on {parameter.device}"
        begins.append((parameter.data_ptr(), tensor_bytes(parameter).nbytes if parameter.numel() else 0, name))
    begins.sort()
    for (begin, nbytes, name), (after, size, other) in itertools.pairwise(begins):
        if nbytes and size and begin + nbytes > after:
            return (
                f"parameters {name} and {other} lie in the same memory; share_parameters would take them apart. Use "
                "one Parameter in both places instead"
            )
    return ""
