"""Receive windows of connections between workers and servers, where many workers share a server's wire.

Connections that share a wire do not share it fairly: TCP leaves one of them four fifths of it for seconds. Senders that
always have as much on its way as their receiver allows have equal parts of a wire if they are allowed equal parts; and
where that is little, no queue overflows, and TCP does not slow down at all. Left to itself the kernel allows more and
more, up to the 32 MiB of net.ipv4.tcp_rmem. `ReceiveRate` measures at what rate bytes arrive over all connections
together; each may have on its way its part of what comes in `IN_FLIGHT_SECONDS` and two round trips, at the best rate
that there was. A wire needs one round trip, so windows grow with the rate until something else is the limit. They do
not shrink with it: where others fill the wire's queue, answers take longer than this allows for, smaller windows would
lower the rate, and the rate the windows.

Bytes come in bursts, one a step, and what lies between them says nothing about the wire: of a gap in which nothing
comes T = `IN_FLIGHT_SECONDS` and a round trip R count, so that a sample may be of several bursts. Where a burst takes a
time b at the wire's rate, and is measured over b + T + R, windows are (T + 2 R) b / (b + T + R) at the wire's rate: all
of the burst, and more, where b <= R, and at least R elsewhere. To count less of gaps would be wrong: within a burst a
sender of many has its turn only now and then. What has come while this process was not run is counted all at once; so
a gap counts at least for as long as those bytes take at the rate that is known, and a sample does not end amid them.
Else busy machines would have windows that overflow queues.

Both ends do that. What is acknowledged waits behind what its receiver sends, so what is on its way in one direction
makes the round trip of the other one longer. Let both directions have as much on their way as comes in a time T at the
wire's rate: then their queues and the round trip together take T, for pushes as for answers, and both wires are full.
Without a bound for answers the round trip grows to what these fill, and pushes, which are bounded, get only a part of
their wire. That is so on short ways. On a long one pushes are allowed a queue of a round trip, which is enough, and
bounds of many workers' answers, which never are quite equal, cost more than they give: workers bound answers up to a
round trip of `MAX_ANSWER_ROUND_TRIP_SECONDS`, and lift the bound where it grows beyond that.

The round trip is the shortest that the kernel has seen in a while (net.ipv4.tcp_min_rtt_wlen, five minutes): the
current one would grow with windows, and windows with it. It is read each time, so that a way that has become longer is
noticed within that time.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field

from reigen.net.sockets import MAX_WINDOW_BYTES, limit_receive_window, read_arrivals

#: Much more than hosts of one network take to answer each other, less than its queues usually hold.
IN_FLIGHT_SECONDS = 0.008
#: Workers do not bound what comes from servers that are farther away.
MAX_ANSWER_ROUND_TRIP_SECONDS = 2 * IN_FLIGHT_SECONDS
#: That much is always allowed.
MIN_WINDOW_BYTES = 1 << 17
#: After so many bytes from a peer they are counted, and its window is set: small messages pay nothing for it.
WINDOW_STEP_BYTES = 1 << 16
#: A rate is measured over so long.
SAMPLE_SECONDS = 0.05


@dataclass
class ReceiveRate:
    """Rate at which bytes come to a process, at best, in bytes a second, and from how many peers of late."""

    rate: float = 0.0
    num_senders: int = 1
    _num_bytes: int = 0
    _num_counts: int = 0
    _senders: set[int] = field(default_factory=set)
    _seconds: float = 0.0
    _counted_at: float | None = None

    def count(self, sender: int, num_bytes: int, now: float, round_trip_seconds: float = 0.0) -> None:
        """Count bytes that have arrived from a peer since its last ones were counted."""
        if self._counted_at is not None:
            gap = now - self._counted_at
            if self._seconds >= SAMPLE_SECONDS and gap * self._num_counts >= self._seconds:
                self._end_sample()
            # of all senders as much as of this one, the first after the gap
            seconds_of_bytes = num_bytes * self.num_senders / self.rate if self.rate else gap
            self._seconds += min(gap, max(IN_FLIGHT_SECONDS + round_trip_seconds, seconds_of_bytes))
            self._num_bytes += num_bytes
            self._num_counts += 1
            self._senders.add(sender)
        self._counted_at = now

    def _end_sample(self) -> None:
        self.rate = max(self.rate, self._num_bytes / self._seconds)
        self.num_senders = len(self._senders)
        self._num_bytes, self._num_counts, self._seconds = 0, 0, 0.0
        self._senders.clear()

    def window_bytes(self, round_trip_seconds: float) -> int:
        """Return how much of a peer may be on its way."""
        share = self.rate / self.num_senders
        return max(MIN_WINDOW_BYTES, int(share * (IN_FLIGHT_SECONDS + 2 * round_trip_seconds)))


class ReceiveWindow:
    """Window of one connection, which grows with the rate of all.

    Args:
        connection: of TCP, below TLS if there is any.
        sender: number of the peer.
        inflow: of this process, from all peers.
        max_round_trip_seconds: the window is the kernel's on longer ways.
    """

    def __init__(
        self, connection: socket.socket, sender: int, inflow: ReceiveRate, max_round_trip_seconds: float = math.inf
    ) -> None:
        self._connection, self._sender, self._inflow = connection, sender, inflow
        self._max_round_trip_seconds = max_round_trip_seconds
        #: when so much has been read, `bound` does something; what had arrived when it did so last
        self._next_bytes, self._num_arrived_bytes = WINDOW_STEP_BYTES, 0
        self._is_bounded = False

    def bound(self, num_read_bytes: int, now: float) -> None:
        """Limit the bytes on their way, when some have come since the last time; raises OSError where it is closed."""
        if num_read_bytes < self._next_bytes:
            return
        self._next_bytes = num_read_bytes + WINDOW_STEP_BYTES
        num_before = self._num_arrived_bytes
        self._num_arrived_bytes, round_trip_seconds = read_arrivals(self._connection)
        self._inflow.count(self._sender, self._num_arrived_bytes - num_before, now, round_trip_seconds)
        if round_trip_seconds <= self._max_round_trip_seconds:
            self._is_bounded = True
            limit_receive_window(self._connection, self._inflow.window_bytes(round_trip_seconds))
        elif self._is_bounded:
            self._is_bounded = False
            limit_receive_window(self._connection, MAX_WINDOW_BYTES)
