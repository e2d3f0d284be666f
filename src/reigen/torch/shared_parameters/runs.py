"""Runs: pieces of parameters that lie behind each other in memory, as one tensor for the owner's optimizer.

An optimizer that treats every element by itself takes a dozen operations for each tensor, whatever its size. With many
small parameters they take as long as the arithmetic. `join_pieces` says when pieces may be one tensor: all that the
optimizer would use has to be the same for them, and all that it reads and writes has to lie without gaps.

Bits are those of the pieces by themselves: all but the last one are whole vectors (`SHARD_ALIGNMENT_BYTES`), so the
same elements are in vectors and in what is left behind them. It is the cut that
`reigen.torch.shared_parameters.elementwise` tries, the other way round.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reigen.api.gradients.sharding import SHARD_ALIGNMENT_BYTES, ParameterRange
from reigen.torch.reducer.reducer import GradientShard
from reigen.torch.shared_parameters.layout import StateTensors, piece_elements, tensor_over_all, to_shared_order

#: Runs end here: what an optimizer makes for one tensor, and reads again at once, should stay in a cache. More than a
#: power of two: a few matrices that are one, with what lies between them.
RUN_BYTES = 5 << 17


@dataclass(frozen=True)
class OwnedPiece:
    """A piece that this rank updates.

    Attributes:
        piece: which elements of which parameter.
        weight: the elements: flat, or with the parameter's shape if that is all.
        owned: where the reduced gradient lies.
        gradient: the same in the shape and the element type of ``weight``; it is ``weight.grad`` where there is one.
        number: among all pieces.
        state: its part of the shared state, by name.
    """

    piece: ParameterRange
    weight: torch.nn.Parameter
    owned: GradientShard
    gradient: torch.Tensor
    number: int
    state: StateTensors

    def take(self, parameter: torch.Tensor, *, from_parameter: bool) -> None:
        """Return the gradient to be used next: ``parameter.grad``'s elements, or this rank's part of the reduction."""
        if not from_parameter:
            if not self.owned.is_direct:
                self.gradient.copy_(self.owned.gradient.view_as(self.gradient))
            self.weight.grad = self.gradient
            return
        whole = parameter.grad
        assert whole is not None
        part = piece_elements(to_shared_order(parameter, whole.detach()), self.piece)
        if part.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(part.view_as(self.gradient))
        self.weight.grad = self.gradient


@dataclass(frozen=True)
class RunEntry:
    """A piece, the number of its parameter group (None: it is in none), and the part of its state ``held`` so far."""

    own: OwnedPiece
    group: int | None
    held: StateTensors


@dataclass(frozen=True)
class ParameterRun:
    """Pieces of one group that one tensor stands for.

    Attributes:
        owns: the pieces, as they lie in memory.
        group: the number of the group; None: they are not updated.
        weight: the tensor, with its gradient.
        state: what all ranks see of its state, by name. Tensors of one number are those of the first piece.
        copies: by name, the same numbers of the other pieces.
    """

    owns: tuple[OwnedPiece, ...]
    group: int | None
    weight: torch.nn.Parameter
    state: StateTensors
    copies: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def settle(self, state: dict[str, Any]) -> str | None:
        """Move an optimizer's new state of the tensor into shared memory.

        Returns:
            The name of a state for which there is no place; None: all have one.
        """
        for name, value in state.items():
            view = self.state.get(name)
            if value is not view:
                if view is None or value is None:
                    return name
                view.copy_(value)
                state[name] = view
        self.spread()
        return None

    def spread(self) -> None:
        """Tell the other pieces the numbers of the first."""
        for name, copies in self.copies.items():
            first = self.state[name]
            assert first is not None
            torch._foreach_copy_(copies, [first] * len(copies))


def join_pieces(
    entries: Sequence[RunEntry], memory: NDArray[np.uint8], gradients: NDArray[np.uint8], run_bytes: int
) -> list[ParameterRun]:
    """The pieces, in the order in which their gradients lie, in as few runs as can be.

    Weights and states lie in ``memory``, gradients in ``gradients``; no run of several pieces exceeds ``run_bytes``.
    """
    return [
        _make_run([entry.own for entry in run], run[0].group, memory, gradients)
        for run in _split_entries(entries, run_bytes)
    ]


def join_numbered(
    entries: Sequence[RunEntry], numbers: Sequence[int], memory: NDArray[np.uint8], gradients: NDArray[np.uint8]
) -> list[ParameterRun]:
    """Return the runs that `join_pieces` has made of the pieces at an earlier time: those of one number are one run."""
    runs = itertools.groupby(zip(numbers, entries, strict=True), key=operator.itemgetter(0))
    grouped = [[entry for _, entry in run] for _, run in runs]
    return [_make_run([entry.own for entry in run], run[0].group, memory, gradients) for run in grouped]


def _split_entries(entries: Sequence[RunEntry], run_bytes: int) -> Iterator[list[RunEntry]]:
    run: list[RunEntry] = []
    nbytes = 0
    for entry in entries:
        weight = entry.own.weight
        nbytes += weight.nbytes
        if run and (nbytes > run_bytes or not _may_follow(run[-1], entry)):
            yield run
            run, nbytes = [], weight.nbytes
        run.append(entry)
    if run:
        yield run


def _may_follow(one: RunEntry, other: RunEntry) -> bool:
    """Return whether one tensor can stand for both pieces, the second one behind the first."""
    first, second = one.own, other.own
    if one.group is None or one.group != other.group or first.weight.dtype is not second.weight.dtype:
        return False
    if (first.weight.grad is None) is not (second.weight.grad is None):
        return False
    if not (first.weight.dim() and second.weight.dim()) or first.weight.nbytes % SHARD_ALIGNMENT_BYTES:
        return False
    if not (first.owned.is_direct and second.owned.is_direct and _is_behind(first.gradient, second.gradient)):
        return False
    if not _is_behind(first.weight, second.weight) or first.state.keys() != second.state.keys():
        return False
    if [*one.held] != [*other.held]:
        return False
    return all(_is_joinable(name, one, other) for name in first.state)


def _is_joinable(name: str, one: RunEntry, other: RunEntry) -> bool:
    """Return whether both pieces' states of this name can be one."""
    first, second = one.own.state[name], other.own.state[name]
    if first is None or second is None:
        return first is second
    if name in one.held and (one.held[name] is None) is not (other.held[name] is None):
        return False
    if first.dtype is not second.dtype or bool(first.dim()) is not bool(second.dim()):
        return False
    if first.dim():
        return _is_behind(first, second)
    return one.held.get(name) is None or torch.equal(first, second)


def _is_behind(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.nbytes and other.nbytes) and other.data_ptr() == one.data_ptr() + one.nbytes


def _make_run(
    owns: Sequence[OwnedPiece], group: int | None, memory: NDArray[np.uint8], gradients: NDArray[np.uint8]
) -> ParameterRun:
    first = owns[0]
    if len(owns) == 1:
        return ParameterRun((first,), group, first.weight, first.state)
    weight = torch.nn.Parameter(tensor_over_all([own.weight.detach() for own in owns], memory))
    if first.weight.grad is not None:
        weight.grad = tensor_over_all([own.gradient for own in owns], gradients)
    state, copies = dict(first.state), {}
    for name, value in first.state.items():
        if value is None:
            continue
        values = [one for own in owns if (one := own.state[name]) is not None]
        if value.dim():
            state[name] = tensor_over_all(values, memory)
        else:
            copies[name] = values[1:]
    return ParameterRun(tuple(owns), group, weight, state, copies)
