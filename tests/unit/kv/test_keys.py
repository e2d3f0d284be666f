from __future__ import annotations

import hashlib

import numpy as np
import pytest

from reigen.errors import ArgumentError
from reigen.kv.keys import MAX_KEY_BYTES, KeyKind, Keys, key_id, key_kind


def test_an_integer_is_its_own_id_with_all_its_64_bits() -> None:
    assert [key_id(key) for key in (0, 2, 2**32 + 2, 2**64 - 1)] == [0, 2, 2**32 + 2, 2**64 - 1]
    assert key_id(np.int64(5)) == 5


def test_the_id_of_a_string_is_the_same_in_every_process() -> None:
    expected = hashlib.blake2b(b"fc.weight", digest_size=8).hexdigest()
    assert f"{key_id('fc.weight'):016x}" == expected == "ca26ba05dbd3d273"
    assert key_id("ключ") != key_id("key") < 2**64


@pytest.mark.parametrize("key", [True, 1.0, None, b"key", -1, 2**64, "x" * (MAX_KEY_BYTES + 1), "\ud800"])
def test_what_is_no_key_is_an_error_that_says_so(key: object) -> None:
    with pytest.raises(ArgumentError, match="key"):
        key_id(key)  # type: ignore[arg-type]


def test_a_store_takes_one_kind_of_key() -> None:
    keys = Keys()
    assert keys.kind is None
    assert keys.ids([3, np.int32(4)]) == [3, 4]
    assert keys.kind is KeyKind.INT
    with pytest.raises(ArgumentError, match="Mixed key types are not allowed: 'a' is of type str"):
        keys.ids([5, "a"])
    assert keys.ids([5]) == [5]


def test_a_call_with_mixed_keys_leaves_the_kind_open() -> None:
    keys = Keys()
    with pytest.raises(ArgumentError, match="Mixed"):
        keys.ids([1, "a"])
    assert keys.ids(["a"]) == [key_id("a")]
    assert keys.kind is key_kind("a") is KeyKind.STR
