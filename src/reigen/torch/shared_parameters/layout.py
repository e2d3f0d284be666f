"""Layout of the memory that the ranks of a host share: progress, marks, weights and optimizer state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from reigen.api.gradients.sharding import SHARD_ALIGNMENT_BYTES, ParameterRange
from reigen.torch.adapter import tensor_over
from reigen.torch.dtypes import dtype_of
from reigen.torch.reducer.bucket_views import strides_of
from reigen.torch.shared_parameters.state_layout import StateEntry, StateKind

#: By the number of a parameter, what its optimizer keeps for it.
StateLayouts = Sequence[Mapping[str, StateEntry]]

#: A tensor in shared memory; None for what an optimizer keeps as None.
StateTensors = dict[str, torch.Tensor | None]

_WORD_BYTES = 8
_RUN_NUMBER = np.dtype(np.int32)


class SharedLayout:
    """Places for some parameters, each on cache lines of its own; the same on every rank.

    Tensors like a parameter, or of some of its dimensions, lie there whole. Tensors of one number, such as Adam's
    ``step``, lie there once for every piece of the parameter, since every owner counts for itself.

    Args:
        parameters: dense tensors on the host.
        layouts: what the optimizer keeps for each.
        pieces: by owner; every piece has a number, in this order.
        slot_bytes: length of each owner's slot of `reigen.torch.shared_parameters.update_chunks`; 0: there are none.

    Attributes:
        nbytes: how much memory is needed.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        layouts: StateLayouts,
        pieces: Sequence[Sequence[ParameterRange]],
        slot_bytes: int = 0,
    ) -> None:
        self._parameters, self._layouts = parameters, layouts
        self._num_owners = len(pieces)
        self._pieces = [piece for of_owner in pieces for piece in of_owner]
        #: by owner, the number of its first piece
        self.first_numbers = [*itertools.accumulate(map(len, pieces), initial=0)]
        #: by parameter, the numbers of its pieces
        self.numbers: list[list[int]] = [[] for _ in parameters]
        for number, piece in enumerate(self._pieces):
            self.numbers[piece.parameter].append(number)
        self.nbytes = 0
        self._progress = self._reserve(self._num_owners * SHARD_ALIGNMENT_BYTES)
        self._given_up = self._reserve(1)
        self._marks = self._reserve(len(self._pieces))
        self._run_numbers = self._reserve(len(self._pieces) * _RUN_NUMBER.itemsize)
        self._slots = [self._reserve(slot_bytes) for _ in pieces]
        self._slot_bytes = slot_bytes
        # In the order of the gradients: pieces that lie behind each other there do so here, too (`runs`).
        order = [*dict.fromkeys(itertools.chain((piece.parameter for piece in self._pieces), range(len(parameters))))]
        self._weights = {index: self._reserve(parameters[index].nbytes) for index in order}
        self._states: list[dict[str, list[int]]] = [{} for _ in parameters]
        for name in dict.fromkeys(name for layout in layouts for name in layout):
            for index in order:
                entry = layouts[index].get(name)
                if entry is not None and entry.dtype is not None:
                    nbytes = math.prod(entry.shape(parameters[index])) * entry.dtype.itemsize
                    count = len(self.numbers[index]) if entry.kind is StateKind.SCALAR else 1
                    self._states[index][name] = [self._reserve(nbytes) for _ in range(count)]

    def progress(self, memory: NDArray[np.uint8]) -> NDArray[np.int64]:
        """For each owner: the last update that it began, the last one that it ended, and how far it is in its chunks.

        The last one is the word of `reigen.torch.shared_parameters.update_chunks`.
        """
        size = self._num_owners * SHARD_ALIGNMENT_BYTES
        words = memory[self._progress : self._progress + size].view(np.int64)
        return words.reshape(self._num_owners, SHARD_ALIGNMENT_BYTES // _WORD_BYTES)[:, :3]

    def slot(self, memory: NDArray[np.uint8], owner: int) -> NDArray[np.uint8]:
        """An owner's slot."""
        return memory[self._slots[owner] : self._slots[owner] + self._slot_bytes]

    def run_numbers(self, memory: NDArray[np.uint8]) -> NDArray[np.int32]:
        """For each piece, in which of its owner's runs it was in the latest update of that piece."""
        nbytes = len(self._pieces) * _RUN_NUMBER.itemsize
        return memory[self._run_numbers : self._run_numbers + nbytes].view(_RUN_NUMBER)

    def given_up(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Byte that is 1 as soon as some rank has announced the weights and relies on them."""
        return memory[self._given_up : self._given_up + 1]

    def marks(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """For each piece: 1 if there is state of it."""
        return memory[self._marks : self._marks + len(self._pieces)]

    def weight(self, memory: NDArray[np.uint8], index: int) -> torch.Tensor:
        """A parameter's values."""
        return self._shaped(memory, self._weights[index], index, self._parameters[index].dtype)

    def state(self, memory: NDArray[np.uint8], index: int) -> StateTensors:
        """Return the optimizer's state of a parameter: tensors of its shape whole, numbers of its first piece."""
        return {name: self._entry(memory, index, name, None) for name in self._layouts[index]}

    def state_of_piece(self, memory: NDArray[np.uint8], number: int) -> StateTensors:
        """Return the optimizer's state of a piece."""
        index = self._pieces[number].parameter
        return {name: self._entry(memory, index, name, number) for name in self._layouts[index]}

    def _entry(self, memory: NDArray[np.uint8], index: int, name: str, number: int | None) -> torch.Tensor | None:
        entry, places = self._layouts[index][name], self._states[index].get(name)
        if entry.dtype is None or not places:
            return None
        if entry.kind is StateKind.LIKE_PARAMETER:
            whole = self._shaped(memory, places[0], index, entry.dtype)
            return whole if number is None else piece_elements(whole, self._pieces[number])
        shape = entry.shape(self._parameters[index])
        place = places[0]
        if number is not None and entry.kind is StateKind.SCALAR:
            place = places[self.numbers[index].index(number)]
        return _tensor_at(memory, place, math.prod(shape), entry.dtype).reshape(shape)

    def _shaped(self, memory: NDArray[np.uint8], place: int, index: int, dtype: torch.dtype) -> torch.Tensor:
        parameter = self._parameters[index]
        return _tensor_at(memory, place, parameter.numel(), dtype).as_strided(parameter.shape, strides_of(parameter))

    def _reserve(self, nbytes: int) -> int:
        begin = self.nbytes
        self.nbytes += -(-nbytes // SHARD_ALIGNMENT_BYTES) * SHARD_ALIGNMENT_BYTES
        return begin


def piece_elements(whole: torch.Tensor, piece: ParameterRange) -> torch.Tensor:
    """The elements of a piece, as they lie in memory; if that is all of a dense tensor, in its shape."""
    if piece.numel == whole.numel():
        return whole
    return whole.as_strided((piece.numel,), (1,), whole.storage_offset() + piece.start)


def to_shared_order(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The values, of the parameter's shape, in the order of its own in shared memory: ``value`` itself if they are."""
    strides = strides_of(parameter)
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def tensor_over_all(parts: Sequence[torch.Tensor], memory: NDArray[np.uint8]) -> torch.Tensor:
    """A flat tensor over tensors that lie behind each other in ``memory``."""
    begin = parts[0].data_ptr() - memory.ctypes.data
    nbytes = sum(part.nbytes for part in parts)
    kind = dtype_of(parts[0].dtype)
    return tensor_over(memory[begin : begin + nbytes].view(kind.storage), kind)


def _tensor_at(memory: NDArray[np.uint8], place: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a storage of its own."""
    kind = dtype_of(dtype)
    return tensor_over(memory[place : place + numel * kind.itemsize].view(kind.storage), kind)
