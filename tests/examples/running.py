"""Examples as a user starts them: alone, or with `reigen run`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reigen.testing.environment import clean_environment

ROOT = Path(__file__).parents[2]
#: PyTorch's scripts find torchvision's operators there, where those of its library cannot be loaded.
OPERATORS = ROOT / "tests" / "torchvision_operators"
DEADLINE_SECONDS = 580
VARIABLES = {
    "PYTHONPATH": f"{ROOT / 'src'}:{OPERATORS}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise torchvision's replacement of roi_align is compiled first
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # it compiles much longer than it computes
}


def run(
    script: str, *options: object, np: int = 1, servers: int = 0, framework: str = "torch", backend: str = ""
) -> str:
    """Return the output of an example of a framework on ``np`` ranks; without servers, one rank has no launcher.

    ``backend`` is Keras's.
    """
    launcher = [sys.executable, "-m", "reigen", "run", "--no-prefix", "-np", str(np)]
    launcher += ["-s", str(servers)] if servers else []
    command = [*(launcher if np > 1 or servers else []), sys.executable, str(ROOT / "examples" / framework / script)]
    environ = clean_environment() | VARIABLES
    done = subprocess.run(
        [*command, *map(str, options)],
        env=environ | ({"KERAS_BACKEND": backend} if backend else {}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figure(printed: str, name: str) -> float:
    """Return the last number that an example printed behind a name."""
    return float(re.findall(rf"{name} (-?[\d.]+\d)", printed)[-1])


def assert_same(name: str, tolerance: float, *runs: Callable[[], str]) -> None:
    """Compare a figure of several runs: sums of floating-point numbers differ by their order alone."""
    figures = [figure(each(), name) for each in runs]
    assert figures == pytest.approx([figures[0]] * len(figures), rel=tolerance), figures
