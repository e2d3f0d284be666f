from __future__ import annotations

import hashlib

import numpy as np
import pytest

from reigen.errors import ArgumentError
from reigen.kv.values import MAX_KEY_BYTES, key_id


def test_an_integer_is_its_own_id_with_all_its_64_bits() -> None:
    assert [key_id(key) for key in (0, 2, 2**32 + 2, 2**64 - 1)] == [0, 2, 2**32 + 2, 2**64 - 1]
    assert key_id(np.int64(5)) == 5
    assert [key_id(key) for key in (-1, -(2**63), np.int64(-2))] == [2**64 - 1, 2**63, 2**64 - 2]  # two's complement


def test_the_id_of_a_string_is_the_same_in_every_process() -> None:
    expected = hashlib.blake2b(b"fc.weight", digest_size=8).hexdigest()
    assert f"{key_id('fc.weight'):016x}" == expected == "ca26ba05dbd3d273"
    assert key_id("ключ") != key_id("key") < 2**64


@pytest.mark.parametrize("key", [True, 1.0, None, b"key", -(2**63) - 1, 2**64, "x" * (MAX_KEY_BYTES + 1), "\ud800"])
def test_what_is_no_key_is_an_error_that_says_so(key: object) -> None:
    with pytest.raises(ArgumentError, match="key"):
        key_id(key)  # type: ignore[arg-type]
