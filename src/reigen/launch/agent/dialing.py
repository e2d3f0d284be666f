"""Agent's end of dial-back (`launch.agent.dial_back`): reads the dial text, and connects until it is taken in."""

from __future__ import annotations

import math
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from reigen._version import __version__
from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import AuthenticationError, ConfigError, LaunchError, WireError
from reigen.files import privacy_problem
from reigen.launch.agent.agent_protocol import MAX_FRAME_BYTES
from reigen.launch.agent.dial_back import DIAL_PURPOSE, DialGreeting, DialText, decode_dial_text, identify_machine
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, open_connection
from reigen.net.event_loop import wait_ready

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: Limit of a dial text.
_MAX_TEXT_BYTES = 1 << 16
#: Seconds that one attempt may take, between two attempts, and between lines about them.
_ATTEMPT_SECONDS, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _NOTICE_SECONDS = 10.0, 0.05, 1.0, 30.0


def read_dial_text(descriptor: int, name: str = "") -> DialText:
    """Read the first line of a descriptor, or the one that begins with ``name``; nothing behind it is read.

    Raises:
        LaunchError: it ends before, or holds something else.
    """
    while line := _read_line(descriptor):
        if not name:
            return _decode(line)
        found, _, text = line.partition(b" ")
        if found.decode(errors="replace") == name:
            return _decode(text)
    raise LaunchError(f"stdin has ended before the dial text came{name and ' for '}{name}")


def _read_line(descriptor: int) -> bytearray:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= _MAX_TEXT_BYTES:
        piece = os.read(descriptor, 1)
        if not piece:
            break
        line += piece
    return line


def read_dial_file(path: str) -> DialText:
    """Read a dial text from a file that is this user's alone.

    Raises:
        LaunchError: there is none, others may read it, or it holds something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"--dial {path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise LaunchError(f"--dial {path}: it is no file")
        if problem := privacy_problem(status):
            raise LaunchError(f"--dial {path}: {problem}: chmod 600")
        return _decode(os.read(descriptor, _MAX_TEXT_BYTES))
    finally:
        os.close(descriptor)


def _decode(line: bytes | bytearray) -> DialText:
    try:
        return decode_dial_text(line.decode("ascii", "replace"))
    except WireError as error:
        raise LaunchError(str(error)) from None


def dial(
    text: DialText, report: Callable[[str], None], stdin: int | None = None, num_slots: int | None = None
) -> Connection:
    """Connect to the launcher, and return the connection when it has taken this agent in.

    From the moment it has greeted, it may have used its ticket, and waits for the answer: only where the connection is
    closed without one does it try again, for a launcher that takes an agent in says so first.

    Args:
        text: the dial text.
        report: told each half minute what is waited for.
        stdin: where its end means that this process is to end, too; None: nowhere.
        num_slots: the slots of this host, where the launcher does not know them.

    Raises:
        LaunchError: nobody was there in time, or the launcher refuses this agent.
    """
    begin = time.monotonic()
    deadline, next_notice = begin + text.timeout_seconds, begin + _NOTICE_SECONDS
    pause, reason = _FIRST_PAUSE_SECONDS, "there was no time"
    while (now := time.monotonic()) < deadline:
        if now >= next_notice:
            next_notice += _NOTICE_SECONDS
            report(f"waiting for the launcher at {', '.join(text.addresses)} since {now - begin:.0f} s: {reason}")
        num_refused = 0
        for address in text.addresses:
            try:
                connection = _greet(address, text, min(deadline, time.monotonic() + _ATTEMPT_SECONDS), num_slots)
                return _await_answer(connection, stdin, deadline)
            except (OSError, UnicodeError, AuthenticationError, WireError) as error:
                reason = _describe(error)
                num_refused += isinstance(error, ConnectionRefusedError)
        if text.gathers and text.is_listening and num_refused == len(text.addresses):
            raise LaunchError(f"the launcher at {', '.join(text.addresses)} has gone: the job is over")
        _pause(min(pause, max(0.0, deadline - time.monotonic())), stdin)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    raise LaunchError(
        f"the launcher at {', '.join(text.addresses)} was not there within {text.timeout_seconds:g} s: {reason}"
    )


def wait_for_call(stdin: int | None, connection: Connection, deadline: float | None = None) -> None:
    """Wait until something comes through a connection.

    Raises:
        LaunchError: stdin has ended before that.
        TimeoutError: nothing has come by the deadline.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if stdin is not None:
        poll.register(stdin, select.POLLIN)
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = [descriptor for descriptor, _ in poll.poll(None if left is None else math.ceil(1000 * left))]
        if connection.fileno() in ready:
            return
        if left == 0.0:
            raise TimeoutError("timed out")
        if stdin is not None and stdin in ready:
            _read_stdin(stdin)


def _greet(address: str, text: DialText, deadline: float, num_slots: int | None) -> Connection:
    """Connect, prove the ticket, and send the greeting."""
    me = Identity(ProcessRole.AGENT, text.number, DIAL_PURPOSE)
    connection = open_connection(
        split_address(address), bytes.fromhex(text.ticket), me, MAX_FRAME_BYTES, deadline, _make_tls(text)
    )
    try:
        connection.keep_alive(text.peer_timeout_seconds)
        greeting = DialGreeting(__version__, sys.executable, socket.gethostname(), identify_machine(), num_slots)
        connection.send(msgspec.json.encode(greeting), deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _await_answer(connection: Connection, stdin: int | None, deadline: float) -> Connection:
    """Wait for the answer to the greeting; returns the connection.

    Raises:
        LaunchError: the launcher refuses this agent, or there is no answer; the ticket may have been used.
        ConnectionError: the launcher has closed the connection without an answer: the ticket has not been used.
    """
    try:
        wait_for_call(stdin, connection, deadline)
        if refusal := connection.receive(deadline):  # and no more: what follows is for others to read
            raise LaunchError(f"the launcher refuses this agent: {refusal.decode(errors='replace')}")
    except BaseException as error:
        connection.close()
        is_closed = isinstance(error, ConnectionResetError | BrokenPipeError)
        if isinstance(error, OSError | AuthenticationError | WireError) and not is_closed:
            raise LaunchError(f"the launcher has not answered this agent's greeting: {_describe(error)}") from None
        raise
    return connection


def _make_tls(text: DialText) -> TlsContext | None:
    if not text.tls:
        return None
    from reigen.net.tls import TlsContext

    try:
        return TlsContext()
    except ConfigError as error:
        raise LaunchError(str(error)) from None


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


def _pause(seconds: float, stdin: int | None) -> None:
    """Wait before the next attempt; raises LaunchError where stdin has ended."""
    if stdin is None:
        time.sleep(seconds)
    elif wait_ready(stdin, seconds):
        _read_stdin(stdin)


def _read_stdin(stdin: int) -> None:
    """Read what has come on stdin, which means nothing; raises LaunchError where it has ended."""
    try:
        data = os.read(stdin, 1 << 12)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    if not data:
        raise LaunchError("the process that has started this agent has ended")
