"""Scripts for MXNet that mpirun starts: Horovod's and those of the KVStore, which know nothing of Reigen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import reigen
from reigen.compat import as_horovod
from reigen.testing.environment import clean_environment
from tests.mpirun import launcher_alone

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
HOROVOD = """
import mxnet as mx
import horovod.mxnet as hvd
hvd.init()
value = mx.nd.full((3,), hvd.rank() + 1)
hvd.broadcast_parameters({"value": value}, root_rank=1)
total = hvd.allreduce(mx.nd.full((3,), hvd.rank() + 1), average=False)
print(f"rank {hvd.rank()} of {hvd.size()}: {value.asnumpy().tolist()} {total.asnumpy().tolist()}")
"""


@pytest.fixture
def environ() -> dict[str, str]:
    """With Open MPI's mpirun in PATH."""
    mpirun = launcher_alone()
    if isinstance(mpirun, str):
        pytest.skip(mpirun)
    return {
        **{name: value for name, value in clean_environment().items() if not name.startswith("DMLC_")},
        "PATH": os.pathsep.join([str(mpirun.parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(Path(reigen.__file__).parents[1]),
        "PYTHONUNBUFFERED": "",  # buffered: what Python prints in one go arrives in one piece
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPIRUN": str(mpirun),
    }


def printed(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_script_for_horovod(environ) -> None:
    start = [environ["MPIRUN"], "-np", "2", "-H", "localhost:2", "-bind-to", "none", "-map-by", "slot"]
    said = printed([*start, "-x", "PYTHONPATH", sys.executable, "-c", HOROVOD], as_horovod(environ))
    for rank in range(2):
        assert f"rank {rank} of 2: [2.0, 2.0, 2.0] [3.0, 3.0, 3.0]\n" in said


def test_a_script_for_the_kvstore(environ, tmp_path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=3\n")
    start = [sys.executable, "-m", "reigen", "launch", "-n", "2", "-s", "1", "--launcher", "mpi", "-H", str(hosts)]
    program = ["--as-mxnet", sys.executable, str(PROGRAMS / "closed_forms.py")]
    assert printed([*start, *program], environ).count("closed forms hold") == 2
