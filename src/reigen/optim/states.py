"""Optimizer states as plain bytes: for files, and between servers and workers.

`reigen.optim.array_files` has the layout: nothing in it can run, reading it makes numbers, texts and arrays. A piece
has the range of the flat elements of its key that it covers, so that any number of servers may have written it and any
other may read it: `States.cut` puts a range together from the pieces that cover it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.errors import ConfigError
from reigen.files import Buffer, write_atomically
from reigen.optim.array_files import STORAGES, packed, unpacked
from reigen.optim.base import Key, Optimizer
from reigen.optim.optimizer_state import Slot
from reigen.optim.registry import from_spec
from reigen.types import DTYPES

#: Plain values that a file may hold beside pieces.
Fact = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Piece:
    """State of one range of one key.

    Attributes:
        key: of the store.
        num_elements: of the key's whole value.
        begin, end: the range of flat elements.
        dtype: name of the value's element type.
        count: updates so far.
        rate: learning rate of the latest update, or None.
        arrays: name -> array of ``end - begin`` elements (bfloat16 as uint16). Beside states there may be others: the
            weight, the residual of a compression.
    """

    key: Key
    num_elements: int
    begin: int
    end: int
    dtype: str
    count: int
    rate: float | None
    arrays: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end <= self.num_elements:
            raise ConfigError(f"key {self.key!r} has no range {self.begin}:{self.end} of {self.num_elements} elements")
        if self.dtype not in DTYPES:
            raise ConfigError(f"key {self.key!r} has the unknown element type {self.dtype!r}")
        for name, array in self.arrays.items():
            if array.shape != (self.end - self.begin,) or STORAGES.get(array.dtype.name) != array.dtype:
                raise ConfigError(f"key {self.key!r}: {name} is no flat array of {self.end - self.begin} numbers")

    def part(self, begin: int, end: int) -> Piece:
        """Return the piece of a range within this one; its arrays are views."""
        arrays = {name: array[begin - self.begin : end - self.begin] for name, array in self.arrays.items()}
        return replace(self, begin=begin, end=end, arrays=arrays)


#: All of a piece but its arrays, in their order.
_PieceHeader = tuple[Key, int, int, int, str, int, float | None]


class _StatesHeader(msgspec.Struct, frozen=True):
    optimizer: dict[str, Any] | None
    facts: dict[str, Fact]
    pieces: list[_PieceHeader]


@dataclass(frozen=True)
class States:
    """Pieces of any number of keys, in any order; of a key they do not overlap.

    ``optimizer`` is the owner of the states, if it is known; ``facts`` are further values by name.

    Raises:
        ConfigError: pieces of a key overlap or disagree about its size or element type.
    """

    pieces: Sequence[Piece]
    optimizer: Optimizer | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    _by_key: dict[Key, list[Piece]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for piece in sorted(self.pieces, key=lambda piece: piece.begin):
            self._by_key.setdefault(piece.key, []).append(piece)
        for key, pieces in self._by_key.items():
            if len({(piece.num_elements, piece.dtype) for piece in pieces}) > 1:
                raise ConfigError(f"pieces of key {key!r} disagree about its number of elements or their type")
            for earlier, later in pairwise(pieces):
                if later.begin < earlier.end:
                    raise ConfigError(f"pieces of key {key!r} overlap: {earlier.end} and {later.begin}")

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return all keys, each once."""
        return tuple(self._by_key)

    def of(self, key: Key) -> tuple[Piece, ...]:
        """Return the pieces of one key by their ranges; empty where there is no such key."""
        return tuple(self._by_key.get(key, ()))

    def cut(self, key: Key, begin: int, end: int) -> Piece:
        """Cut one range of a key from the pieces that it lies in.

        Where servers had applied different numbers of updates (asynchronous stores), the largest counts.

        Raises:
            ConfigError: there is no such key, a part of the range is missing, or pieces hold different arrays.
        """
        parts = [
            piece.part(max(begin, piece.begin), min(end, piece.end))
            for piece in self.of(key)
            if piece.begin < end and begin < piece.end
        ]
        if not self.of(key):
            raise ConfigError(f"there are no states of key {key!r}")
        position = begin
        for part in parts:
            position = part.end if part.begin == position else position
        if position != end:
            raise ConfigError(
                f"the states of key {key!r} lack the elements from {position} on; is a server's file missing?"
            )
        return _join_parts(parts) if parts else self.of(key)[0].part(begin, begin)

    def merged(self, others: Iterable[States]) -> States:
        """Merge these pieces and those of other servers' states. The first optimizer named counts."""
        everything = [self, *others]
        named = (states.optimizer for states in everything if states.optimizer is not None)
        facts = {name: fact for states in reversed(everything) for name, fact in states.facts.items()}
        return States([piece for states in everything for piece in states.pieces], next(named, None), facts)

    # ---- bytes

    def buffers(self) -> list[Buffer]:
        """Return the bytes, as buffers to be written one after the other; arrays are not copied."""
        headers = [(p.key, p.num_elements, p.begin, p.end, p.dtype, p.count, p.rate) for p in self.pieces]
        arrays = {f"{place} {name}": a for place, piece in enumerate(self.pieces) for name, a in piece.arrays.items()}
        spec = None if self.optimizer is None else self.optimizer.to_spec()
        return packed(_StatesHeader(spec, dict(self.facts), headers), arrays)

    def to_bytes(self) -> bytes:
        """Return the bytes of `buffers` in one."""
        return b"".join(self.buffers())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> States:
        """Parse the bytes of `buffers`. Arrays are views of ``data``, and read-only where it is.

        Raises:
            ConfigError: these are not the bytes of states, or not all of them; or they make no sense.
        """
        header, arrays = unpacked(data, _StatesHeader)
        of_piece: list[dict[str, NDArray[Any]]] = [{} for _ in header.pieces]
        for label, array in arrays.items():
            place, _, name = label.partition(" ")
            if not (place.isdecimal() and place.isascii() and len(place) < 10 and int(place) < len(of_piece)):
                raise ConfigError(f"an array of no piece among the states: {label!r:.80}")
            of_piece[int(place)][name] = array
        pieces = [Piece(*facts, own) for facts, own in zip(header.pieces, of_piece, strict=True)]
        return cls(pieces, None if header.optimizer is None else from_spec(header.optimizer), header.facts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, as a whole or not at all; raises OSError."""
        write_atomically(path, self.buffers())

    @classmethod
    def load(cls, *paths: str | os.PathLike[str]) -> States:
        """Read one file, or the files of several servers as one.

        Raises:
            ConfigError: a file holds no states, or is damaged.
            OSError: a file cannot be read.
        """
        read = []
        for path in paths:
            try:
                read.append(cls.from_bytes(Path(path).read_bytes()))
            except ConfigError as error:
                raise ConfigError(f"{os.fspath(path)}: {error}") from None
        return read[0].merged(read[1:])


def piece_of(
    slot: Slot, key: Key, num_elements: int, begin: int, extra: Mapping[str, NDArray[Any]] | None = None
) -> Piece:
    """Make the piece of ``slot``, at ``begin`` of ``num_elements``, without copies; ``extra``: more arrays."""
    arrays = {**slot.arrays, **(extra or {})}
    return Piece(key, num_elements, begin, begin + slot.length, slot.dtype.name, slot.count, slot.rate, arrays)


def slot_of(piece: Piece, optimizer: Optimizer, weight: NDArray[Any]) -> Slot:
    """Make a slot that goes on where ``piece`` ended; its arrays are copies.

    ``piece`` is of exactly the range of ``weight``, which is flat, in its storage type. Arrays that the optimizer does
    not know are left out; a float32 copy that ``piece`` does not have is made of ``weight``.

    Raises:
        ConfigError: the optimizer needs states that ``piece`` does not have.
    """
    if piece.end - piece.begin != len(weight):
        raise ConfigError(
            f"states of {piece.end - piece.begin} elements of key {piece.key!r} for a weight of {len(weight)}"
        )
    slot = Slot(optimizer, weight, DTYPES[piece.dtype])
    if missing := set(optimizer.state_names) - set(piece.arrays):
        raise ConfigError(
            f"the states of key {piece.key!r} are {', '.join(piece.arrays) or 'none'}; "
            f"{optimizer.name} with these numbers needs {', '.join(sorted(missing))}, too"
        )
    for name, target in slot.arrays.items():
        if name in piece.arrays:
            np.copyto(target, piece.arrays[name], casting="same_kind")
    slot.count, slot.rate = piece.count, piece.rate
    return slot


def _join_parts(parts: list[Piece]) -> Piece:
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({frozenset((name, array.dtype) for name, array in part.arrays.items()) for part in parts}) > 1:
        raise ConfigError(f"pieces of key {first.key!r} hold different arrays")
    arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays}
    latest = max(parts, key=lambda part: part.count)  # in an asynchronous store pieces may be some updates apart
    return replace(latest, begin=first.begin, end=parts[-1].end, arrays=arrays)
