"""The examples for JAX, as a user starts them; they fail where the goal is missed, or the ranks' parameters differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "jax"


@pytest.mark.parametrize("name", ["digits.py", "flax_digits.py"])
def test_example(name: str) -> None:
    assert "bit-identical on all ranks: yes" in run(2, name)


def test_gpt() -> None:
    """Its loss is the same for any number of ranks."""
    one, two = (run(size, "gpt.py", "--steps", "12", "--goal", "5") for size in (1, 2))
    assert loss_in(one) == pytest.approx(loss_in(two), abs=1e-3)
    assert loss_in(two) < 4.5  # 5.5 is that of any byte being as likely as any other
    assert re.search(r"100% +[\d.,]+ samples/s  loss \d+\.\d+  ETA 0 s", two)


def run(size: int, name: str, *options: str) -> str:
    command = [sys.executable, "-m", "reigen", "run", "-np", str(size), sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loss_in(output: str) -> float:
    found = re.search(r"test loss (\d+\.\d+)", output)
    assert found is not None
    return float(found.group(1))
