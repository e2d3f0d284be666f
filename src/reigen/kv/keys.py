"""Keys of a store: integers or strings, 64 bits on the wire whatever a worker declared first."""

from __future__ import annotations

import operator
from hashlib import blake2b
from typing import SupportsIndex

from reigen.errors import ArgumentError

#: What a caller may give as a key. NumPy's integers are integers.
KeyLike = SupportsIndex | str

#: The longest string key, in UTF-8.
MAX_KEY_BYTES = 1024
_NUM_IDS = 1 << 64


def key_id(key: KeyLike) -> int:
    """Return the number of 64 bits under which servers know a key, the same in every process.

    An integer is its own id; one below 0 has that of its two's complement. A string's is its BLAKE2b hash of 8 bytes
    (RFC 7693; big endian). The server that keeps the declaration compares the name itself, so that a collision is an
    error and never a shared value.

    Raises:
        ArgumentError: neither an int nor a str; an int of more than 64 bits; a str of more than `MAX_KEY_BYTES`, or one
            that UTF-8 cannot say.

    Example:
        >>> key_id(7), hex(key_id(-1)), hex(key_id("fc.weight"))
        (7, '0xffffffffffffffff', '0xca26ba05dbd3d273')
    """
    if isinstance(key, str):
        return int.from_bytes(blake2b(_encode_key(key), digest_size=8).digest(), "big")
    if isinstance(key, bool) or not hasattr(key, "__index__"):
        raise ArgumentError(f"a key is an int or a str, not {type(key).__name__} ({key!r:.80})")
    number = operator.index(key)
    if not -_NUM_IDS // 2 <= number < _NUM_IDS:
        raise ArgumentError(f"the key {number} is not between -2**63 and 2**64 - 1")
    return number % _NUM_IDS


def _encode_key(key: str) -> bytes:
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"the key {key!r:.80} is not valid Unicode") from None
    if len(data) > MAX_KEY_BYTES:
        raise ArgumentError(f"the key {key[:40]!r}... has {len(data)} bytes; at most {MAX_KEY_BYTES} are allowed")
    return data
