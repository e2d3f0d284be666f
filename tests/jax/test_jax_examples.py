"""The examples for JAX, as a user starts them; they fail where the goal is missed, or the ranks' parameters differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "jax"


@pytest.mark.parametrize("name", ["digits.py", "flax_digits.py"])
def test_example(name: str) -> None:
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical on all ranks: yes" in done.stdout
