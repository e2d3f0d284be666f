"""The tutorial of ten minutes: its program with the mistakes that it shows, and the words that they lead to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.testing.environment import clean_environment
from tests.docs.blocks import blocks_of
from tools.docs.__main__ import ROOT

pytest.importorskip("torch", reason="PyTorch is not installed here")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PAGE = "docs/tutorials/first-job.md"
LOSS = re.compile(r"^\[0\] step (\d+)  loss ([\d.]+)$", re.MULTILINE)


def run(directory: Path, added: str = "", before: str = "hvd.init()") -> subprocess.CompletedProcess[str]:
    """`reigen run -np 2 python train.py`, with lines added before a line of the program."""
    program = next(blocks_of(PAGE, "python")).text
    [line] = [line for line in program.splitlines() if line.lstrip().startswith(before)]
    indent = line[: -len(line.lstrip())]
    lines = "".join(f"{indent}{each}\n" for each in added.splitlines())
    (directory / "train.py").write_text(program.replace(line, lines + line))
    return subprocess.run(
        [sys.executable, "-m", "reigen", "run", "-np", "2", sys.executable, "train.py"],
        env=clean_environment() | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
        cwd=directory, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_losses_are_those_of_the_page(tmp_path: Path) -> None:
    """Random numbers are the same everywhere; what is rounded otherwise shows in the last lines."""
    done, shown = run(tmp_path), next(blocks_of(PAGE, "console")).text
    pairs = list(zip(LOSS.findall(shown), LOSS.findall(done.stdout), strict=True))
    assert len(pairs) == 4, (shown, done)
    for (step, loss), (seen_step, seen_loss) in pairs:
        assert (seen_step, float(seen_loss)) == (step, pytest.approx(float(loss), rel=1e-2, abs=1e-5))


def test_the_words_about_a_dead_rank_are_those_of_the_page(tmp_path: Path) -> None:
    added, words = list(blocks_of(PAGE, "python"))[1], next(blocks_of(PAGE, "text"))
    done = run(tmp_path, added.text, "optimizer.zero_grad()")
    assert done.returncode == 137
    for line in words.text.splitlines():
        assert line.partition("(...)")[0].strip() in done.stderr, (line, done.stderr)


def test_the_words_about_different_shapes_are_those_of_the_page(tmp_path: Path) -> None:
    added, words = list(blocks_of(PAGE, "python"))[2], list(blocks_of(PAGE, "text"))[1]
    done = run(tmp_path, added.text, "mean = hvd.allreduce(")
    assert done.returncode != 0
    for line in words.text.splitlines():
        assert line.strip() in done.stderr, (line, done.stderr)
