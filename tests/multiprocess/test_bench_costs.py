"""`reigen bench costs` with real processes: what it writes is what the planner reads."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.planner.costs import Costs, read_costs

pytestmark = pytest.mark.slow  # many real processes

#: Fewer sizes than usual. In a process of its own: it ends every process below it, which here are other tests' ranks.
PROGRAM = """
import sys
from benchmarks import costs
from benchmarks.__main__ import main
costs.SIZES = (1 << 12, 1 << 18, 1 << 20, 1 << 22)
costs.KEYS = ((1, 1 << 19), (4, 1 << 19), (1, 1 << 21))
sys.exit(main(["costs", *sys.argv[1:]]))
"""


def run_costs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)


def test_costs_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    ended = run_costs("--rounds", "1", "--seconds", "0.02", "--costs", str(file))
    assert ended.returncode == 0, ended.stderr
    found = read_costs(file)
    assert "cores" in found.source
    measured = [
        each.name for each in dataclasses.fields(Costs) if getattr(found, each.name) != getattr(Costs(), each.name)
    ]
    assert "reduce_seconds_per_byte" in measured
    per_byte = found.tcp_send_seconds_per_byte + found.tcp_receive_seconds_per_byte
    assert 1e-12 < per_byte + found.tcp_message_seconds < 1.0
    assert "unexplained" in ended.stdout


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    ended = run_costs("--costs", str(tmp_path / "nowhere" / "costs.json"))
    assert ended.returncode == 2
    assert "nowhere" in ended.stderr
