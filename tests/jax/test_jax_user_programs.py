"""Programs of JAX's users, by `reigen run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("size", [1, 3])
def test_collectives_gradients_and_training(size: int) -> None:
    command = [sys.executable, "-m", "reigen", "run", "-np", str(size), "--no-prefix", sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAMS / "as_with_mpi4jax.py")], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"done rank={rank} same=True learned=True" for rank in range(size)]


def test_several_devices_in_each_process() -> None:
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", "--no-prefix", sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAMS / "several_devices.py")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["passed"] * 2), done.stdout + done.stderr
