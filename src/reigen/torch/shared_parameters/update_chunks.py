"""Update of an owner's slice in chunks that can be undone, so that others finish it when the owner dies.

Weights and optimizer state that exist once a host are changed in place, by the user's optimizer, and a process may die
at any instruction of that. So in jobs whose steps survive deaths (`reigen.elastic.job`) an owner updates its slice
chunk by chunk, and has a slot in shared memory that holds what one chunk was before. Update u of a slice:

a. The owner says that it begins u. Its word is of the update before: no chunk is done.
b. For each chunk i: it copies the chunk's weights and state to the slot.
c. It writes ``(u, 2 i + 1)``: from now on the slot counts, whatever the chunk's memory holds.
d. The optimizer steps on the chunk, in place.
e. It writes ``(u, 2 i + 2)``: this chunk is done.
f. It says that its pieces have state (in the first update), and that it has ended u.

Who goes on for a dead owner looks at the word. Behind (c) it copies the slot back, which may be done twice, and goes on
with (d), behind (a) and (e) with (b). It writes the same words, so that it may die in its turn. Every process divides a
slice into the same chunks, and gradients, options and state are those that the owner would have used, so bits are those
of an undisturbed update. Words are written as in `reigen.backends.shm.reduction_journal`.

A chunk is as large as it is because of two prices: an optimizer takes some ten microseconds a call, and a copy from and
to memory, not to a cache, would take as long as the update. A tensor that is larger than a chunk is cut, where the
optimizer treats every element by itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from reigen.api.gradients.sharding import SHARD_ALIGNMENT_BYTES, ParameterRange
from reigen.net.futex import memory_fences
from reigen.torch.adapter import tensor_over
from reigen.torch.dtypes import dtype_of
from reigen.torch.shared_parameters.layout import StateLayouts, StateTensors, tensor_over_all
from reigen.torch.shared_parameters.runs import ParameterRun
from reigen.torch.shared_parameters.state_layout import inner_step

#: Weights of a chunk. From 512 kB on the calls of the optimizer cost nothing, and above 1 MB the copies take longer.
CHUNK_BYTES = 1 << 20

#: Parts of a slot begin at multiples of this.
_LINE = 64
#: Room in a slot for what is no larger for larger chunks: numbers such as Adam's ``step``, and what lines leave free.
_NUMBERS_BYTES = 1 << 16
_UPDATE_SHIFT = 32
_STATE_MASK = (1 << _UPDATE_SHIFT) - 1


def undo_slot_bytes(
    parameters: Sequence[torch.Tensor], layouts: StateLayouts, pieces: Sequence[Sequence[ParameterRange]], *, cuts: bool
) -> int:
    """Return how long an owner's slot has to be; the same for all owners.

    Args:
        parameters: all that are shared.
        layouts: what the optimizer keeps for each.
        pieces: by owner.
        cuts: whether pieces may be cut; otherwise the largest one has to fit.
    """
    most = CHUNK_BYTES
    for piece in itertools.chain.from_iterable(pieces):
        weight, layout = parameters[piece.parameter], layouts[piece.parameter]
        sizes = sum(entry.dtype.itemsize for entry in layout.values() if entry.dtype is not None)
        nbytes = CHUNK_BYTES if cuts else max(CHUNK_BYTES, piece.numel * weight.element_size())
        most = max(most, nbytes + -(-nbytes // weight.element_size()) * sizes)
    return _round_up(most) + _NUMBERS_BYTES


@dataclass(frozen=True)
class _ChunkPart:
    """A run, or elements of one that is longer than a chunk: one parameter for the optimizer.

    Attributes:
        run: all of it, or what it is of.
        weight: the elements, with their gradient.
        state: their part of the run's shared state. Tensors of one number are those of the run.
        is_cut: it is not all of the run.
        is_last: no part of the run comes later.
    """

    run: ParameterRun
    weight: torch.nn.Parameter
    state: StateTensors
    is_cut: bool = False
    is_last: bool = True

    def tensors(self) -> list[torch.Tensor]:
        """Return everything that an update of this part changes in shared memory."""
        state = [value for value in self.state.values() if value is not None and (value.dim() or self.is_last)]
        return [self.weight.detach(), *state]

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer the state of this part, if it is cut; otherwise that is the run's."""
        if not self.is_cut:
            return
        held = optimizer.state.get(self.run.weight)
        if held:  # the numbers are the run's until its last part is done
            optimizer.state[self.weight] = {name: self._value(name, value) for name, value in held.items()}

    def _value(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        return value if (own := self.state[name]) is None else own if own.dim() else value.clone()

    def settle(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Move the optimizer's new state into shared memory; return the name of one for which there is no place."""
        if not self.is_cut:
            state = optimizer.state.get(self.weight)
            return self.run.settle(state) if state else None
        state = optimizer.state.pop(self.weight, {})
        for name, value in state.items():
            view = self.state.get(name)
            if value is view or (view is not None and not view.dim() and not self.is_last):
                continue
            if view is None or value is None:
                return str(name)
            view.copy_(value)
        if state and self.is_last:
            optimizer.state[self.run.weight] = {n: None if v is None else self.run.state[n] for n, v in state.items()}
            self.run.spread()
        return None


@dataclass
class _Chunk:
    """Parts that are updated by one call of the optimizer, and their places in the slot."""

    parts: list[_ChunkPart] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    saved: list[torch.Tensor] = field(default_factory=list)

    def save(self) -> None:
        torch._foreach_copy_(self.saved, self.tensors)

    def restore(self) -> None:
        torch._foreach_copy_(self.tensors, self.saved)

    def step(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Let the optimizer update these parts, and nothing else; see `_ChunkPart.settle`."""
        for part in self.parts:
            part.prepare(optimizer)
        members: defaultdict[int, list[torch.nn.Parameter]] = defaultdict(list)
        for part in self.parts:
            assert part.run.group is not None
            members[part.run.group].append(part.weight)
        groups = optimizer.param_groups
        kept = {number: groups[number]["params"] for number in members}
        try:
            for number, weights in members.items():
                groups[number]["params"] = weights
            optimizer.param_groups = [groups[number] for number in members]
            inner_step(optimizer)
        finally:
            optimizer.param_groups = groups
            for number, weights in kept.items():
                groups[number]["params"] = weights
        unknown = [part.settle(optimizer) for part in self.parts]
        return next((name for name in unknown if name is not None), None)


class UpdateChunks:
    """Chunks of one owner's slice.

    Args:
        runs: of all its pieces.
        memory: in which weights and state lie.
        gradients: in which the gradients of cut runs lie.
        slot: `undo_slot_bytes` long.
        cuts: whether runs may be cut.
    """

    def __init__(
        self,
        runs: Sequence[ParameterRun],
        memory: NDArray[np.uint8],
        gradients: NDArray[np.uint8],
        slot: NDArray[np.uint8],
        *,
        cuts: bool,
    ) -> None:
        self._slot = slot
        self._publish, _ = memory_fences()
        parts = [
            part
            for run in runs
            if run.group is not None and run.weight.grad is not None
            for part in (_cut(run, memory, gradients) if cuts else [_ChunkPart(run, run.weight, run.state)])
        ]
        self._chunks = list(self._pack(parts))

    def _pack(self, parts: Sequence[_ChunkPart]) -> Iterator[_Chunk]:
        chunk, nbytes, end = _Chunk(), 0, 0
        for part in parts:
            tensors = part.tensors()
            needed = sum(_round_up(tensor.nbytes) for tensor in tensors)
            if chunk.parts and (nbytes + part.weight.nbytes > CHUNK_BYTES or end + needed > self._slot.size):
                yield chunk
                chunk, nbytes, end = _Chunk(), 0, 0
            chunk.parts.append(part)
            nbytes += part.weight.nbytes
            for tensor in tensors:
                kind = dtype_of(tensor.dtype)
                saved = tensor_over(self._slot[end : end + tensor.nbytes].view(kind.storage), kind)
                chunk.tensors.append(tensor)
                chunk.saved.append(saved.as_strided(tensor.shape, tensor.stride()))
                end += _round_up(tensor.nbytes)
        if chunk.parts:
            yield chunk

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, update: int, word: NDArray[np.int64]) -> str | None:
        """Take steps b to e for all chunks that are left.

        Args:
            optimizer: holds the state of the runs, as far as there was any before this update.
            update: its number.
            word: of the owner.

        Returns:
            The name of a state that the optimizer has made, and for which there is no place; None: all is well.
        """
        first, is_saved = divmod(int(word[0]) & _STATE_MASK if is_update_begun(word, update) else 0, 2)
        for number, chunk in enumerate(self._chunks[first:], first):
            if is_saved:
                chunk.restore()
            else:
                chunk.save()
                _store(word, update, 2 * number + 1, self._publish)
            is_saved = False
            if (unknown := chunk.step(optimizer)) is not None:
                return unknown
            _store(word, update, 2 * number + 2, self._publish)
        return None


def is_update_begun(word: NDArray[np.int64], update: int) -> bool:
    """Return whether an owner's word says that a chunk of this update is saved, at least."""
    return int(word[0]) >> _UPDATE_SHIFT == update


def _store(word: NDArray[np.int64], update: int, state: int, publish: Callable[[], None]) -> None:
    publish()
    word[0] = update << _UPDATE_SHIFT | state


def _cut(run: ParameterRun, memory: NDArray[np.uint8], gradients: NDArray[np.uint8]) -> list[_ChunkPart]:
    """Divide a run that is longer than a chunk, at whole vectors."""
    weight = run.weight
    if weight.nbytes <= CHUNK_BYTES or not weight.dim():
        return [_ChunkPart(run, weight, run.state)]
    assert weight.grad is not None
    length = CHUNK_BYTES // SHARD_ALIGNMENT_BYTES * SHARD_ALIGNMENT_BYTES // weight.element_size()
    flat, gradient = tensor_over_all([weight.detach()], memory), tensor_over_all([weight.grad], gradients)
    state = {
        name: value if value is None or not value.dim() else tensor_over_all([value], memory)
        for name, value in run.state.items()
    }
    parts: list[_ChunkPart] = []
    for begin in range(0, flat.numel(), length):
        part = torch.nn.Parameter(flat[begin : begin + length])
        part.grad = gradient[begin : begin + length]
        own = {n: v if v is None or not v.dim() else v[begin : begin + length] for n, v in state.items()}
        parts.append(_ChunkPart(run, part, own, is_cut=True, is_last=begin + length >= flat.numel()))
    return parts


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
