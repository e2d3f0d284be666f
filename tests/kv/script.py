"""A user's script with a distributed store, started for all roles: a worker does what it is told, a line of stdin each.

    begin [RATE DTYPE SIZE ...] | step N | push N | pull | rounds | barrier | dead | fail | fork | close

Each is answered with a line of JSON. Without `close`, the store is closed by the end of the script.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from reigen import kv, optim
from reigen.errors import CollectiveError, ReigenError


def main() -> None:
    try:
        store = kv.create(os.environ.get("STORE", "dist_sync"))
    except ReigenError as error:
        say(told(error))
        raise
    say({"rank": store.rank, "workers": store.num_workers, "recovers": store.is_recovery})
    program = Program(store)
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            say(getattr(program, name)(*arguments))
        except ReigenError as error:
            say(told(error))


class Program:
    def __init__(self, store: kv.KVStore) -> None:
        self.store = store
        self.values: list[np.ndarray[Any, Any]] = []
        self.outs: list[np.ndarray[Any, Any]] = []

    def begin(self, rate: str = "1", dtype: str = "float32", *sizes: str) -> str:
        self.store.set_optimizer(optim.create("test", rescale_grad=float(rate)))
        shapes = [int(size) for size in sizes] or [5, 10_007]
        self.values = [np.full(size, self.store.rank + 1, dtype) for size in shapes]
        self.outs = [np.empty(size, dtype) for size in shapes]
        self.store.init(self.keys, [np.ones(size, dtype) for size in shapes])
        return "done"

    @property
    def keys(self) -> list[int]:
        return list(range(len(self.values)))

    def step(self, times: str) -> object:
        for _ in range(int(times)):
            self.store.pushpull(self.keys, self.values, self.outs)
        return self.held()

    def push(self, times: str) -> str:
        for _ in range(int(times)):
            self.store.push(self.keys, self.values)
        return "done"

    def pull(self) -> object:
        self.store.pull(self.keys, self.outs)
        return self.held()

    def held(self) -> object:
        return sorted({float(each) for out in self.outs for each in (out.min(), out.max())})

    def rounds(self) -> int:
        return min(self.store.rounds(key) for key in self.keys)

    def barrier(self) -> str:
        self.store.barrier()
        return "done"

    def dead(self) -> int:
        return self.store.num_dead_nodes()

    def fail(self) -> None:
        raise RuntimeError("the script has a bug")

    def fork(self) -> str:
        """A child that outlives this process, as those of data loaders may."""
        if not os.fork():
            sys.stdin.read()
            os._exit(0)
        return "done"

    def close(self) -> str:
        self.store.close()
        return "done"


def told(error: ReigenError) -> dict[str, Any]:
    ranks = error.ranks if isinstance(error, CollectiveError) else ()
    return {"error": type(error).__name__, "text": str(error), "ranks": ranks}


def say(what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


if __name__ == "__main__":
    main()
