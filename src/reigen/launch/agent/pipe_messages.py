"""Messages through a pair of pipes, without ever waiting for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from reigen.errors import WireError
from reigen.launch.agent.agent_protocol import MAX_FRAME_BYTES, GreetingParser
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.net.codec import FrameBuffer, MessageCodec, add_length_prefix

_READ_BYTES = 1 << 16
_Out = TypeVar("_Out")
_In = TypeVar("_In")


class MessagePipes(Generic[_Out, _In]):
    """Connection through two pipes.

    Args:
        loop: waits for the pipes.
        descriptors: to read and to write; owned from now on, and set to be non-blocking.
        codecs: of sent and of received messages.
        on_message: called with each message.
        on_end: called once, when nothing more can come, with the reason: empty for the end of the file.
        greeting_parser: parser of the bytes before the first message; None: there are none.
        trailer: frame that follows each message.
    """

    def __init__(
        self,
        loop: LauncherLoop,
        descriptors: tuple[int, int],
        codecs: tuple[MessageCodec[_Out], MessageCodec[_In]],
        on_message: Callable[[_In], None],
        on_end: Callable[[str], None],
        greeting_parser: GreetingParser | None = None,
        trailer: bytes = b"",
    ) -> None:
        self._loop = loop
        self._reading, self._writing = descriptors
        self._encode, self._decode = codecs[0].encode, codecs[1].decode
        self._on_message, self._on_end, self._greeting_parser = on_message, on_end, greeting_parser
        self._trailer = trailer
        self._frames = FrameBuffer(MAX_FRAME_BYTES)
        self._pending = bytearray()
        self._is_open = self._is_writable = True
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        loop.watch(self._reading, self._read)

    def send(self, message: _Out) -> None:
        """Send a message. A closed connection is noticed by reading, not here."""
        self.send_bytes(add_length_prefix(self._encode(message), MAX_FRAME_BYTES) + self._trailer)

    def send_bytes(self, data: bytes) -> None:
        """Send bytes that are no message: a greeting."""
        if self._is_writable:
            self._pending += data
            self._flush()

    def feed(self, data: bytes) -> None:
        """Take received bytes."""
        try:
            if self._greeting_parser is not None and self._greeting_parser.version is None:
                data = self._greeting_parser.feed(data)
            self._frames.feed(data)
        except WireError as error:
            self._end(str(error))
        while self._is_open and (message := self._pop()) is not None:
            self._on_message(message)

    def _pop(self) -> _In | None:
        """Return the next message that is complete; None: there is none, or it makes no sense, which is the end."""
        try:
            body = self._frames.pop()
            return None if body is None else self._decode(body)
        except WireError as error:
            self._end(str(error))
            return None

    def finish(self) -> None:
        """Close the writing end: the other side reads the end of the file. May be called twice."""
        if self._is_writable:
            self._is_writable = False
            self._loop.unwatch(self._writing)
            os.close(self._writing)

    def close(self) -> None:
        """Close both ends. May be called twice."""
        self.finish()
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self._reading)
            os.close(self._reading)

    @property
    def has_pending(self) -> bool:
        """Return whether something that was sent has not been written."""
        return bool(self._pending) and self._is_writable

    def _read(self) -> None:
        try:
            data = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(str(error.strerror))
            return
        if data:
            self.feed(data)
        else:
            self._end("")

    def _end(self, reason: str) -> None:
        self.close()
        self._on_end(reason)

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            try:
                while self._pending:
                    del self._pending[: os.write(self._writing, self._pending)]
            except BrokenPipeError:
                self.finish()
                return
        if self._pending:
            self._loop.watch(self._writing, on_writable=self._flush)
        else:
            self._loop.unwatch(self._writing)
