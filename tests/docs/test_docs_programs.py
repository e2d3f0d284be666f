"""The Python blocks of the documentation run: on two ranks of a real job, or in one process that starts it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reigen
from reigen.testing import RankPool
from reigen.testing.environment import clean_environment
from tests.docs.blocks import blocks_of
from tests.docs.programs import LAUNCHERS, PROGRAMS
from tools.docs.__main__ import ROOT

DEADLINE_SECONDS = 360


def groups_here() -> list[str]:
    """Groups of the environment whose tests these are."""
    if importlib.util.find_spec("mxnet"):
        return ["mxnet"]
    if importlib.util.find_spec("tensorflow"):
        return ["jax", "keras", "tensorflow", "dask"]
    return ["torch", "servers", "elastic", "alone"]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize("group", groups_here())
def test_blocks_run(group: str, tmp_path: Path) -> None:
    options = LAUNCHERS[group]
    launcher = [] if options is None else [sys.executable, "-m", "reigen", "run", "--no-prefix", *options]
    done = subprocess.run(
        [*launcher, sys.executable, "-m", "tests.docs.run_programs", group],
        env=clean_environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for program in PROGRAMS[group]:
        assert f"ran {program.name}" in done.stdout.splitlines(), (program, done.stdout, done.stderr)


@pytest.mark.skipif("torch" not in groups_here(), reason="run in the environment of PyTorch")
def test_the_test_in_contributing_passes(rank_pool: Callable[[int], RankPool]) -> None:
    [block] = blocks_of("CONTRIBUTING.md", "python")
    names: dict[str, Any] = {"reigen": reigen, "np": np, "__name__": "__main__"}  # what travels is pickled by value
    exec(compile(block.text, block.page, "exec"), names)  # noqa: S102
    names["test_average"](rank_pool)
