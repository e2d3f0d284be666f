"""Which workers a server does not listen to for a moment, so that those behind come up with them. Pure.

Where workers are synchronous, nothing can be sent back before it has come from all of them. Connections that share a
wire do not share it fairly: TCP leaves one of them four fifths of it for seconds. So the server's other direction lies
idle, and what has come early fills its memory. A server that does not read slows the sender down, and the wire is left
to the others.

That is so where there are more workers than servers: then more comes to a server than one worker sends. Otherwise the
workers' own wires are the limit, and whoever is behind would gain nothing from another one that waits.

a. What a connection *holds* is the pushes that have come over it and wait for other workers' (where they need not wait,
   because workers are not synchronous, that is nothing).
b. A connection waits while it holds `AHEAD_BYTES` more than another one over which something comes.
c. It goes on when it holds less than half of that more, or when nothing comes over the others: workers may push keys in
   different orders, and nobody must wait for somebody who waits himself.
"""

from __future__ import annotations

from collections.abc import Iterable

#: What the kernels of both ends have in their buffers comes on top of it.
AHEAD_BYTES = 8 << 20
#: Nothing comes over a connection that was silent for so long.
SILENT_SECONDS = 0.05


def must_wait(held_bytes: int, others: Iterable[tuple[int, float]], *, waits: bool, now: float) -> tuple[bool, str]:
    """Whether a connection waits, and the reason.

    Args:
        held_bytes: what it holds.
        others: of the other connections of the same store, what each holds, and when something came over it last.
        waits: whether it waits already.
        now: on the same clock.
    """
    busy = [held for held, heard_at in others if now - heard_at < SILENT_SECONDS]
    if not busy:
        return False, "nothing comes from other workers"
    ahead = held_bytes - min(busy)
    limit = AHEAD_BYTES // 2 if waits else AHEAD_BYTES
    return ahead > limit, f"{ahead} bytes ahead of another worker, up to {limit} are allowed"
