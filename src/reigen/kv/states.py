"""Arrays and plain values as bytes, and what belongs to a cell beside its value: in messages, snapshots and files.

A *parcel* is: its magic and version (8 bytes), the length of what describes it (8 bytes), that in MessagePack, the
arrays one after the other, each at a multiple of 64 bytes, and a BLAKE2b checksum of all before (16 bytes). Nothing in
it is code. Reading one checks every length before it is used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.errors import WireError

_MAGIC = b"RGNKV\0\0\1"
_LENGTH = struct.Struct("<Q")
_CHECKSUM_BYTES = 16
_ALIGNMENT = 64
_MAX_DESCRIPTION_BYTES = 64 << 20
#: Types of elements that a parcel may have; bfloat16 travels as uint16.
_DTYPES = frozenset(
    {"uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "uint64"}
)


class _Shape(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]


class _Description(msgspec.Struct, array_like=True, frozen=True):
    facts: Any
    arrays: dict[str, _Shape]


def pack(facts: Any, arrays: Mapping[str, NDArray[Any]]) -> bytearray:
    """A parcel.

    Args:
        facts: plain values: dict, list, str, int, float, bool, None, bytes.
        arrays: by name; contiguous.
    """
    shapes = {name: _Shape(array.dtype.name, array.shape) for name, array in arrays.items()}
    description = msgspec.msgpack.encode(_Description(facts, shapes))
    parcel = bytearray(_MAGIC + _LENGTH.pack(len(description)) + description)
    for array in arrays.values():
        parcel += bytes(-len(parcel) % _ALIGNMENT)
        parcel += np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    parcel += hashlib.blake2b(parcel, digest_size=_CHECKSUM_BYTES).digest()
    return parcel


def unpack(parcel: bytes | bytearray | memoryview, facts: Any = Any) -> tuple[Any, dict[str, NDArray[Any]]]:
    """The facts and arrays of a parcel; the arrays are views of it.

    Args:
        parcel: what `pack` made.
        facts: a msgspec type that the facts must be of.

    Raises:
        WireError: it is none, or damaged.
    """
    data = memoryview(parcel)
    begin = len(_MAGIC) + _LENGTH.size
    if len(data) < begin + _CHECKSUM_BYTES or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise WireError("these are no values or states of Reigen's parameter server, or of another version of it")
    content = data[:-_CHECKSUM_BYTES]
    if hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest() != bytes(data[-_CHECKSUM_BYTES:]):
        raise WireError("values or states of a parameter server are damaged: their checksum is wrong")
    (length,) = _LENGTH.unpack(content[len(_MAGIC) : begin])
    if length > min(len(content) - begin, _MAX_DESCRIPTION_BYTES):
        raise WireError("values or states of a parameter server are cut off")
    try:
        described = msgspec.msgpack.decode(content[begin : begin + length], type=_Description)
        checked = msgspec.convert(described.facts, facts) if facts is not Any else described.facts
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"values or states of a parameter server make no sense: {error}") from None
    return checked, _arrays(described, content, begin + length)


def _arrays(described: _Description, content: memoryview, begin: int) -> dict[str, NDArray[Any]]:
    arrays = {}
    for name, shape in described.arrays.items():
        if shape.dtype not in _DTYPES or any(size < 0 for size in shape.shape):
            raise WireError(f"an array of dtype {shape.dtype} and shape {shape.shape} in a parcel")
        begin += -begin % _ALIGNMENT
        dtype = np.dtype(shape.dtype)
        count = 1
        for size in shape.shape:
            count *= size
        end = begin + count * dtype.itemsize
        if end > len(content):
            raise WireError("values or states of a parameter server are cut off")
        arrays[name] = np.frombuffer(content[begin:end], dtype).reshape(shape.shape)
        begin = end
    if begin != len(content):
        raise WireError("values or states of a parameter server have more bytes than they should")
    return arrays


# ---------------------------------------------------------------- states of cells


class CellFacts(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What is known of the states of a cell, or of a whole key.

    Attributes:
        optimizer: its name; empty where there is none.
        counts: how many updates it has had, by worker; in a synchronous store the same for all.
        updates: how many in all.
        rate: the learning rate of the last one; None before the first.
    """

    optimizer: str
    counts: tuple[int, ...] = ()
    updates: int = 0
    rate: float | None = None


def join(parts: list[tuple[int, int, bytes | bytearray | memoryview]]) -> tuple[CellFacts, dict[str, NDArray[Any]]]:
    """The states of a whole key.

    Args:
        parts: (begin, end, answer to GET_STATES) of its cells; together they are the key.

    Raises:
        WireError: they do not fit together.
    """
    unpacked = [(begin, end, *unpack(parcel, CellFacts)) for begin, end, parcel in sorted(parts, key=lambda p: p[0])]
    facts, names = unpacked[0][2], list(unpacked[0][3])
    at = 0
    for begin, end, here, arrays in unpacked:
        if begin != at or here.optimizer != facts.optimizer or list(arrays) != names:
            raise WireError("the states of the cells of a key do not fit together")
        if any(len(array) != end - begin for array in arrays.values()):
            raise WireError("a state is not as long as its cell")
        at = end
        # cells of a key may be an update apart where workers are not synchronous
        facts = here if here.updates > facts.updates else facts
    return facts, {name: np.concatenate([arrays[name] for *_, arrays in unpacked]) for name in names}


def cut(facts: CellFacts, arrays: Mapping[str, NDArray[Any]], begin: int, end: int) -> bytearray:
    """The body of PUT_STATES for the cell of elements ``[begin, end)``, from the states of its whole key."""
    return pack(facts, {name: array[begin:end] for name, array in arrays.items()})
