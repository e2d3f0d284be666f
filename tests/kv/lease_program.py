"""Worker of an elastic job with servers that leases samples, and writes down, outside of the job, what it does.

Arguments: a directory, the type of the store, the number of samples, of a batch, and of epochs. What is pushed for a
batch is a one for each of its samples, at the sample's place: values are how often each sample was trained on. A batch
takes some milliseconds until there is a file ``hurry``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import reigen.kv
from reigen import optim

#: By name, how often each key repeats the samples: one lies on one server, the other is cut.
KEYS = {"small": 1, "cut": 25}
COMPUTING_SECONDS = 0.004


def main() -> None:
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    num_samples, batch_size, epochs = map(int, sys.argv[3:])
    slot, incarnation = int(os.environ["REIGEN_SLOT"]), int(os.environ["REIGEN_INCARNATION"])
    ledger = os.open(directory / f"{slot}.{incarnation}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def write(*words: object) -> None:
        os.write(ledger, (" ".join(map(str, words)) + "\n").encode())

    write("pid", os.getpid())
    store = reigen.kv.create(kind)
    store.set_optimizer(optim.create("test"))
    out = {key: np.empty(num_samples * times) for key, times in KEYS.items()}
    store.init(list(KEYS), [np.zeros(num_samples * times) for times in KEYS.values()])
    write("begins")
    for lease in store.sample_leases(num_samples, batch_size, epochs=epochs, seed=1):
        write("leased", lease.number, lease.epoch)
        if not (directory / "hurry").exists():
            time.sleep(COMPUTING_SECONDS)
        ones = np.zeros(num_samples)
        ones[lease.indices] = 1.0
        store.pushpull(list(KEYS), [np.tile(ones, times) for times in KEYS.values()], out=list(out.values()))
        write("pushed", lease.number)
    store.pull(list(KEYS), out=list(out.values()))
    np.savez(directory / f"{slot}.{incarnation}.npz", **out)
    write("done")
    store.barrier()


if __name__ == "__main__":
    main()
