"""The article's figure as the planner predicts it: what it says in words holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner_figures import FIGURE_SIZES, main, predict_all
from reigen.planner.costs import Costs


def test_one_server_falls_behind_and_the_allreduce_does_not() -> None:
    found = predict_all(FIGURE_SIZES, Costs())
    efficiency = {kind: [each.efficiency for each in predictions] for kind, predictions in found.items()}

    assert efficiency["n:1"] == sorted(efficiency["n:1"], reverse=True)
    assert efficiency["n:1"][-1] < 0.5 < efficiency["1:1"][-1] < efficiency["ring"][-1]
    cheapest = min(found, key=lambda kind: found[kind][-1].epoch_cost or 0.0)
    assert cheapest in {"hierarchical", "ring"}


def test_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pictures", str(tmp_path)]) == 0
    text = capsys.readouterr().out

    assert "| one server |" in text
    assert "4096 GPUs" in text
    assert "Known:\n* the article: ResNet-50 v1" in text
    assert "Assumed:\n* one GPU alone trains 750 images/s" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planner-figure1.svg", "planner-scale.svg"]
