"""A worker that makes the calls that it is told to, a line of stdin each, and says how long each took: for tests.

Each is answered with a line of JSON: seconds, and the error that it raised, if any.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from reigen import kv, optim
from reigen.errors import ReigenError
from reigen.kv.values import RowSparse


def main() -> None:
    store = kv.create("dist_sync")
    value, out = np.ones(3, np.float32), np.empty(3, np.float32)
    rows = RowSparse([0], np.ones((1, 2), np.float32), (4, 2))
    path, seconds = os.environ["STATES"], float(os.environ["REIGEN_DEADLINE"])
    calls = {
        "prepare": lambda: (
            store.set_optimizer(optim.create("sgd", momentum=0.9)),
            store.init(["w", "rows"], [value, rows]),
            store.pushpull("w", value),
            store.save_optimizer_states(path),
        ),
        "init": lambda: store.init(str(time.monotonic()), value),
        "push, wait": lambda: store.push("w", value).wait(),
        "push, wait for all": lambda: (store.push("w", value), store.wait()),
        "pull": lambda: store.pull("w", out),
        "pull of all rows": lambda: store.pull("rows", [rows, rows], ignore_sparse=False),
        "pushpull": lambda: store.pushpull("w", value, out),
        "broadcast": lambda: store.broadcast(str(time.monotonic()), value, out),
        "row_sparse_pull": lambda: store.row_sparse_pull(["rows"] * 2, [rows, rows], row_ids=[[0], [1]]),
        "set_optimizer": lambda: store.set_optimizer(optim.create("sgd", momentum=0.9)),
        "set_gradient_compression": lambda: store.set_gradient_compression({"type": "fp16"}),
        "save_optimizer_states": lambda: store.save_optimizer_states(path, dump_optimizer=True),
        "load_optimizer_states": lambda: store.load_optimizer_states(path),
        "barrier": store.barrier,
        "num_dead_nodes": store.num_dead_nodes,
        "another store": lambda: kv.create("dist_async", start_timeout_seconds=seconds),
        "leave": store.leave,
        "close": store.close,
    }
    say({"rank": store.rank})
    for line in sys.stdin:
        begun, error = time.monotonic(), ""
        try:
            calls[line.strip()]()
        except ReigenError as raised:
            error = f"{type(raised).__name__}: {raised}"
        say({"seconds": time.monotonic() - begun, "error": error})


def say(what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


if __name__ == "__main__":
    main()
