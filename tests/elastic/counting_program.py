"""A training whose state can be checked: in each step every rank adds the step's number to what all have.

Lines: ``STEP step rank size total``. ``total`` is the same function of the step on all ranks, whoever the members are:
an average over ranks of equal values. Arguments: number of steps, seconds a step. CATCHES: all errors for so many
seconds from the first one on, and says so: ``CAUGHT``; for ever is wrong.
SLOW: ``SLOT.INCARNATION:SECONDS``, that process computes so much longer in each step.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import reigen as hvd
from reigen.elastic import ObjectState, history, run


def compute(seconds: float) -> None:
    """Does something for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def main() -> None:
    process = f"{os.environ.get('REIGEN_SLOT')}.{os.environ.get('REIGEN_INCARNATION')}"
    slow, _, slow_seconds = os.environ.get("SLOW", ":0").partition(":")
    num_steps, seconds = int(sys.argv[1]), float(sys.argv[2])
    hvd.init()
    print(f"PLACE {hvd.rank()} {hvd.size()} {hvd.local_rank()} {hvd.local_size()}", flush=True)
    while (path := os.environ.get("PREPARES_UNTIL")) and not Path(path).exists():
        time.sleep(0.01)
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0)

    state.register_leave_callbacks([lambda left: print(f"LEFT {state.step} {left}", flush=True)])
    caught_at: list[float] = []

    @run
    def train(state: object) -> None:
        while state.step < num_steps:
            try:
                value = hvd.allreduce(np.full(1000, state.step, np.float32), name="value")
            except Exception:
                caught_at.append(time.monotonic())
                if caught_at[-1] - caught_at[0] >= float(os.environ.get("CATCHES", "0")):
                    raise
                print("CAUGHT", flush=True)
                time.sleep(0.01)
                continue
            time.sleep(seconds)
            compute(float(slow_seconds) if slow == process else 0.0)
            state.total += float(value[0])
            state.step += 1
            line = f"STEP {state.step} {hvd.rank()} {hvd.size()} {state.total} {time.monotonic()}"
            print(line, flush=True)
            state.commit()

    train(state)
    print(f"DONE {hvd.rank()} {hvd.size()} {state.total}", flush=True)
    found = history()
    print(f"HISTORY {found.num_changes} {found.num_reruns} {found.seconds_lost:.3f} {found.changes[-1].describe()}")


if __name__ == "__main__":
    main()
