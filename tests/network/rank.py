"""A rank of a job on stand-in machines, which tells what happens to it: a JSON object a line.

``rank.py NUM_BYTES [NUM_STEPS [idle | broadcast]]``: sums of so many bytes, until one fails or so many are done; every
result is checked. Then ``idle``: it waits until a line is written to its standard input, and sums once more;
``broadcast``: as many bytes of rank 0.
The variable OLD_PROTOCOL lets it speak the handshake of the version before, LEAVE_AFTER end after so many sums.
"""

from __future__ import annotations

import itertools
import json
import os
import sys

import numpy as np

import reigen
from reigen.errors import CollectiveError, ReigenError
from reigen.net import auth


def tell(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def sums(num_bytes: int, num_steps: int | None) -> None:
    rank, size = reigen.rank(), reigen.size()
    for step in itertools.count() if num_steps is None else range(num_steps):
        total = reigen.allreduce(np.full(num_bytes // 4, rank + step, np.float32), op=reigen.Sum, name="sum")
        expected = size * (size - 1) / 2 + size * step
        assert (total == expected).all(), f"step {step}: {total[total != expected][:3]} instead of {expected}"
        tell("step", number=step)


def main(num_bytes: str, num_steps: str | None = None, then: str | None = None) -> int:
    if "OLD_PROTOCOL" in os.environ:
        auth._MAGIC = b"RGN1"
    try:
        reigen.init()
        tell("ready", rank=reigen.rank(), backend=reigen.context.current().backend_reason)
        limit = os.environ.get("LEAVE_AFTER", num_steps)
        sums(int(num_bytes), None if limit is None else int(limit))
        if then == "idle":
            sys.stdin.readline()
            sums(int(num_bytes), 1)
        elif then == "broadcast":
            data = np.arange(int(num_bytes) // 4, dtype=np.float32)
            mine = data if reigen.rank() == 0 else np.zeros_like(data)
            assert (reigen.broadcast(mine, 0, name="last") == data).all()
        reigen.shutdown()
    except ReigenError as error:
        ranks = error.ranks if isinstance(error, CollectiveError) else ()
        tell("error", kind=type(error).__name__, text=str(error), ranks=ranks)
        reigen.shutdown()
        return 3
    tell("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
