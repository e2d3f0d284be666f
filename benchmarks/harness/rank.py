"""One rank of a benchmark: ``python -m benchmarks.harness.rank PROGRAM``, started by the controller.

PROGRAM is a file (``benchmarks/gloo_allreduce.py``) or a module (``benchmarks.programs.allreduce``).
A program can be measured by hand, too, without the controller; rank 0 prints the median::

    mpirun -np 2 python -m benchmarks.harness.rank benchmarks/mpi_allreduce.py ordinary 1048576
    torchrun --nproc-per-node 2 -m benchmarks.harness.rank benchmarks/gloo_allreduce.py ordinary 1048576
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType

from benchmarks.harness.turns import COMMANDS, Failed, Hello, Line, Open, Shut, Spans, Turn
from benchmarks.harness.work import Case, Program, Work

#: The controller's socket.
SOCKET_VARIABLE = "REIGEN_BENCH_SOCKET"
#: After so many seconds the kernel ends this process, whatever it is in the middle of.
LIMIT_VARIABLE = "REIGEN_BENCH_LIMIT"

_RANK_VARIABLES = (
    ("REIGEN_RANK", "REIGEN_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
_PR_SET_PDEATHSIG = 1
_BY_HAND_ITERATIONS = 50


def place(environ: Mapping[str, str]) -> tuple[int, int]:
    """(rank, size) as torchrun, ``reigen run``, Open MPI or the controller say; alone if nobody does."""
    for rank, size in _RANK_VARIABLES:
        if rank in environ and size in environ:
            return int(environ[rank]), int(environ[size])
    return 0, 1


def core_of(rank: int, cores: Sequence[int]) -> int:
    """Rank r has core r; with more ranks than cores they share. The same for every mode."""
    return sorted(cores)[rank % len(cores)]


def load_program(name: str) -> ModuleType:
    """The module of a program, from a file or by its name."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("benchmark_program", name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(work: Work, settle: int, iterations: int) -> list[tuple[float, float]]:
    """Operate ``settle + iterations`` times; begin and end of the last ``iterations`` of them.

    Returns:
        seconds of ``time.perf_counter``, which on Linux is CLOCK_MONOTONIC: the same for every process of the host.
    """
    spans: list[tuple[float, float]] = []
    clock = time.perf_counter
    for _ in range(settle + iterations):
        work.prepare()
        begin = clock()
        work.operate()
        spans.append((begin, clock()))
    return spans[settle:]


def serve(line: Line, program: Program) -> None:
    """Do what the controller says until it closes the socket."""
    works: dict[str, Work] = {}
    while True:
        try:
            command = COMMANDS.decode(line.receive())
        except EOFError:
            return
        spans: list[tuple[float, float]] = []
        match command:
            case Open(key, case, warmup):
                works[key] = work = program.open(case)
                spans = measure(work, 0, warmup)
                work.check()
            case Turn(key, settle, iterations):
                spans = measure(works[key], settle, iterations)
            case Shut(key):
                works.pop(key).close()
        line.send(Spans(spans))


def main(arguments: Sequence[str]) -> int:
    """Pin this process before anything can start a thread, then run the program."""
    rank, size = place(os.environ)
    os.sched_setaffinity(0, {core_of(rank, list(os.sched_getaffinity(0)))})
    address = os.environ.get(SOCKET_VARIABLE)
    if address is None:
        return _by_hand(arguments, rank, size)
    signal.alarm(int(os.environ[LIMIT_VARIABLE]))
    _die_with_parent()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        line = Line(connection)
        try:
            program: Program = load_program(arguments[0]).start(rank, size)
            line.send(Hello(rank, os.getpid(), program.versions))
            serve(line, program)
        except Exception as error:  # noqa: BLE001  the controller reports it, and must not wait for this rank
            with contextlib.suppress(OSError):
                line.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
            return 1
    program.close()
    return 0


def _die_with_parent() -> None:
    """The launcher's end, however it comes, is this rank's: the controller's, or mpirun's."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _by_hand(arguments: Sequence[str], rank: int, size: int) -> int:
    file, name, *nbytes = arguments
    program: Program = load_program(file).start(rank, size)
    work = program.open(Case(name, int(nbytes[0]) if nbytes else 0))
    measure(work, 0, 5)
    work.check()
    median = statistics.median(end - begin for begin, end in measure(work, 0, _BY_HAND_ITERATIONS))
    if rank == 0:
        what = " ".join(arguments)
        sys.stdout.write(f"{what}: {median * 1e6:.1f} us, median of {_BY_HAND_ITERATIONS}, {size} ranks\n")
    work.close()
    program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
