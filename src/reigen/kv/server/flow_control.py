"""Flow control of a server, by windows and by reading, so that its workers come up with each other. Pure.

Where workers are synchronous, nothing can be sent back before it has come from all of them. Connections that share a
wire do not share it fairly: TCP leaves one of them four fifths of it for seconds. So the server's other direction lies
idle, and what has come early fills its memory.

That is so where there are more workers than servers: then more comes to a server than one worker sends. Otherwise the
workers' own wires are the limit, and a slow one would gain nothing from another one that waits.

First, windows. Senders that always have as much on its way as their receiver allows have equal parts of a wire if they
are allowed equal parts; and where that is little, no queue overflows, and TCP does not slow down at all. Left to itself
the kernel allows more and more, up to the 32 MiB of net.ipv4.tcp_rmem. `ReceiveRate` measures at what rate bytes arrive
from all workers together; each may have on its way its part of what comes in `IN_FLIGHT_SECONDS` and two round trips,
at the best rate that there was. A wire needs one round trip, so windows grow with the rate until something else is the
limit. They do not shrink with it: where others fill the wire's queue, answers take longer than this allows for, smaller
windows would lower the rate, and the rate the windows.

Second, reading, for what windows leave: queues that are shorter than them, and workers that came earlier.

a. A connection *holds* the pushes that have come over it and wait for other workers' (where they need not wait,
   because workers are not synchronous, that is nothing).
b. A connection waits while it holds `MAX_LEAD_BYTES` more than another one over which something comes.
c. It goes on when it holds less than half of that more, or when nothing comes over the others: workers may push keys in
   different orders, and nobody must wait for somebody who waits himself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: What the kernels of both ends have in their buffers comes on top of it.
MAX_LEAD_BYTES = 8 << 20
#: Nothing comes over a connection that was silent for so long.
SILENT_SECONDS = 0.05

#: Much more than hosts of one network take to answer each other, less than its queues usually hold.
IN_FLIGHT_SECONDS = 0.008
#: That much is always allowed.
MIN_WINDOW_BYTES = 1 << 17
#: After so many bytes from a worker they are counted, and its window is set: small messages pay nothing for it.
WINDOW_STEP_BYTES = 1 << 16
#: A rate is measured over so long.
SAMPLE_SECONDS = 0.05


@dataclass
class ReceiveRate:
    """Rate at which bytes come to a server, at best, in bytes a second, and from how many workers of late."""

    rate: float = 0.0
    num_senders: int = 1
    _num_bytes: int = 0
    _senders: set[int] = field(default_factory=set)
    _since: float = 0.0

    def count(self, sender: int, num_bytes: int, now: float) -> None:
        """Count bytes that have arrived from a worker."""
        self._num_bytes += num_bytes
        self._senders.add(sender)
        if (elapsed := now - self._since) >= SAMPLE_SECONDS:
            self.rate = max(self.rate, self._num_bytes / elapsed)
            self.num_senders = len(self._senders)
            self._num_bytes, self._since = 0, now
            self._senders.clear()

    def window_bytes(self, round_trip_seconds: float) -> int:
        """Return how much of a worker may be on its way."""
        share = self.rate / self.num_senders
        return max(MIN_WINDOW_BYTES, int(share * (IN_FLIGHT_SECONDS + 2 * round_trip_seconds)))


def should_pause(held_bytes: int, others: Iterable[tuple[int, float]], *, waits: bool, now: float) -> tuple[bool, str]:
    """Return whether a connection waits, and the reason; ``waits``: it does already.

    ``others``: of the other connections of the store, the bytes that each holds, and when something came over it last.
    """
    busy = [held for held, heard_at in others if now - heard_at < SILENT_SECONDS]
    if not busy:
        return False, "nothing comes from other workers"
    ahead = held_bytes - min(busy)
    limit = MAX_LEAD_BYTES // 2 if waits else MAX_LEAD_BYTES
    return ahead > limit, f"{ahead} bytes ahead of another worker, up to {limit} are allowed"
