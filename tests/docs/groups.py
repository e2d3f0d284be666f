"""Runs a group of programs of the documentation for a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from reigen.testing.environment import clean_environment
from tests.docs.programs import LAUNCHERS, PROGRAMS
from tools.docs.__main__ import ROOT

DEADLINE_SECONDS = 360


def check_group(group: str, directory: Path) -> None:
    """Assert that all programs of a group run to their end, in a directory of theirs."""
    options = LAUNCHERS[group]
    launcher = [] if options is None else [sys.executable, "-m", "reigen", "run", "--no-prefix", *options]
    path = [ROOT, ROOT / "src", *([ROOT / "tests" / "torchvision_operators"] if group == "integrations" else [])]
    done = subprocess.run(
        [*launcher, sys.executable, "-m", "tests.docs.run_programs", group],
        env=clean_environment() | {"PYTHONPATH": ":".join(map(str, path)), "CUDA_VISIBLE_DEVICES": ""},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for program in PROGRAMS[group]:
        assert f"ran {program.name}" in done.stdout.splitlines(), (program, done.stdout, done.stderr)
