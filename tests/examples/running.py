"""Examples as a user starts them: alone, or with `reigen run`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from reigen.testing.environment import clean_environment

ROOT = Path(__file__).parents[2]
#: It says why the scripts that need torchvision are run by another one.
WITH_TORCHVISION = Path(__file__).with_name("with_torchvision_operators.py")
DEADLINE_SECONDS = 380


def run(script: str, *options: object, np: int = 1, servers: int = 0, torchvision: bool = False) -> str:
    """Return the output of an example of examples/torch on ``np`` ranks; without servers, one rank has no launcher."""
    launcher = [sys.executable, "-m", "reigen", "run", "--no-prefix", "-np", str(np)]
    launcher += ["-s", str(servers)] if servers else []
    python = [sys.executable, *([str(WITH_TORCHVISION)] if torchvision else [])]
    command = [*(launcher if np > 1 or servers else []), *python, str(ROOT / "examples" / "torch" / script)]
    environ = clean_environment() | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*command, *map(str, options)],
        env=environ,
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
