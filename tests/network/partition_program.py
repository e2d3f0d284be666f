"""A program that writes each of its steps to a file of its own: others see them though the network is cut.

Arguments: a directory; steps are made until the file ``enough`` is there. Lines: ``time step size``.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import reigen as hvd
from reigen.elastic import ObjectState, run


def main() -> None:
    directory = Path(sys.argv[1])
    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    with (directory / f"steps.{os.environ['REIGEN_SLOT']}").open("a", buffering=1) as log:

        @run
        def train(state: object) -> None:
            while True:
                is_over = hvd.allreduce(np.full(1, (directory / "enough").exists(), np.float32), op=hvd.Max, name="x")
                state.step += 1
                log.write(f"{time.time()} {state.step} {hvd.size()}\n")
                if is_over[0]:
                    return
                time.sleep(0.02)
                state.commit()

        train(state)


if __name__ == "__main__":
    main()
