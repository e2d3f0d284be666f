"""A program of an elastic job whose ledger is kept outside of the job: each process writes to a file of its own.

``TAKES view step size rank chain position``: before a step, which samples it takes: from ``position`` on, every
``size``-th from ``rank`` on. ``HAS view step size rank chain next_chain sum time``: what all of them have made of it.
``chain`` names the step before, and through it all of the history. Arguments: directory, seconds a step.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from pathlib import Path

import numpy as np

import reigen as hvd
from reigen.elastic import ObjectState, run
from tests.elastic.fault_ledger import GLOBAL_BATCH


def main() -> None:
    directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
    me = f"{os.environ['REIGEN_SLOT']}.{os.environ['REIGEN_INCARNATION']}"
    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, position=0, chain="begin")

    @run
    def train(state: ObjectState) -> None:
        view = hvd.broadcast_object(secrets.token_hex(4), name="view")
        while True:
            key = f"{view} {state.step} {hvd.size()} {hvd.rank()} {state.chain}"
            file.write(f"TAKES {key} {state.position}\n")
            mine = range(state.position + hvd.rank(), state.position + GLOBAL_BATCH, hvd.size())
            is_over = float((directory / "enough").exists())
            found = hvd.allreduce(np.array([sum(mine), len(mine), is_over]), op=hvd.Sum, name="samples")
            chain = hashlib.sha256(f"{key.rsplit(' ', 2)[0]} {state.chain} {found[:2]}".encode()).hexdigest()[:16]
            file.write(f"HAS {key} {chain} {found[0]:.0f} {time.time():.6f}\n")
            state.step, state.position, state.chain = state.step + 1, state.position + int(found[1]), chain
            if found[2]:
                return
            time.sleep(seconds)
            state.commit()

    with (directory / f"{me}.{secrets.token_hex(4)}").open("a", buffering=1) as file:
        train(state)
        file.write("DONE\n")


if __name__ == "__main__":
    main()
