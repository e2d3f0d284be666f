"""Keys of a store: integers or strings, one kind in a store, 64 bits on the wire whatever a worker declared first."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import Enum
from hashlib import blake2b
from typing import SupportsIndex

from reigen.errors import ArgumentError

#: What a caller may give as a key. NumPy's integers are integers.
Key = SupportsIndex | str

#: The longest string key, in UTF-8.
MAX_KEY_BYTES = 1024
_IDS = 1 << 64


class KeyKind(Enum):
    """What the keys of one store are."""

    INT = "int"
    STR = "str"


def key_kind(key: Key) -> KeyKind:
    """Whether ``key`` is an integer or a string.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(key, str):
        return KeyKind.STR
    if isinstance(key, bool) or not hasattr(key, "__index__"):
        raise ArgumentError(f"a key is an int or a str, not {type(key).__name__} ({key!r:.80})")
    return KeyKind.INT


def key_id(key: Key) -> int:
    """The number of 64 bits under which servers know a key, the same in every process.

    An integer is its own id. A string's is its BLAKE2b hash of 8 bytes (RFC 7693; big endian); the server that keeps
    the declaration compares the name itself, so that a collision is an error and never a shared value.

    Raises:
        ArgumentError: neither an int nor a str; an int below 0 or of more than 64 bits; a str of more than
            `MAX_KEY_BYTES`, or one that UTF-8 cannot say.

    Example:
        >>> key_id(7), hex(key_id("fc.weight"))
        (7, '0xca26ba05dbd3d273')
    """
    if key_kind(key) is KeyKind.STR:
        return int.from_bytes(blake2b(_encoded(str(key)), digest_size=8).digest(), "big")
    number = operator.index(key)  # type: ignore[arg-type]  # key_kind() has looked
    if not 0 <= number < _IDS:
        raise ArgumentError(f"the key {number} is not between 0 and 2**64 - 1")
    return number


def _encoded(key: str) -> bytes:
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"the key {key!r:.80} is not valid Unicode") from None
    if len(data) > MAX_KEY_BYTES:
        raise ArgumentError(f"the key {key[:40]!r}... has {len(data)} bytes; at most {MAX_KEY_BYTES} are allowed")
    return data


class Keys:
    """The keys of one store: all integers, or all strings.

    Attributes:
        kind: of the first key that was seen; None before.
    """

    def __init__(self) -> None:
        self.kind: KeyKind | None = None

    def ids(self, keys: Iterable[Key]) -> list[int]:
        """The ids of ``keys``, in order.

        Raises:
            ArgumentError: one is no key (see `key_id`), or of the other kind; then none of them counts as seen.
        """
        kind, ids = self.kind, []
        for key in keys:
            ids.append(key_id(key))
            here = key_kind(key)
            if kind is None:
                kind = here
            elif here is not kind:
                raise ArgumentError(
                    f"Mixed key types are not allowed: {key!r:.80} is of type {here.value}, other keys of this store "
                    f"are of type {kind.value}"
                )
        self.kind = kind
        return ids
