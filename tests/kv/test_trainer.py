"""Trainer with real servers: `reigen run -np 2 -s N`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("trainer_job.py")
SECONDS = 90


def run(directory: Path, num_servers: int, *cases: str, **variables: str) -> list[dict[str, Any]]:
    """What each of two workers found."""
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", "-s", str(num_servers), sys.executable, str(JOB)]
    environ = {**os.environ, "REIGEN_KV_BIGARRAY_BOUND": "1000", "OMP_NUM_THREADS": "1", "REIGEN_DEADLINE": "30"}
    environ.update(variables)
    done = subprocess.run(
        [*command, str(directory), *cases], env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((directory / f"{worker}.json").read_text()) for worker in range(2)]


def both(found: list[dict[str, Any]], case: str) -> Any:
    """What both workers found alike."""
    assert found[0][case] == found[1][case]
    return found[0][case]


def test_steps_with_two_servers(tmp_path):
    found = run(
        tmp_path,
        2,
        "servers_same_bits",
        "workers_same_bits",
        "layerwise_same_bits",
        "batches_of_other_sizes",
        "first_weights",
        "compressed_to_servers",
        "compressed_to_workers",
        "sparse_rows",
        "clipped",
        "mismatch",
    )
    assert both(found, "servers_same_bits") == {"same": [True, True], "moved": True, "on_store": True}
    assert both(found, "workers_same_bits") == {"same": [True, True], "moved": True, "on_store": False}
    assert both(found, "layerwise_same_bits") == {"same": [True, True], "moved": True, "on_store": True}
    # sums of 3, divided by 4, 4, 2 and 8
    assert both(found, "batches_of_other_sizes") == [-(0.75 + 0.75 + 1.5 + 0.375)] * 5
    first, last = both(found, "first_weights")
    assert first == [[1.0] * 3, [7.0] * 2, [3], [1.0] * 2, [1.0] * 2]
    assert last == [[0.5] * 3, [7.0] * 2, [3], [0.5] * 2, [0.5] * 2]  # 256 steps of 2 * 2**-10
    assert both(found, "compressed_to_servers") == [[-1.0, -1.0], [-2.0, -2.0]]
    assert both(found, "compressed_to_workers") == [[-1.0, -1.0], [-2.0, -2.0]]
    sparse = both(found, "sparse_rows")
    # rows 0 and 1: 1 - 0.5 * (1 + 1); row 4: 1 - 0.5 * (4 + 1); the others do not decay
    assert sparse["whole"] == [0.0, 0.0, 1.0, 1.0, -1.5, 1.0]
    assert sparse["rows"] == [-1.0, 0.0, 0.0, -2.0]
    assert both(found, "clipped") == pytest.approx([5.0, -1.5, -2.0])
    for worker in range(2):
        error = found[worker]["mismatch"]
        assert error.startswith("MismatchError")
        assert "'w'" in error
        assert "(3,)" in error
        assert "(4,)" in error


def test_workers_that_differ_in_data(tmp_path):
    found = run(tmp_path, 1, "uneven_sync", "uneven_async", "uneven_ssp", "overflow")
    # 3 steps of 1 and 5 steps of 2, whoever comes when
    for case in ("uneven_sync", "uneven_async", "uneven_ssp"):
        assert both(found, case) == [13.0] * 4
    assert both(found, "overflow") == [-2.5, 8.0]


def test_states_are_loaded_by_another_number_of_servers(tmp_path):
    through = run(tmp_path, 2, "states_through", "states_before")
    after = run(tmp_path, 1, "states_after")
    assert both(through, "states_through") == both(after, "states_after")
    assert both(through, "states_before") != both(after, "states_after")


def test_a_worker_that_takes_a_lost_ones_place_goes_on_with_its_next_step(tmp_path):
    found = run(tmp_path, 2, "replaced", REIGEN_KV_ON_WORKER_LOSS="wait")
    # five steps of 0.5 * (1 + 2), none of them lost, none twice
    assert [found[worker]["replaced"] for worker in range(2)] == [[0, *[7.5] * 4], [2, *[7.5] * 4]]


def test_the_example():
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", "-s", "1", sys.executable]
    example = [str(ROOT / "examples" / "torch" / "kvstore.py"), "--kvstore", "dist_sync"]
    done = subprocess.run([*command, *example], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 worker(s)" in done.stdout
