"""`reigen bench costs` with real processes: what it writes is what the planner reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import costs
from benchmarks.__main__ import main
from reigen.planner.costs import Costs, read_costs

pytestmark = pytest.mark.slow  # many real processes


def test_costs_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "SIZES", (1 << 12, 1 << 18, 1 << 20, 1 << 22))
    monkeypatch.setattr(costs, "KEYS", ((1, 1 << 19), (4, 1 << 19), (1, 1 << 21)))
    file = tmp_path / "costs.json"
    assert main(["costs", "--rounds", "1", "--seconds", "0.02", "--costs", str(file)]) == 0
    found = read_costs(file)
    assert "cores" in found.source
    measured = [
        each.name for each in dataclasses.fields(Costs) if getattr(found, each.name) != getattr(Costs(), each.name)
    ]
    assert "reduce_seconds_per_byte" in measured
    per_byte = found.tcp_send_seconds_per_byte + found.tcp_receive_seconds_per_byte
    assert 1e-12 < per_byte + found.tcp_message_seconds < 1.0
    assert "unexplained" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["costs", "--costs", str(tmp_path / "nowhere" / "costs.json")])
    assert "nowhere" in capsys.readouterr().err
