"""Arrays and plain values as bytes: optimizer states, snapshots of servers.

The layout, all numbers little endian::

    8 bytes     b"REIGENST"
    4 bytes     version of the layout, 2
    4 bytes     length of the header
    header      MessagePack: values beside the arrays; element type and shape of each array, by name
    zeros       up to a multiple of 64
    arrays      one after the other, each followed by zeros up to a multiple of 64
    32 bytes    BLAKE2b of everything before

Nothing in it can run: reading it makes numbers, texts and arrays, and checks every length before it is used.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.errors import ConfigError
from reigen.files import Buffer as Buffer  # noqa: PLC0414  also for who reads and writes this layout
from reigen.types import DTYPES

_MAGIC = b"REIGENST"
_VERSION = 2
_FIXED = struct.Struct("<8sII")
_ALIGNMENT = 64
_DIGEST_BYTES = 32
#: Limit of a header: of a million pieces, but not such that a length in a broken file could fill the memory.
_MAX_HEADER_BYTES = 256 << 20
_MOST_DIMENSIONS = 32
#: Element types that arrays may have: plain bytes, no objects. bfloat16 is uint16.
STORAGES = {dtype.storage.name: dtype.storage for dtype in DTYPES.values()}

_Facts = TypeVar("_Facts")


#: Facts, and element type and shape of each array.
_Header = tuple[msgspec.Raw, dict[str, tuple[str, tuple[int, ...]]]]


def packed(facts: Any, arrays: Mapping[str, NDArray[Any]]) -> list[Buffer]:
    """Return the bytes, as buffers to be written one after the other; contiguous arrays are not copied.

    Args:
        facts: plain values, or a msgspec type made of such.
        arrays: by name, of any shape, of the types in `STORAGES`.

    Raises:
        ConfigError: there is too much beside the arrays.
    """
    shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    header = msgspec.msgpack.encode((facts, shapes))
    if len(header) > _MAX_HEADER_BYTES:
        raise ConfigError("too many pieces for one file of optimizer states")
    result: list[Buffer] = [_FIXED.pack(_MAGIC, _VERSION, len(header)), header, _filling(_FIXED.size + len(header))]
    for array in arrays.values():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""
        result += [data, _filling(array.nbytes)]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in result:
        digest.update(part)
    return [*result, digest.digest()]


def unpacked(data: Buffer, kind: type[_Facts]) -> tuple[_Facts, dict[str, NDArray[Any]]]:
    """Parse the bytes of `packed`, with facts of a ``kind``; arrays are views of ``data``, and read-only where it is.

    Raises:
        ConfigError: these are not such bytes, or not all of them; or their content makes no sense.
    """
    view = memoryview(data).cast("B")
    length = _checked_length(view)
    try:
        raw, shapes = msgspec.msgpack.decode(view[_FIXED.size : _FIXED.size + length], type=_Header)
        facts = msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"the header of the states makes no sense: {error}") from None
    arrays, position = {}, _padded(_FIXED.size + length)
    for name, (dtype, shape) in shapes.items():
        arrays[name] = _array(view, position, name, dtype, shape)
        position += _padded(arrays[name].nbytes)
    if position != len(view) - _DIGEST_BYTES:
        raise ConfigError("the states have more bytes than they should, or fewer")
    return facts, arrays


def _checked_length(view: memoryview) -> int:
    """Return the length of the header, after a check that all bytes are there."""
    if len(view) < _FIXED.size + _DIGEST_BYTES:
        raise ConfigError("these are no states of Reigen: too short")
    magic, version, length = _FIXED.unpack_from(view)
    if magic != _MAGIC:
        raise ConfigError("these are no states of Reigen (files of MXNet are pickled code and are not read)")
    if version != _VERSION:
        raise ConfigError(f"states in layout {version}; this version of Reigen reads layout {_VERSION}")
    if length > _MAX_HEADER_BYTES or _padded(_FIXED.size + length) + _DIGEST_BYTES > len(view):
        raise ConfigError("the states are cut off")
    if hashlib.blake2b(view[:-_DIGEST_BYTES], digest_size=_DIGEST_BYTES).digest() != bytes(view[-_DIGEST_BYTES:]):
        raise ConfigError("the states are damaged or cut off: their checksum is wrong")
    return int(length)


def _array(view: memoryview, begin: int, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    storage = STORAGES.get(dtype)
    if storage is None:
        raise ConfigError(f"array {name!r:.80} of the states: elements of {dtype!r:.40} are not supported")
    count = math.prod(shape)
    if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise ConfigError(f"array {name!r:.80} of the states cannot have the shape {shape[:9]}")
    if begin + count * storage.itemsize > len(view) - _DIGEST_BYTES:
        raise ConfigError(f"array {name!r:.80} lies outside the states")
    return np.frombuffer(view, storage, count, begin).reshape(shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _filling(size: int) -> bytes:
    return bytes(_padded(size) - size)
