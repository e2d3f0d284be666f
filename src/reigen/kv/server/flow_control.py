"""Flow control of a server by reading, so that its workers come up with each other. Pure.

Where workers are synchronous, nothing can be sent back before it has come from all of them. Connections that share a
wire do not share it fairly, so the server's other direction lies idle, and what has come early fills its memory.

That is so where there are more workers than servers: then more comes to a server than one worker sends. Otherwise the
workers' own wires are the limit, and a slow one would gain nothing from another one that waits.

First there are receive windows (`reigen.kv.receive_window`). Second, reading, for what windows leave: queues that are
shorter than them, and workers that came earlier.

a. A connection *holds* the pushes that have come over it and wait for other workers' (where they need not wait,
   because workers are not synchronous, that is nothing).
b. A connection waits while it holds `MAX_LEAD_BYTES` more than another one over which something comes.
c. It goes on when it holds less than half of that more, or when nothing comes over the others: workers may push keys in
   different orders, and nobody must wait for somebody who waits himself.
"""

from __future__ import annotations

from collections.abc import Iterable

#: What the kernels of both ends have in their buffers comes on top of it.
MAX_LEAD_BYTES = 8 << 20
#: Nothing comes over a connection that was silent for so long.
SILENT_SECONDS = 0.05


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
