"""Frames and messages: whatever comes in, nothing is decoded or allocated beyond the limits."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.errors import WireError
from reigen.net.codec import FrameBuffer, MessageCodec, add_length_prefix


class Point(msgspec.Struct, tag=1, array_like=True):
    x: int
    y: float


class Note(msgspec.Struct, tag=2, array_like=True):
    text: str


CODEC = MessageCodec[Point | Note](Point | Note, max_bytes=64)


@pytest.mark.parametrize("message", [Point(3, 0.5), Note("grüße")])
def test_messages_survive_the_way(message):
    assert CODEC.decode(CODEC.encode(message)) == message


def test_a_message_is_plain_messagepack():
    assert CODEC.encode(Point(3, 0.5)) == b"\x93\x01\x03\xcb" + struct.pack(">d", 0.5)


@given(st.binary(max_size=80))
def test_garbage_is_a_message_or_a_wire_error(data):
    with contextlib.suppress(WireError):
        assert isinstance(CODEC.decode(data), Point | Note)


def test_nested_garbage_does_not_exhaust_the_stack():
    codec = MessageCodec[object](object, max_bytes=1 << 20)
    with pytest.raises(WireError):
        codec.decode(b"\x91" * 500_000)


def test_text_that_is_none():
    with pytest.raises(WireError, match="not a message of this protocol"):
        CODEC.decode(b"\x92\x02\xa4abc\xec")


def test_limits_of_messages():
    with pytest.raises(WireError, match="at most 64"):
        CODEC.encode(Note("x" * 64))
    with pytest.raises(WireError, match="at most 64"):
        CODEC.decode(b"\x00" * 65)


def test_a_frame_is_a_length_and_a_body():
    assert add_length_prefix(b"abc", 3) == b"\x00\x00\x00\x03abc"
    with pytest.raises(WireError):
        add_length_prefix(b"abcd", 3)


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_frames_come_out_whole_however_they_are_cut(bodies, cuts):
    stream = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    buffer, out = FrameBuffer(20), []
    while stream:
        cut = cuts[len(stream) % len(cuts)]
        buffer.feed(stream[:cut])
        stream = stream[cut:]
        while (body := buffer.pop()) is not None:
            out.append(body)
    assert out == bodies


def test_a_large_length_is_refused_before_its_body_is_waited_for():
    buffer = FrameBuffer(20)
    buffer.feed(b"\x00\x00\x00\x15")
    with pytest.raises(WireError, match="21 bytes was announced; at most 20"):
        buffer.pop()
