"""Arrays and plain values as bytes: what goes in comes out, what is damaged or lies is refused."""

import hashlib
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reigen.errors import ConfigError
from reigen.optim import packed, unpacked

ARRAYS = {
    "float32": np.arange(5, dtype=np.float32),
    "empty": np.empty(0, np.int64),
    "matrix": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "number": np.float64(3.5).reshape(()),
}


def whole(facts, arrays=None):
    return bytearray(b"".join(packed(facts, arrays or {})))


def test_what_goes_in_comes_out():
    facts = {"a": [1, 2.5, None, "x", b"y"], "b": {"c": True}}
    told, arrays = unpacked(whole(facts, ARRAYS), Any)
    assert told == facts
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert (arrays[name] == array).all()


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_byte_that_changed_is_found(place, by):
    parcel = whole({"a": 1}, ARRAYS)
    parcel[place % len(parcel)] ^= by
    with pytest.raises(ConfigError):
        unpacked(parcel, Any)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data):
    for parcel in (data, bytes(whole(None))[:16] + data):
        with pytest.raises(ConfigError):
            unpacked(parcel, Any)


def sealed(content):
    return content + hashlib.blake2b(content, digest_size=32).digest()


@pytest.mark.parametrize("cut_off", [1, 64, 100])
def test_what_is_cut_off_and_sealed_anew_is_refused(cut_off):
    with pytest.raises(ConfigError):
        unpacked(sealed(bytes(whole({"a": 1}, ARRAYS)[: -32 - cut_off])), Any)
    with pytest.raises(ConfigError, match="more bytes than"):
        unpacked(sealed(bytes(whole({"a": 1}, ARRAYS)[:-32]) + bytes(64)), Any)


class Facts(msgspec.Struct, array_like=True):
    name: str
    counts: tuple[int, ...] = ()


def test_facts_of_another_type_are_refused():
    assert unpacked(whole(Facts("sgd", (1, 2))), Facts)[0] == Facts("sgd", (1, 2))
    with pytest.raises(ConfigError, match="makes no sense"):
        unpacked(whole({"name": 3}), Facts)


def forged(arrays, data=bytes(64)):
    """A right checksum proves nothing about who wrote it."""
    header = msgspec.msgpack.encode([None, arrays])
    content = struct.pack("<8sII", b"REIGENST", 2, len(header)) + header
    return sealed(content + bytes(-len(content) % 64) + data)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"m": ["float32", [10**15]]}, "'m' lies outside the states"),
        ({"m": ["float32", [-4]]}, "cannot have the shape"),
        ({"m": ["float32", [1] * 70]}, "cannot have the shape"),
        ({"m": ["object", [4]]}, "'object' are not supported"),
        ({"m": ["float32"]}, "makes no sense"),
        ({}, "more bytes than they should"),
    ],
)
def test_what_consistent_bytes_claim_is_checked(arrays, words):
    assert list(unpacked(forged({"m": ["float32", [2, 8]]}), type(None))[1]) == ["m"]
    with pytest.raises(ConfigError, match=words):
        unpacked(forged(arrays), type(None))
