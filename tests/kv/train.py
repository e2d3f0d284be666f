"""A user's program with a distributed store: ROUNDS rounds, with a rest before round 3 for as long as a file exists.

train.py [FILE [VICTIM]]        worker VICTIM kills itself there, in its first life
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from reigen import kv, optim

ROUNDS = 6
#: One lies on one server, the other one, with REIGEN_KV_BIGARRAY_BOUND=1000, on all of them.
SIZES = {"small": 5, "large": 10_007}


def main(file: str = "", victim: str = "") -> None:
    with kv.create("dist_sync") as store:
        store.set_optimizer(optim.create("test", rescale_grad=0.5))
        outs = {key: np.empty(size, np.float32) for key, size in SIZES.items()}
        store.init(list(SIZES), [np.ones(size, np.float32) for size in SIZES.values()])
        begun = {key: store.rounds(key) if store.is_recovery else 0 for key in SIZES}
        for number in range(min(begun.values()), ROUNDS):
            if number == ROUNDS // 2 and file:
                rest(Path(file), dies=victim == str(store.rank) and not store.is_recovery)
            for key, out in outs.items():
                if number >= begun[key]:
                    store.pushpull(key, np.full(SIZES[key], store.rank + 1, np.float32), out)
        found = {float(value) for out in outs.values() for value in out}
        sys.stdout.write(f"{store.rank} of {store.num_workers}: {found}\n")


def rest(file: Path, *, dies: bool) -> None:
    print("resting", flush=True)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    pause = threading.Event()
    while file.exists():
        pause.wait(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
