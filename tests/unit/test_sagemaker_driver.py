"""The driver script of reigen.sagemaker, as the SDK calls it, and the SDK's class where that is installed."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.launch.nodes.launcher import find_secret
from reigen.launch.nodes.sources import NodeJob

DRIVER = Path(__file__).parents[2] / "src/reigen/sagemaker/driver.py"


def run_driver(tmp_path: Path, **environ: str) -> tuple[list[str], Path]:
    """The command that the script becomes, and the file of the secret that it names."""
    directory = tmp_path / "distributed_drivers"
    directory.mkdir()
    (directory / "reigen_driver.py").write_bytes(DRIVER.read_bytes())
    (directory / "secret").write_text("5e" * 32)
    (directory / "secret").chmod(0o644)  # as objects from S3 are
    shown = "import json, os, sys; json.dump([sys.orig_argv, os.environ['REIGEN_SECRET_FILE']], sys.stdout)"
    (tmp_path / "reigen").mkdir()
    (tmp_path / "reigen/__init__.py").touch()
    (tmp_path / "reigen/__main__.py").write_text(shown)
    done = subprocess.run(
        [sys.executable, directory / "reigen_driver.py"],
        env={"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    words, secret = json.loads(done.stdout.splitlines()[-1])
    return words[1:], Path(secret)


def test_the_command_of_a_script_with_hyperparameters(tmp_path: Path) -> None:
    config = json.dumps({"process_count_per_node": 4, "options": ["--verbose"]})
    parameters = json.dumps({"lr": 0.1, "name": "a b", "list": [1, 2]})
    words, secret = run_driver(
        tmp_path, SM_ENTRY_SCRIPT="train.py", SM_DISTRIBUTED_CONFIG=config, SM_HPS=parameters, SM_HOST_COUNT="2"
    )
    run = ["-P", "-m", "reigen", "run", "--nodes-from-env", "-np", "8", "--verbose", sys.executable, "train.py"]
    assert words == [*run, "--lr", "0.1", "--name", "a b", "--list", "[1, 2]"]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o400
    job = NodeJob("SageMaker", 0, 2, "algo-1")
    assert find_secret(job, {"REIGEN_SECRET_FILE": str(secret)})[0].secret == b"\x5e" * 32


def test_as_many_ranks_as_gpus(tmp_path: Path) -> None:
    words, _ = run_driver(tmp_path, SM_ENTRY_SCRIPT="train.sh", SM_DISTRIBUTED_CONFIG="{}")
    assert words == ["-P", "-m", "reigen", "run", "--nodes-from-env", "-np", "auto", "/bin/sh", "train.sh"]


def test_the_class_of_the_sdk() -> None:
    pytest.importorskip("sagemaker.train.distributed", reason="sagemaker-train is not installed")
    from reigen.sagemaker import Distributed

    found = Distributed(process_count_per_node=2)
    assert found.model_dump() == {"process_count_per_node": 2, "options": None}
    first, second = Path(found.driver_dir), Path(found.driver_dir)
    assert (first / found.driver_script).read_bytes() == DRIVER.read_bytes()
    secrets = {(each / "secret").read_text() for each in (first, second)}
    assert {len(each) for each in secrets} == {64}
    assert len(secrets) == 2, "each job has its own"
