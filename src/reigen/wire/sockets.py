"""What every TCP connection of a job has in common: when its peer counts as gone, and how that is told."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_MOST_PROBES = 3
#: Of struct tcp_info (linux/tcp.h): tcpi_unacked; in ms tcpi_last_data_sent, tcpi_last_data_recv, tcpi_last_ack_recv.
_SIGNS = struct.Struct("@24xI16xI4xII")
#: tcpi_bytes_received.
_ARRIVED = struct.Struct("@128xQ")
#: tcpi_min_rtt in microseconds, and what that is before the first one was measured.
_ROUND_TRIP = struct.Struct("@148xI")
_UNKNOWN_ROUND_TRIP = (1 << 32) - 1
_MOST_WINDOW_BYTES = 1 << 30


def keepalive(connection: socket.socket, peer_timeout_seconds: float, *, bulk: bool = False) -> None:
    """Have the kernel end a connection when nothing comes from the peer's machine for ``peer_timeout_seconds``.

    That is how a machine is noticed that lost its power or its network: nothing arrives from it, not even that the
    connection is over. A process that is merely stopped or busy still has a kernel that answers: for those there are
    deadlines. Every later call on the connection fails then; `lost` makes a ConnectionError of it.

    Idle connections are probed (SO_KEEPALIVE). Data that nobody acknowledges is waited for that long, too
    (TCP_USER_TIMEOUT), but not on a connection for bulk data: with that option Linux also ends a connection whose peer
    does not read (its window stays closed), and a rank that is late with reading is alive. Who waits for bulk data asks
    `silent_seconds` instead.

    Args:
        connection: of TCP.
        peer_timeout_seconds: the kernel counts whole seconds, and at least 2.
        bulk: the peer may leave more unread than its kernel buffers.
    """
    seconds = max(2, int(peer_timeout_seconds))
    interval = max(1, seconds // (_MOST_PROBES + 2))
    probes = max(1, min(_MOST_PROBES, (seconds - 1) // interval))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds - probes * interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    if not bulk:
        # it replaces the number of probes; half an interval less, so that the last probe does not come just before it
        milliseconds = seconds * 1000 - interval * 500
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def silent_seconds(connection: socket.socket) -> float:
    """For how long the peer's machine has left data unacknowledged without a sign of life; 0.0 while it owes none.

    What its process does not read is acknowledged by its kernel all the same. A kernel that has no room for it answers
    and drops it; the next attempt comes later each time. So who has answered the last one owes nothing.

    Raises:
        OSError: the connection is closed.
    """
    num_unacknowledged, since_sent, since_data, since_acknowledgement = _tcp_info(connection, _SIGNS)
    since_sign = min(since_data, since_acknowledgement)
    return since_sign / 1000 if num_unacknowledged and since_sign > since_sent else 0.0


def round_trip_seconds(connection: socket.socket) -> float:
    """How long the way to the peer's kernel and back takes at least; 0.0 if nothing has come back yet.

    Raises:
        OSError: the connection is closed.
    """
    (microseconds,) = _tcp_info(connection, _ROUND_TRIP)
    return 0.0 if microseconds == _UNKNOWN_ROUND_TRIP else microseconds / 1e6


def num_arrived_bytes(connection: socket.socket) -> int:
    """How much the peer has sent that this machine's kernel has, read or not, since the beginning.

    Raises:
        OSError: the connection is closed.
    """
    (num_bytes,) = _tcp_info(connection, _ARRIVED)
    return num_bytes


def _tcp_info(connection: socket.socket, fields: struct.Struct) -> tuple[int, ...]:
    """Some fields of what the kernel knows of a connection; ``fields`` begins where struct tcp_info does."""
    return fields.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, fields.size))


def bound_window(connection: socket.socket, nbytes: int) -> None:
    """Have the peer send at most so many bytes that have not arrived here.

    What has arrived and is not read does not count: the kernel's buffer bounds that. Linux forgets the bound when it
    finds that the connection deserves a larger buffer, so it is to be said again while bytes come. What the peer has
    been allowed to send before, it may still send.

    Raises:
        OSError: the connection is closed.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, min(nbytes, _MOST_WINDOW_BYTES))


def lost(error: OSError) -> ConnectionError:
    """The error of a connection that is over, as a ConnectionError: whatever the kernel calls it."""
    if isinstance(error, ConnectionError):
        return error
    return ConnectionAbortedError(error.errno, error.strerror or os.strerror(error.errno or 0))


def ended(*, amid: bool) -> ConnectionError:
    """The error of a connection that the other end has closed; ``amid``: with a part of a message there."""
    return ConnectionResetError(f"the other end closed the connection{' in the middle of a message' if amid else ''}")


@contextlib.contextmanager
def losses_are_connection_errors() -> Iterator[None]:
    """Turn what the kernel says of a lost connection into ConnectionError; a deadline's TimeoutError passes.

    A peer that the kernel has given up is an OSError that Python calls TimeoutError, too, but one with a number.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, BlockingIOError):
            raise
        raise lost(error) from None
