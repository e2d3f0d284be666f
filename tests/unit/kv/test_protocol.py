"""Headers and bodies of the parameter server's protocol: what was packed comes out, what nobody sends is refused."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reigen.errors import ArgumentError, ConfigError, DuplicateNameError, MismatchError, PeerLostError, WireError
from reigen.kv.protocol import (
    COUNT_UNKNOWN,
    DTYPE_NUMBERS,
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    REMOTE_ERROR_CODEC,
    MessageFlag,
    MessageHeader,
    MessageKind,
    RemoteError,
    pack_counts,
    unpack_counts,
    unpack_header,
)

U64 = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(U64, U64, st.integers(0, 2**32 - 1), U64, st.integers(-(2**31), 2**31 - 1), U64, st.integers(0, 2**16 - 1))
def test_a_header_comes_out_as_it_went_in(request, key, shard, round_, priority, nbytes, store):
    header = MessageHeader(
        MessageKind.PUSH,
        request,
        key,
        shard,
        round_,
        MessageFlag.ENCODED,
        DTYPE_NUMBERS["bfloat16"],
        MessageKind.PULL,
        store,
        priority,
        nbytes,
    )
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 72
    assert unpack_header(packed) == header


def test_the_length_of_a_body_is_where_the_body_is():
    assert MessageHeader(MessageKind.PUSH, body_bytes=8).num_bytes == 8
    assert MessageHeader(MessageKind.PUSH, flags=MessageFlag.IN_MEMORY, offset=64, memory_bytes=24).num_bytes == 24


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 0, "of kind 0"),
        (0, 63, "of kind 63"),
        (2, len(DTYPE_NUMBERS) + 1, "dtype 12"),
        (6, 1, "which no end sends"),
    ],
)
def test_a_header_that_nobody_sends_is_refused(at, value, says):
    packed = bytearray(MessageHeader(MessageKind.PUSH, 1, 2, 3, 4).pack())
    packed[at] = value
    with pytest.raises(WireError, match=says):
        unpack_header(packed)


def test_control_messages_are_small_and_bodies_are_in_one_place():
    with pytest.raises(WireError, match="HELLO of 1048577 bytes; at most 1048576"):
        unpack_header(MessageHeader(MessageKind.HELLO, body_bytes=MAX_CONTROL_BYTES + 1).pack())
    with pytest.raises(WireError, match="two places"):
        unpack_header(MessageHeader(MessageKind.PUSH, flags=MessageFlag.IN_MEMORY, body_bytes=1, memory_bytes=1).pack())
    with pytest.raises(WireError, match="header of 71 bytes"):
        unpack_header(bytes(71))


@settings(deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_no_bytes_lead_to_anything_but_a_header_or_a_wire_error(data):
    try:
        header = unpack_header(data)
    except WireError:
        return
    assert header.pack() == data[:7] + b"\0" + data[8:]  # byte 7 is padding


def test_counts():
    counts = [(2**64 - 1, 7, 3), (0, 0, COUNT_UNKNOWN)]
    assert unpack_counts(pack_counts(counts)) == counts
    assert struct.unpack("<6Q", pack_counts(counts)) == (2**64 - 1, 7, 3, 0, 0, COUNT_UNKNOWN)
    assert unpack_counts(pack_counts([])) == []
    with pytest.raises(WireError, match="23 bytes"):
        unpack_counts(bytes(23))


def test_errors_travel_with_their_facts():
    error = PeerLostError("worker 1 on host b is lost", ranks=[1], details={1: "host b"})
    told = REMOTE_ERROR_CODEC.decode(REMOTE_ERROR_CODEC.encode(RemoteError.of(error, key="fc.weight"))).raised()
    assert type(told) is PeerLostError
    assert (told.reason, told.ranks, told.details) == (error.reason, (1,), {1: "host b"})
    assert told.tensor == "key 'fc.weight'"
    assert type(RemoteError.of(MismatchError("x")).raised()) is MismatchError
    assert type(RemoteError.of(ConfigError("x")).raised()) is ConfigError
    assert type(RemoteError.of(DuplicateNameError("x")).raised()) is ArgumentError  # the nearest that travels
