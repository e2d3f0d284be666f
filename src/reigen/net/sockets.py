"""Socket options of every TCP connection of a job: keepalive, retransmission, and the errors of lost peers."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import struct
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

#: linux/tcp.h; the module socket does not name them. The second one: since Linux 6.15.
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
#: What Linux accepts.
_LEAST_RTO_MAX_MS, _MOST_RTO_MAX_MS = 1000, 120_000
#: More do not make a false loss any less likely than everything else that can go wrong.
_ENOUGH_PROBES = 15
#: Of struct tcp_info (linux/tcp.h): tcpi_unacked; in ms tcpi_last_data_sent, tcpi_last_data_recv, tcpi_last_ack_recv;
#: tcpi_segs_in.
_ACK_FIELDS = struct.Struct("@24xI16xI4xII80xI")
#: tcpi_state, and those in which something may still be sent (TCP_ESTABLISHED, TCP_CLOSE_WAIT).
_STATE, _OPEN = struct.Struct("@B"), (1, 8)
#: tcpi_bytes_received; tcpi_min_rtt in microseconds, and what that is before the first one was measured.
_ARRIVALS = struct.Struct("@128xQ12xI")
_UNKNOWN_ROUND_TRIP = (1 << 32) - 1
#: The largest window that TCP's header can say: with that one as the limit, the kernel's own is in force.
MAX_WINDOW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class KeepalivePlan:
    """Times of the kernel's probes of an idle peer, in the whole seconds that it counts.

    The first of ``num_probes`` is sent ``idle_seconds`` after the peer's last answer, and the connection is over
    ``interval_seconds`` after the last one. Let a packet be lost with probability p. A probe is in vain if it is lost
    or its answer is, q = 1 - (1-p)^2; all of them are with probability q^num_probes; each of the two ends begins anew
    not sooner than ``idle_seconds`` after an answer. So a connection whose hosts are both up is given up at most
    2 * 3600 / idle_seconds * q^num_probes times an hour. With the default of 20 s, that is 4 s and 16 probes:

    ==== ======= ================
    p    q       losses per hour
    ==== ======= ================
    1 %  0.0199  1e-24
    5 %  0.0975  1e-13
    10 % 0.19    5e-9
    30 % 0.51    0.04
    ==== ======= ================

    At 5 %, 10 s (2 s, 8 probes) make it 3e-5, 5 s (1 s, 4 probes) 0.7, and 3 s (1 s, 2 probes) 70: less than ten
    seconds are for networks that lose next to nothing. ``benchmarks/packet_loss.py`` measures it.
    """

    idle_seconds: int
    interval_seconds: int
    num_probes: int

    @classmethod
    def of(cls, peer_timeout_seconds: float) -> Self:
        """Return as many probes as the time allows, up to a bound.

        Example:
            >>> KeepalivePlan.of(20.0)
            KeepalivePlan(idle_seconds=4, interval_seconds=1, num_probes=16)
        """
        seconds = max(2, int(peer_timeout_seconds))
        left = seconds - max(1, seconds // 5)
        interval = max(1, left // _ENOUGH_PROBES)
        return cls(seconds - left // interval * interval, interval, left // interval)

    @property
    def user_timeout_ms(self) -> int:
        """TCP_USER_TIMEOUT, which replaces the number of probes.

        It is half an interval less than all, so that the last probe does not come just before it.
        """
        return (self.idle_seconds + self.interval_seconds * self.num_probes) * 1000 - self.interval_seconds * 500


def set_keepalive(connection: socket.socket, peer_timeout_seconds: float, *, bulk: bool = False) -> None:
    """Have the kernel end a connection when nothing comes from the peer's host for ``peer_timeout_seconds``.

    That detects a host that lost its power or its network: nothing arrives from it, not even that the
    connection is over. A process that is merely stopped or busy still has a kernel that answers: for those there are
    deadlines. Every later call on the connection fails then; `as_connection_error` makes a ConnectionError of it.

    Idle connections are probed (SO_KEEPALIVE), see `KeepalivePlan`. Data that is not acknowledged is waited for that
    long, too (TCP_USER_TIMEOUT), but not on a connection for bulk data: with that option Linux also ends a connection
    whose peer does not read (its window stays closed), and a rank that is late with reading is alive. Who waits for
    bulk data asks `AckMonitor` instead.

    Such data is sent again and again, but Linux waits twice as long each time: seven transmissions within 20 s, all of
    which are in vain for one in 1e7 messages at 5 % loss (q^7). That is not rare enough. With
    `bound_retransmit_backoff` there are twelve (q^12 = 7e-13), and from Linux 6.15 on they are never more than a second
    apart (TCP_RTO_MAX_MS), which makes it 22 at least (q^22 = 6e-23; at 30 % loss 4e-7).

    Of bulk data only Linux counts the attempts, which gives up after fifteen (net.ipv4.tcp_retries2). They are at
    most an eighth of the time apart: together that is more than ``peer_timeout_seconds``, and a stall ends soon when
    packets come through.

    Args:
        connection: of TCP.
        peer_timeout_seconds: the kernel counts whole seconds, and at least 2.
        bulk: the peer may leave more unread than its kernel buffers.
    """
    plan = KeepalivePlan.of(peer_timeout_seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, plan.idle_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, plan.interval_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, plan.num_probes)
    if bulk:
        _bound_retransmission_timeout(connection, peer_timeout_seconds / 8)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, plan.user_timeout_ms)
        bound_retransmit_backoff(connection)


def bound_retransmit_backoff(connection: socket.socket) -> None:
    """Have the kernel repeat unacknowledged data without waiting twice as long each time.

    Where less than four packets are under way, it waits no longer the first six times (TCP_THIN_LINEAR_TIMEOUTS): with
    the 0.2 s that Linux waits at least, that makes twelve transmissions within 20 s. Linux knows that from what
    congestion control says of losses; bbr says nothing. Later it waits a second at most, from Linux 6.15 on
    (TCP_RTO_MAX_MS). Handshakes have deadlines, too, so this is said before them; `set_keepalive` says it as well.
    """
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
    _bound_retransmission_timeout(connection, 0.0)


def _bound_retransmission_timeout(connection: socket.socket, seconds: float) -> None:
    """At most so long, within the bounds of Linux; nothing happens before 6.15, where it is 120 s."""
    milliseconds = int(min(max(seconds * 1000, _LEAST_RTO_MAX_MS), _MOST_RTO_MAX_MS))
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, milliseconds)


def retransmit_after_close(connection: socket.socket) -> None:
    """Have the kernel deliver the rest of bulk data although the process that sent it may have gone.

    It gives up a connection that no process holds any more once it waits as long as it may between two attempts.
    """
    _bound_retransmission_timeout(connection, math.inf)


def wait_until_delivered(connection: socket.socket, seconds: float) -> None:
    """Wait until the peer's host has all that was sent, the connection is over, or the host has been silent so long.

    Closing a connection on which something has come that was not read throws away what has not arrived. Silence before
    the call counts, but for that of a peer that is merely idle (`KeepalivePlan.idle_seconds`).
    """
    begin, silence, pause = time.monotonic(), -1.0, 0.0005
    while connection.fileno() >= 0:
        if not num_undelivered_bytes(connection) or _tcp_info(connection, _STATE)[0] not in _OPEN:
            return
        if silence < 0:
            silence = max(0.0, silent_seconds(connection) - KeepalivePlan.of(seconds).idle_seconds)
        if time.monotonic() - begin >= seconds - silence:
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def num_undelivered_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that were sent and that the peer's kernel has not acknowledged.

    Raises:
        OSError: the connection is closed.
    """
    (num_left,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(num_left)


class AckMonitor:
    """Clock of how long the peer's host has left data unacknowledged without a sign of life.

    What its process does not read is acknowledged by its kernel all the same. A kernel that has no room for it answers
    and drops it; the next attempt comes later each time. So who has answered the last one owes nothing.

    Whatever arrives is a sign of life, too, such as the peer's own probes of a connection that is idle for it
    (`set_keepalive`): where packets are lost, an answer to this end's few attempts is not all that can arrive.

    One object watches one connection. It takes what has arrived since it was last asked to have arrived now.
    """

    def __init__(self) -> None:
        self._num_arrived, self._arrived_at = -1, 0.0

    def seconds(self, connection: socket.socket) -> float:
        """For how long now; 0.0 while it owes nothing.

        Raises:
            OSError: the connection is closed.
        """
        signs = _tcp_info(connection, _ACK_FIELDS)
        num_unacknowledged, since_sent, since_data, since_acknowledgement, num_arrived = signs
        now = time.monotonic()
        if num_arrived != self._num_arrived:
            self._num_arrived, self._arrived_at = num_arrived, now
        since_sign = min(since_data, since_acknowledgement)
        if not num_unacknowledged or since_sign <= since_sent:
            return 0.0
        return min(since_sign / 1000, now - self._arrived_at)


def silent_seconds(connection: socket.socket) -> float:
    """Return for how long nothing has come from the peer's kernel: no data, no acknowledgement, no answer to a probe.

    Raises:
        OSError: the connection is closed.
    """
    _, _, since_data, since_acknowledgement, _ = _tcp_info(connection, _ACK_FIELDS)
    return min(since_data, since_acknowledgement) / 1000


def read_arrivals(connection: socket.socket) -> tuple[int, float]:
    """Return how much of the peer's data this host's kernel has, read or not, since the beginning; and the round trip.

    That is the shortest one to the peer's kernel in the last five minutes (net.ipv4.tcp_min_rtt_wlen), in seconds; 0.0
    if none was measured yet.

    Raises:
        OSError: the connection is closed.
    """
    num_bytes, microseconds = _tcp_info(connection, _ARRIVALS)
    return num_bytes, 0.0 if microseconds == _UNKNOWN_ROUND_TRIP else microseconds / 1e6


def _tcp_info(connection: socket.socket, fields: struct.Struct) -> tuple[int, ...]:
    """Return some fields of struct tcp_info; ``fields`` begins where that does."""
    return fields.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, fields.size))


def limit_receive_window(connection: socket.socket, nbytes: int) -> None:
    """Have the peer send at most so many bytes that have not arrived here.

    What has arrived and is not read does not count: the kernel's buffer bounds that. Linux forgets the bound when it
    finds that the connection deserves a larger buffer, so it is to be said again while bytes come. What the peer has
    been allowed to send before, it may still send.

    Raises:
        OSError: the connection is closed.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, min(nbytes, MAX_WINDOW_BYTES))


def as_connection_error(error: OSError) -> ConnectionError:
    """The error of a connection that is over, as a ConnectionError: whatever the kernel calls it."""
    if isinstance(error, ConnectionError):
        return error
    return ConnectionAbortedError(error.errno, error.strerror or os.strerror(error.errno or 0))


@contextlib.contextmanager
def translate_connection_losses() -> Iterator[None]:
    """Turn the kernel's errors of a lost connection into ConnectionError; a deadline's TimeoutError passes.

    A peer that the kernel has given up is an OSError that Python calls TimeoutError, too, but one with a number.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, BlockingIOError):
            raise
        raise as_connection_error(error) from None
