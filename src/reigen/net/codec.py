"""Messages and frames: the form that bytes have between two processes.

A frame is a length of four bytes (big endian) and that many bytes. A message is a msgspec struct in MessagePack. Both
have a largest size, which is compared before anything is allocated for them. There is no pickle here, nor anywhere else
that bytes of another process are read.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar, cast

import msgspec

from reigen.errors import WireError

_LENGTH = struct.Struct(">I")
_Message = TypeVar("_Message")


class MessageCodec(Generic[_Message]):
    """Messages of given types to bytes and back.

    Args:
        kind: a msgspec type, or a union of tagged structs.
        max_bytes: the largest encoded message.
    """

    def __init__(self, kind: Any, max_bytes: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._max_bytes = max_bytes

    def encode(self, message: _Message) -> bytes:
        """The bytes of one message.

        Raises:
            WireError: the message is larger than ``max_bytes``.
        """
        data = self._encoder.encode(message)
        if len(data) > self._max_bytes:
            raise WireError(f"a message has {len(data)} bytes; at most {self._max_bytes} are allowed")
        return data

    def decode(self, data: bytes) -> _Message:
        """The message in ``data``.

        Raises:
            WireError: too large, or not a message of this codec's types.
        """
        if len(data) > self._max_bytes:
            raise WireError(f"a message has {len(data)} bytes; at most {self._max_bytes} are allowed")
        try:
            return cast(_Message, self._decoder.decode(data))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
            raise WireError(f"not a message of this protocol: {error}") from None


def add_length_prefix(body: bytes, max_bytes: int) -> bytes:
    """``body`` with its length in front.

    Raises:
        WireError: the body is larger than ``max_bytes``.
    """
    if len(body) > max_bytes:
        raise WireError(f"a frame has {len(body)} bytes; at most {max_bytes} are allowed")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a stream of bytes into frames.

    It never holds more than one read beyond one frame as long as its user takes the frames out after each ``feed``:
    a length that is too large is refused when its four bytes are there, before the body is waited for.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Append bytes that were read."""
        self._data += data

    def pop(self) -> bytes | None:
        """The next whole frame's body, or None while it is not complete.

        Raises:
            WireError: the length is larger than the limit. The stream cannot be used any more.
        """
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self._max_bytes:
            raise WireError(f"a frame of {length} bytes was announced; at most {self._max_bytes} are allowed")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body
