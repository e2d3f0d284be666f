"""Scripts as they are taught, unmodified, with today's Keras and with the one that Horovod knew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_python import quick_environment

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(("keras", "size"), [("keras 3", 1), ("legacy", 2), ("keras 3", 3)])
def test_the_script_of_the_slides(keras: str, size: int) -> None:
    environ = {**quick_environment(), "TF_USE_LEGACY_KERAS": "01"[keras == "legacy"], "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "reigen", "run", "--as-horovod", "-np", str(size), sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAMS / "slides_keras.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"same=True improved=True size={size}") == size, done.stdout
