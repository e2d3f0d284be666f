"""A training whose steps are in a file that all its processes write to, and its reader in the test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.multiprocess.launcher import until


def train_until(directory: str, seconds: float = 0.02) -> tuple[int, int, int, int]:
    """Trains until the directory has a file ``enough``; returns rank, size, step and the sum of all steps."""
    import numpy as np

    import reigen as hvd
    from reigen.elastic import ObjectState, run

    enough = Path(directory) / "enough"
    log = os.open(Path(directory) / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0)

    @run
    def train(state: object) -> None:
        while True:
            value = hvd.allreduce(np.full(100, state.step, np.float32), name="value")
            is_over = hvd.allreduce(np.full(1, enough.exists(), np.float32), op=hvd.Max, name="over")
            state.total += float(value[0])
            state.step += 1
            me = os.environ["REIGEN_SLOT"], os.getpid(), os.environ.get("COLOUR", "-"), os.uname().nodename
            line = " ".join(map(str, (state.step, hvd.rank(), hvd.size(), *me)))
            os.write(log, f"{line}\n".encode())
            if is_over[0]:
                return
            time.sleep(seconds)
            state.commit()

    train(state)
    os.close(log)
    return hvd.rank(), hvd.size(), state.step, int(state.total)


@dataclass(frozen=True)
class Step:
    """A step of one process."""

    number: int
    rank: int
    size: int
    slot: int
    pid: int
    colour: str
    host: str

    @property
    def process(self) -> tuple[str, int]:
        """Its process, by which those of several hosts differ."""
        return self.host, self.pid


class Training:
    """The steps in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def steps(self) -> list[Step]:
        """All steps until now."""
        with suppress(FileNotFoundError):
            lines = (self._directory / "steps").read_text().splitlines()
            return [Step(*map(int, words[:5]), *words[5:]) for words in map(str.split, lines) if len(words) == 7]
        return []

    def wait_for_size(
        self, size: int, seconds: float = 60.0, is_so: Callable[[list[Step]], bool] = lambda steps: True
    ) -> list[Step]:
        """Waits until all ranks of this size have made a step that no other size comes after; returns it, by rank."""
        found: list[Step] = []

        def is_there() -> bool:
            steps = self.steps()
            last = steps[-3 * size :]
            ours = {step.rank: step for step in last if step.size == size}
            found[:] = [ours[rank] for rank in sorted(ours)]
            is_stable = len(last) == 3 * size and all(step.size == size for step in last)
            return is_stable and len(ours) == size and is_so(found)

        try:
            until(is_there, seconds)
        except AssertionError:
            raise AssertionError(f"no {size} ranks: {self.steps()[-6:]}") from None
        return list(found)

    def kill(self, step: Step) -> None:
        """Kills the process of a step, on this machine."""
        os.kill(step.pid, signal.SIGKILL)

    def end(self) -> None:
        """Lets the training end."""
        (self._directory / "enough").touch()

    def check(self) -> None:
        """Checks that no step is missing."""
        numbers = {step.number for step in self.steps()}
        assert numbers == set(range(1, max(numbers) + 1))
