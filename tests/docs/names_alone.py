"""What programs leave to their reader that no job runs: they start one, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reigen
from reigen.errors import ConfigError
from reigen.launch.options import LaunchOptions


def check_launcher(names: dict[str, Any]) -> None:
    """It is tried out in a job by test_docs_launcher.py."""
    with pytest.raises(ConfigError, match="no farmrun in PATH"):
        names["FarmLauncher"](LaunchOptions(["true"], 2), {"PATH": "/nowhere"})


def train(learning_rate: float) -> float:
    reigen.init()
    total = reigen.allreduce(np.full(1, learning_rate), op=reigen.Sum)
    return float(total[0])


def given_function() -> dict[str, Any]:
    return {"reigen": reigen, "train": train}


def check_function(names: dict[str, Any]) -> None:
    assert names["losses"] == pytest.approx([0.4] * 4)
