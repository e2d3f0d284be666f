"""Parcels of arrays: what goes in comes out, what is damaged or lies is refused, files are replaced as a whole."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reigen.errors import WireError
from reigen.kv.states import CellFacts, cut, join, pack, unpack

ARRAYS = {
    "float32": np.arange(5, dtype=np.float32),
    "empty": np.empty(0, np.int64),
    "matrix": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "number": np.float64(3.5).reshape(()),
}


def test_what_goes_in_comes_out():
    facts = {"a": [1, 2.5, None, "x", b"y"], "b": {"c": True}}
    told, arrays = unpack(pack(facts, ARRAYS))
    assert told == facts
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert (arrays[name] == array).all()


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_byte_that_changed_is_found(place, by):
    parcel = pack({"a": 1}, ARRAYS)
    parcel[place % len(parcel)] ^= by
    with pytest.raises(WireError):
        unpack(parcel)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data):
    for parcel in (data, bytes(pack(None, {}))[:16] + data):
        with pytest.raises(WireError):
            unpack(parcel)


def sealed(content):
    return content + hashlib.blake2b(content, digest_size=16).digest()


@pytest.mark.parametrize("cut_off", [1, 64, 100])
def test_what_is_cut_off_and_sealed_anew_is_refused(cut_off):
    with pytest.raises(WireError):
        unpack(sealed(bytes(pack({"a": 1}, ARRAYS)[: -16 - cut_off])))
    with pytest.raises(WireError, match="more bytes than"):
        unpack(sealed(bytes(pack({"a": 1}, ARRAYS)[:-16]) + bytes(64)))


def test_facts_of_another_type_are_refused():
    assert unpack(pack(CellFacts("sgd", (1, 2), 2, 0.5), {}), CellFacts)[0] == CellFacts("sgd", (1, 2), 2, 0.5)
    with pytest.raises(WireError, match="make no sense"):
        unpack(pack({"optimizer": 3}, {}), CellFacts)


def test_states_of_cells_are_joined_and_cut():
    whole = np.arange(100, dtype=np.float32)
    parts = [
        (begin, end, pack(CellFacts("adam", (5,), updates, 0.1), {"mean": whole[begin:end], "var": -whole[begin:end]}))
        for begin, end, updates in ((64, 100, 5), (0, 32, 5), (32, 64, 4))
    ]
    facts, arrays = join(parts)
    assert facts == CellFacts("adam", (5,), 5, 0.1)
    assert list(arrays["mean"]) == list(whole)
    assert list(arrays["var"]) == list(-whole)
    told, piece = unpack(cut(facts, arrays, 10, 90), CellFacts)
    assert told == facts
    assert list(piece["mean"]) == list(whole[10:90])
    with pytest.raises(WireError, match="do not fit together"):
        join(parts[:1])
    with pytest.raises(WireError, match="not as long as its cell"):
        join([(0, 40, parts[1][2])])
