"""Worker of an elastic job with servers, which writes down, outside of the job, what is pushed and acknowledged.

Arguments: a directory, the type of the store, and perhaps behind how many pushes all meet at a barrier. It pushes whole
numbers that follow from its place, its process and the push's number, until there is a file ``stop``; then it waits for
the others, and writes what the keys have. Where there are barriers, ``stop`` has the number of pushes of each. A file
``servers`` has the number of server processes that there are to be: rank 0 says so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import reigen.kv
from reigen import optim

#: A key on one server, and one that is cut: by name, the number of elements.
KEYS = {"small": 100, "cut": 5000}


def push_of(slot: int, incarnation: int, number: int) -> dict[str, np.ndarray]:
    """What a process pushes: sums of several of them say which ones they are of."""
    chance = np.random.default_rng([slot, incarnation, number])
    return {key: chance.integers(-(1 << 30), 1 << 30, size).astype(np.float64) for key, size in KEYS.items()}


def main() -> None:
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    slot, incarnation = int(os.environ["REIGEN_SLOT"]), int(os.environ["REIGEN_INCARNATION"])
    ledger = os.open(directory / f"{slot}.{incarnation}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def write(*words: object) -> None:
        os.write(ledger, (" ".join(map(str, words)) + "\n").encode())

    every = int(sys.argv[3]) if len(sys.argv) > 3 else 0

    def is_over(number: int) -> bool:
        stop = directory / "stop"
        return stop.exists() and number >= int(stop.read_text() or 0)

    write("pid", os.getpid())
    if os.environ.get("DIES_FIRST") == f"{slot}.{incarnation}":
        os.kill(os.getpid(), signal.SIGKILL)
    store = reigen.kv.create(kind)
    store.set_optimizer(optim.create("test"))
    out = {key: np.empty(size) for key, size in KEYS.items()}
    store.init(list(KEYS), [np.full(size, 7.0) for size in KEYS.values()])  # those of the first workers count
    store.pull(list(KEYS), out=list(out.values()))
    number, num_servers = 0, ""
    while not is_over(number):
        number += 1
        write("pushes", number)
        values = push_of(slot, incarnation, number)
        store.pushpull(list(KEYS), list(values.values()), out=list(out.values()))
        write("acknowledged", number, store.rounds("cut"), store.rank, store.num_workers, time.monotonic())
        servers = directory / "servers"
        if store.rank == 0 and servers.exists() and (text := servers.read_text()) != num_servers:
            num_servers = text
            store.resize_servers(int(text))
        if every and number % every == 0:
            store.barrier()
            write("met", number, time.monotonic())
    store.leave()
    store.barrier()
    store.pull(list(KEYS), out=list(out.values()))
    np.savez(directory / f"{slot}.{incarnation}.npz", **out)
    write("done", store.num_workers)
    store.barrier()


if __name__ == "__main__":
    main()
