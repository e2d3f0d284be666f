"""Lines between the launcher and an agent: pipes of a client process, or a connection that the agent has made."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from reigen.errors import AuthenticationError, WireError
from reigen.launch.agent.agent_protocol import REPLY_CODEC, REQUEST_CODEC, AgentReply, AgentRequest, GreetingParser
from reigen.launch.agent.pipe_messages import MessagePipes
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.spawn import ClientProcess
from reigen.net.codec import MessageCodec
from reigen.net.connection import Connection

_STDERR_BYTES = 1 << 14
_Out = TypeVar("_Out")
_In = TypeVar("_In")


class AgentLine(Protocol):
    """Line to one agent, which may not have come yet."""

    def open(self, on_reply: Callable[[AgentReply], None], on_end: Callable[[str], None]) -> None:
        """Begin to read: ``on_reply`` gets messages, ``on_end`` the reason for the end, empty for one in good order."""

    def send(self, request: AgentRequest) -> None:
        """Send a request. An end is noticed by reading, not here."""

    @property
    def has_pending(self) -> bool:
        """Return whether something that was sent has not been written."""

    @property
    def output(self) -> str:
        """Output on the way to the agent, and of the agent on stderr, where it comes here."""

    def mask(self, secret: bytes) -> bytes:
        """Return the job's secret in the form in which it may travel on this line."""

    def finish(self) -> None:
        """Send no more: the agent reads the end of the file, and ends. May be called twice."""

    @property
    def has_ended(self) -> bool:
        """Return whether the process started here has ended, or there is none."""

    def wait_end(self, seconds: float) -> int | None:
        """Wait so long for the end of the process started here; returns its exit code, None where there is none."""

    def begin_close(self) -> None:
        """Begin to end the line, without waiting; `close` does the rest. May be called twice."""

    def end_overdue(self) -> float | None:
        """End what has had its time since `begin_close`; returns the seconds until then, None: nothing is left."""

    def close(self) -> int | None:
        """End the line; returns the exit code as `wait_end`. May be called twice."""


class PipedLine:
    """Line through the stdin and stdout of a client process, which is the line's to end.

    Args:
        process: the client, with pipes for stdin, stdout and stderr.
        loop: waits for it.
    """

    def __init__(self, process: subprocess.Popen[bytes], loop: LauncherLoop) -> None:
        self._process, self._loop = process, loop
        self._greeting_parser = GreetingParser()
        self._stderr: deque[bytes] = deque(maxlen=64)
        self._pipes: MessagePipes[AgentRequest, AgentReply] | None = None
        #: When the client process has had its time to end by itself; None: it has not been asked to.
        self._kill_at: float | None = None

    def open(self, on_reply: Callable[[AgentReply], None], on_end: Callable[[str], None]) -> None:
        process = self._process
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        os.set_blocking(process.stderr.fileno(), False)
        self._loop.watch(process.stderr, self._read_stderr)
        descriptors = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdout.close()
        process.stdin.close()
        self._pipes = MessagePipes(
            self._loop, descriptors, (REQUEST_CODEC, REPLY_CODEC), on_reply, on_end, self._greeting_parser
        )

    def send(self, request: AgentRequest) -> None:
        if self._pipes is not None:
            self._pipes.send(request)

    @property
    def has_pending(self) -> bool:
        return self._pipes is not None and self._pipes.has_pending

    @property
    def output(self) -> str:
        """Output of the client process and of the agent on stderr, and before the agent's greeting."""
        return (self._greeting_parser.banner + "\n" + b"".join(self._stderr).decode(errors="replace")).strip()

    def mask(self, secret: bytes) -> bytes:
        """Return the secret as it is: the engine's connection keeps it."""
        return secret

    def finish(self) -> None:
        if self._pipes is not None:
            self._pipes.finish()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_end(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._read_stderr()
        return self._process.returncode

    def begin_close(self) -> None:
        """Close stdin and stdout, and kill the client process unless it may take some time to end by itself."""
        if self._pipes is not None:
            self._pipes.close()
        if self._kill_at is None:
            end_seconds = self._process.end_seconds if isinstance(self._process, ClientProcess) else 0.0
            self._kill_at = time.monotonic() + end_seconds
            if not end_seconds and self._process.returncode is None:
                self._process.kill()

    def end_overdue(self) -> float | None:
        if self._kill_at is None or self._process.poll() is not None:
            return None
        if (left := self._kill_at - time.monotonic()) > 0:
            return left
        self._process.kill()
        return None

    def close(self) -> int | None:
        self.begin_close()
        assert self._kill_at is not None, "set by now"
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, self._kill_at - time.monotonic()))
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None and not self._process.stderr.closed:
            self._loop.unwatch(self._process.stderr)
            self._process.stderr.close()
        return self._process.returncode

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "it was asked for"
        if self._process.stderr.closed:
            return
        try:
            data = os.read(self._process.stderr.fileno(), _STDERR_BYTES)
        except BlockingIOError:
            return
        if data:
            self._stderr.append(data)
        else:
            self._loop.unwatch(self._process.stderr)


class DialedLine:
    """Line through the connection of an agent that dials back; before that, there is nothing to read.

    Args:
        loop: waits for it.
    """

    def __init__(self, loop: LauncherLoop) -> None:
        self._loop = loop
        self._handlers: tuple[Callable[[AgentReply], None], Callable[[str], None]] | None = None
        self._connection: Connection | None = None
        self._messages: MessageConnection[AgentRequest, AgentReply] | None = None

    def open(self, on_reply: Callable[[AgentReply], None], on_end: Callable[[str], None]) -> None:
        self._handlers = on_reply, on_end

    @property
    def is_connected(self) -> bool:
        """Return whether the agent has come."""
        return self._connection is not None

    def attach(self, connection: Connection) -> None:
        """Take the connection of the agent."""
        assert self._handlers is not None, "the line is open"
        self._connection = connection
        self._messages = MessageConnection(self._loop, connection, (REQUEST_CODEC, REPLY_CODEC), *self._handlers)

    def send(self, request: AgentRequest) -> None:
        if self._messages is not None:
            self._messages.send(request)

    @property
    def has_pending(self) -> bool:
        return self._messages is not None and self._messages.has_pending

    @property
    def output(self) -> str:
        """Return nothing: the agent's stderr is its engine's."""
        return ""

    def mask(self, secret: bytes) -> bytes:
        """Mask the secret: only who knows the ticket can read it."""
        assert self._connection is not None, "the agent has come"
        return self._connection.mask(secret)

    def finish(self) -> None:
        if self._messages is not None:
            self._messages.finish()

    @property
    def has_ended(self) -> bool:
        return True

    def wait_end(self, seconds: float) -> int | None:
        return None

    def begin_close(self) -> None:
        self.close()

    def end_overdue(self) -> float | None:
        return None

    def close(self) -> int | None:
        if self._messages is not None:
            self._messages.close()
        return None


class MessageConnection(Generic[_Out, _In]):
    """Messages through an authenticated connection, without ever waiting for it; as `MessagePipes` through pipes.

    Args:
        loop: waits for the connection.
        connection: owned from now on.
        codecs: of sent and of received messages.
        on_message: called with each message.
        on_end: called once, when nothing more can come, with the reason: empty where the other end has closed.
    """

    def __init__(
        self,
        loop: LauncherLoop,
        connection: Connection,
        codecs: tuple[MessageCodec[_Out], MessageCodec[_In]],
        on_message: Callable[[_In], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop, self._connection = loop, connection
        self._encode, self._decode = codecs[0].encode, codecs[1].decode
        self._on_message, self._on_end = on_message, on_end
        self._is_open = self._is_writable = True
        self._watch()
        loop.call_at(0.0, self._read)  # what has come before

    def send(self, message: _Out) -> None:
        """Send a message. A connection that has ended is noticed by reading, not here."""
        if self._is_writable and self._is_open:
            self._connection.post(self._encode(message))
            self._flush()

    def finish(self) -> None:
        """Send no more; the other side reads the end when it has everything. May be called twice."""
        self._is_writable = False
        if self._is_open:
            self._flush()

    def close(self) -> None:
        """End the connection. May be called twice."""
        self._is_writable = False
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self._connection)
            self._connection.close()

    @property
    def has_pending(self) -> bool:
        """Return whether something that was sent has not been written."""
        return self._is_open and bool(self._connection.num_unsent_bytes)

    def _watch(self) -> None:
        self._loop.watch(self._connection, self._read, self._flush if self._connection.num_unsent_bytes else None)

    def _read(self) -> None:
        if not self._is_open:
            return
        messages, end = self._receive()
        for message in messages:
            if self._is_open:
                self._on_message(message)
        if end is not None and self._is_open:
            self._end(end)

    def _receive(self) -> tuple[list[_In], str | None]:
        """Return the messages that have come, and why nothing comes after them; None: more may."""
        messages: list[_In] = []
        try:
            messages.extend(map(self._decode, self._connection.read()))
        except OSError as error:
            is_end = error.errno in {None, errno.ECONNRESET, errno.EPIPE}  # a process that was killed
            return messages, "" if is_end else str(error.strerror)
        except (AuthenticationError, WireError) as error:
            return messages, str(error)
        return messages, None

    def _flush(self) -> None:
        try:
            is_all = self._connection.flush()
            if is_all and not self._is_writable:
                self._connection.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._is_writable = False  # reading tells why
            self._loop.watch(self._connection, self._read)
            return
        self._watch()

    def _end(self, reason: str) -> None:
        self.close()
        self._on_end(reason)
