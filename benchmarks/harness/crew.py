"""The processes of one mode: started, given turns, and ended whatever happens.

Every mode is started in the same way: new processes that run ``python -m benchmarks.harness.rank PROGRAM``, with one
thread each and rank r on core r modulo their number. mpirun starts them where the program needs it; the rest is the
same.

They end, because: the controller kills every process below it when it leaves; the kernel kills a rank whose parent has
ended; a rank leaves when its socket is closed; and the kernel ends it after a time limit, whatever it does then.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness.figures import Timeline
from benchmarks.harness.rank import LIMIT_VARIABLE, SOCKET_VARIABLE
from benchmarks.harness.turns import ANSWERS, Command, Failed, Hello, Line, Open, Shut, Spans, Turn
from benchmarks.harness.work import Case
from reigen.cluster.membership.control_service import ControlService
from reigen.errors import LaunchError
from reigen.launch.local_plan import TORCHRUN_ENV_VARIABLE, JobServices, detect_cpus, plan_ranks, single_host_topologies
from reigen.launch.supervision.spawn import reserve_port
from reigen.net.auth import SECRET_BYTES

START_SECONDS = 120.0
TURN_SECONDS = 180.0
_LEAVE_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_LIMIT_SECONDS = 3600
_TAIL_BYTES = 2000
_MODULE = "benchmarks.harness.rank"
_ROOT = Path(__file__).resolve().parents[2]
#: Found by whoever else may have started this process; the ranks must not take it for their own.
_LAUNCHERS = ("REIGEN_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


@dataclass(frozen=True)
class Start:
    """How one rank is started where ranks are not all alike: on several hosts.

    Attributes:
        entry: the beginning of its command.
        variables: set for it alone.
    """

    entry: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CrewSpec:
    """Which processes.

    Attributes:
        name: for messages.
        program: what each rank runs: a file or a module.
        num_ranks: how many.
        starter: a command that starts them all, with its options (mpirun); empty: they are started one by one.
        variables: set for these processes alone.
        starts: how each rank is started; empty: all alike.
        directory: an existing directory that all ranks see, for the socket; None: one of the system's.
    """

    name: str
    program: str
    num_ranks: int
    starter: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()
    directory: Path | None = None


class Crew:
    """The ranks of one program. Use as a context manager: `spawn`, then `meet`, then the rest in any order."""

    def __init__(self, spec: CrewSpec) -> None:
        self.spec = spec
        #: what runs, and its version; known after `meet`
        self.versions: dict[str, str] = {}
        self._stack = ExitStack()
        self._lines: list[Line] = []
        #: why nothing can be asked any more; answers to the last order may still be on their way
        self._failure: LaunchError | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="reigen-bench-", dir=spec.directory))
        )
        self._output = self._stack.enter_context((self._directory / "output").open("w+b"))
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._server = ControlService(self._secret)
        self._stack.callback(self._server.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_LEAVE_SECONDS if error is None else 0.0)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that were started here: the ranks, or what starts them."""
        return tuple(process.pid for process in self._processes)

    def spawn(self) -> None:
        """Start the processes; returns at once.

        Raises:
            LaunchError: the kernel refused, or there is no such starter.
        """
        address = str(self._directory / "socket")
        self._listener.bind(address)
        self._listener.listen(self.spec.num_ranks)
        port = self._stack.enter_context(reserve_port()).getsockname()[1]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        environ |= {
            SOCKET_VARIABLE: address,
            LIMIT_VARIABLE: str(_LIMIT_SECONDS),
            "OMP_NUM_THREADS": "1",
            TORCHRUN_ENV_VARIABLE: "1",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            **self.spec.variables,
        }
        services = JobServices(self._server.address, self._secret, port)
        places, _ = plan_ranks(
            single_host_topologies(self.spec.num_ranks), services, environ, detect_cpus(), bind="none"
        )
        command = [sys.executable, "-m", _MODULE, self.spec.program]
        if self.spec.starter:
            self._start([*self.spec.starter, *command], environ)
        else:
            starts = self.spec.starts or (Start(()),) * self.spec.num_ranks
            for place, start in zip(places, starts, strict=True):
                self._start([*start.entry, *command], {**place.environ, **start.variables})

    def meet(self) -> None:
        """Wait until every rank has come.

        Raises:
            LaunchError: one did not; tells why.
        """
        self._server.start()
        deadline = time.monotonic() + START_SECONDS
        hellos: dict[int, Line] = {}
        silent: dict[socket.socket, Line] = {}
        while len(hellos) < self.spec.num_ranks:
            ready = select.select([self._listener, *silent], [], [], _LOOK_SECONDS)[0]
            for connection in ready:
                if connection is self._listener:
                    accepted = self._stack.enter_context(self._listener.accept()[0])
                    silent[accepted] = Line(accepted)
                else:
                    line = silent.pop(connection)
                    hello = self._answer(line)
                    assert isinstance(hello, Hello)
                    hellos[hello.rank], self.versions = line, hello.versions
            ended = any(process.poll() is not None for process in self._processes)
            if not ready and (ended or time.monotonic() > deadline):
                raise self._broken(f"{len(hellos)} of {self.spec.num_ranks} ranks have come")
        self._lines = [hellos[rank] for rank in sorted(hellos)]

    def open(self, key: str, case: Case, warmup: int) -> list[Timeline]:
        """Make a case ready on all ranks, warm it up and check its result.

        Returns:
            timelines of the warm-up, by rank.

        Raises:
            LaunchError: it failed; so do the methods below. The crew is useless then.
        """
        return self._order(Open(key, case, warmup))

    def turn(self, key: str, settle: int, iterations: int) -> list[Timeline]:
        """Operate ``settle`` times, then ``iterations`` times; the timelines of the latter, by rank."""
        return self._order(Turn(key, settle, iterations))

    def shut(self, key: str) -> None:
        """A case is over."""
        self._order(Shut(key))

    def close(self, leave_seconds: float = _LEAVE_SECONDS) -> None:
        """End the processes: they may leave in their own time for so many seconds."""
        for line in self._lines:
            line.connection.close()
        deadline = time.monotonic() + leave_seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()  # mpirun ends its ranks then
        for process in self._processes:
            try:
                process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()

    def _start(self, command: Sequence[str], environ: dict[str, str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{self.spec.name}: cannot start {command[0]}: {error.strerror}") from error
        self._processes.append(process)

    def _order(self, command: Command) -> list[Timeline]:
        if self._failure is not None:
            raise self._failure
        for line in self._lines:
            try:
                line.send(command)
            except OSError as error:
                raise self._broken("a rank has gone") from error
        timelines: dict[int, Timeline] = {}
        deadline = time.monotonic() + TURN_SECONDS
        waiting = {line.connection: rank for rank, line in enumerate(self._lines)}
        while waiting:
            ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise self._broken(f"ranks {sorted(waiting.values())} did not answer within {TURN_SECONDS:.0f} s")
            for connection in ready:
                rank = waiting.pop(connection)
                answer = self._answer(self._lines[rank])
                assert isinstance(answer, Spans)
                timelines[rank] = answer.spans
        return [timelines[rank] for rank in range(len(self._lines))]

    def _answer(self, line: Line) -> Hello | Spans:
        """What a rank has sent; LaunchError if it has failed or ended, so that nobody waits for the others."""
        try:
            answer = ANSWERS.decode(line.receive())
        except EOFError:
            raise self._broken("a rank has ended") from None
        if isinstance(answer, Failed):
            raise self._broken(answer.reason, answer.traceback)
        return answer

    def _broken(self, reason: str, details: str = "") -> LaunchError:
        """The error that says so, with what the rank knows of it, or else with the last words of all ranks."""
        if not details:
            size = os.fstat(self._output.fileno()).st_size
            tail = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
            details = tail.decode(errors="replace").strip()
        self._failure = LaunchError("\n".join(filter(None, (f"{self.spec.name}: {reason}", details))))
        return self._failure
