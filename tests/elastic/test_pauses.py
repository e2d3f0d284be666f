"""What the user is told before all members wait for a newcomer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.multiprocess.launcher import launched

#: Three processes import torch, one after the other.
PATIENCE_SECONDS = 240.0
PROGRAM = Path(__file__).with_name("pause_program.py")


@pytest.mark.slow
def test_a_pause_is_announced_and_who_dies_in_it_costs_nothing() -> None:
    options = ("-np", "3", "--min-np", "2", "--blacklist-cooldown-range", "1", "1", "--no-prefix")
    with launched(*options, sys.executable, str(PROGRAM), env={"OMP_NUM_THREADS": "1"}) as launcher:
        out, err = (text.decode() for text in launcher.process.communicate(timeout=PATIENCE_SECONDS))
    assert launcher.process.returncode == 0, err
    ranks, sums = zip(*(line.split() for line in out.splitlines()), strict=True)
    assert sorted(ranks) == ["0", "1", "2"]
    assert len(set(sums)) == 1, "all have the same weights"
    lines = [line.removeprefix("reigen run: ") for line in err.splitlines()]
    pause = r"members wait about \d+\.\d s while slot 2 gets the state \(514 KiB\)"
    assert sum(re.fullmatch(pause, line) is not None for line in lines) == 2, err
    assert sum("members wait" in line for line in lines) == 2, "at the beginning of the job nobody waits"
    assert sum("slot 2: killed by SIGKILL" in line for line in lines) == 2
