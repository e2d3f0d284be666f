"""Elastic jobs whose processes die, stop and lose each other, of whatever role, until somebody has had enough.

REIGEN_TEST_FAULTS and REIGEN_TEST_FAULT_SECONDS say how many faults, and for how long; REIGEN_TEST_FAULT_GAP is the
mean of the seconds between two; REIGEN_TEST_SEED chooses others. `make nightly-faults` runs them for an hour.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from tests.elastic.fault_loop import DEADLINE_SECONDS, FaultLoop, FaultyJob, JobProcess, describe_process
from tests.multiprocess.launcher import Launcher, launched

pytestmark = pytest.mark.slow

NUM_FAULTS = int(os.environ.get("REIGEN_TEST_FAULTS", "12"))
SECONDS = float(os.environ.get("REIGEN_TEST_FAULT_SECONDS", "inf"))
GAP_SECONDS = float(os.environ.get("REIGEN_TEST_FAULT_GAP", "0.3"))
SEED = int(os.environ.get("REIGEN_TEST_SEED", "7"))
PROGRAM = Path(__file__).with_name("fault_program.py")
SOURCE = Path(__file__).parents[2]
STEP_SECONDS = 0.005
#: A place is filled again soon, however often it fails.
RESTS = ("--blacklist-cooldown-range", "1", "1")
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "REIGEN_DEADLINE": f"{DEADLINE_SECONDS:g}",
    "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE)]),
}


class OneHostJob(FaultyJob):
    """A job of four ranks of this host."""

    size = 4
    faults: ClassVar[dict[str, float]] = {
        "kill rank": 8,
        "kill rank 0": 4,
        "kill several": 2,
        "stop rank 0.5 s": 2,
        "stop rank 5 s": 0.4,
        "stop rank for ever": 0.4,
        "stop supervisor 5 s": 0.3,
        "stop watchdog 5 s": 0.3,
        "kill supervisor": 0.5,
        "kill watchdog": 0.5,
    }

    def __init__(self, directory: Path, launcher: Launcher, output: Path) -> None:
        super().__init__(directory)
        self._launcher, self._output = launcher, output

    def processes(self) -> list[JobProcess]:
        return [describe_process(*each) for each in self._launcher.processes().items()]

    def has_ended(self) -> bool:
        return self._launcher.process.poll() is not None

    def errors(self) -> str:
        return self._output.read_text()


@contextmanager
def one_host_job(directory: Path) -> Iterator[OneHostJob]:
    ledger, output = directory / "ledger", directory / "output"
    ledger.mkdir(parents=True)
    options = ("-np", "4", "--min-np", "1", *RESTS, sys.executable, str(PROGRAM), str(ledger), str(STEP_SECONDS))
    with output.open("wb") as file, launched(*options, stdout=file, stderr=file, env=ENVIRON) as launcher:
        yield OneHostJob(ledger, launcher, output)


def test_faults_of_all_roles_on_one_host(tmp_path: Path) -> None:
    with ExitStack() as stack:
        num_jobs = 0

        def start() -> FaultyJob:
            nonlocal num_jobs
            num_jobs += 1
            stack.close()
            return stack.enter_context(one_host_job(tmp_path / str(num_jobs)))

        loop = FaultLoop(start, random.Random(SEED), GAP_SECONDS)
        loop.run(NUM_FAULTS, SECONDS)
    print(loop.summary())
    assert loop.num_views >= loop.ends
