"""Processes of a job on one host, until nothing of them is left. `LocalProcesses` has them below this one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, NamedTuple, Protocol

from reigen.errors import LaunchError
from reigen.launch.job_state import (
    KILLED_EXIT_CODES,
    KillProcesses,
    ProcessExited,
    ProcessInstruction,
    RestartProcess,
    SignalProcesses,
    SweepProcesses,
    TerminateProcesses,
)
from reigen.launch.local_plan import ProcessSpec
from reigen.launch.payload import InheritedDescriptors
from reigen.launch.ps_processes import ATTEMPT_VARIABLE
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.process_tree import find_descendants, reap_orphans, signal_all_below
from reigen.launch.supervision.spawn import spawn_process
from reigen.resources.limits import explain_limit
from reigen.resources.oom import OomMonitor

STDOUT, STDERR = 0, 1
STREAMS = (STDOUT, STDERR)

_READ_BYTES = 1 << 16
#: Seconds between looks whether what ranks left behind has gone: the end of a grandchild is announced to no process.
_SWEEP_SECONDS = 0.02


class HostProcesses(Protocol):
    """Processes of one host, this one or another: ranks, and PS processes under the numbers behind them."""

    def execute(self, instruction: ProcessInstruction) -> None:
        """Carry out an instruction for processes of this host; ``ProcessListener.swept`` answers SweepProcesses."""

    def pause(self, stream: int) -> None:
        """Take no more output of this stream; its writers have to wait."""

    def resume(self, stream: int) -> None:
        """Take output again."""

    def turn(self) -> float | None:
        """Do the work that is due; return the seconds until the next call if nothing happens, None for no limit."""


class ProcessListener(Protocol):
    """Listener to events of a host's processes."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """A rank has printed this."""

    def closed(self, rank: int, stream: int) -> None:
        """Stream of this rank has ended."""

    def exited(self, event: ProcessExited) -> None:
        """Process has ended."""

    def swept(self, group: HostProcesses) -> None:
        """Group has no descendants of its ranks left."""


class _OutputPipe(NamedTuple):
    rank: int
    stream: int
    file: IO[bytes]


class LocalProcesses:
    """Processes that are children of this one, which is a subreaper.

    Args:
        loop: waits for their output and their ends.
        listener: gets their events.
    """

    def __init__(self, loop: LauncherLoop, listener: ProcessListener) -> None:
        self._loop, self._listener = loop, listener
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        #: By number: spec and standard input.
        self._started: dict[int, tuple[ProcessSpec, int | None]] = {}
        #: Pipes that are open.
        self._pipes: list[_OutputPipe] = []
        self._paused: set[int] = set()
        self._is_sweeping = self._is_killing = False
        self._oom = OomMonitor()
        #: Children of this process that do not belong to the job; their descendants are excluded, too.
        self.excluded: set[int] = set()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by number."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(
        self,
        spec: ProcessSpec,
        inherited: InheritedDescriptors | None = None,
        stdin: int | None = None,
    ) -> None:
        """Start a process; rank 0 reads ``stdin``, by default that of this one.

        Raises:
            LaunchError: it cannot be started; those that were are the watchdog's to end.
        """
        rank = spec.number
        self._started[rank] = spec, stdin
        command = spec.command if inherited is None else inherited.substitute(spec.command)
        process = spawn_process(command, spec, (*spec.descriptors, *(inherited or ())), stdin)
        self._processes[rank] = process
        try:
            handle = os.pidfd_open(process.pid)
        except OSError as error:
            raise LaunchError(f"cannot watch the process of {spec.name}: {explain_limit(error).strerror}") from error
        self._loop.watch(handle, lambda: self._on_exit(rank, handle))
        for stream, file in ((STDOUT, process.stdout), (STDERR, process.stderr)):
            assert file is not None, "spawn asks for pipes"
            os.set_blocking(file.fileno(), False)
            pipe = _OutputPipe(rank, stream, file)
            self._pipes.append(pipe)
            if stream not in self._paused:
                self._loop.watch(file, self._reader(pipe))

    def execute(self, instruction: ProcessInstruction) -> None:
        """Carry out an instruction; raises LaunchError where a process cannot be started again."""
        match instruction:
            case RestartProcess(number, attempt):  # without the payload
                spec, stdin = self._started[number]
                self.start(replace(spec, environ={**spec.environ, ATTEMPT_VARIABLE: str(attempt)}), None, stdin)
            case SignalProcesses(ranks, signum):
                self._signal(ranks, signum)
            case TerminateProcesses(ranks):
                self._signal_groups(ranks, signal.SIGTERM)
                self._signal_groups(ranks, signal.SIGCONT)  # one that was stopped would not hear it otherwise
            case KillProcesses(ranks):
                self._signal_groups(ranks, signal.SIGKILL)
                self._is_killing = signal_all_below(signal.SIGKILL, self.excluded) > 0
            case SweepProcesses():
                self._is_sweeping = True
                signal_all_below(signal.SIGTERM, self.excluded)
                signal_all_below(signal.SIGCONT, self.excluded)

    def pause(self, stream: int) -> None:
        """Read no more from these pipes."""
        self._paused.add(stream)
        for pipe in self._of(stream):
            self._loop.unwatch(pipe.file)

    def resume(self, stream: int) -> None:
        """Read them again."""
        self._paused.discard(stream)
        for pipe in self._of(stream):
            if not self._loop.watches(pipe.file):
                self._loop.watch(pipe.file, self._reader(pipe))

    def turn(self) -> float | None:
        """Reap orphans; look whether left-over processes have ended, and at the OOM killer's counters."""
        running = {process.pid for process in self._processes.values() if process.returncode is None}
        reap_orphans(running | self.excluded)
        if self._is_killing:
            self._is_killing = signal_all_below(signal.SIGKILL, self.excluded) > 0
        if self._is_sweeping and not find_descendants(os.getpid(), self.excluded):
            self._is_sweeping = False
            self._listener.swept(self)
        due = self._oom.sample() if running else None  # before an end that it is to explain
        return _SWEEP_SECONDS if self._is_sweeping or self._is_killing else due

    def drain(self) -> None:
        """Read the rest of pipes whose writers have ended."""
        for pipe in list(self._pipes):
            while self._read(pipe):
                pass
            if pipe in self._pipes:
                self._close(pipe)

    def _signal(self, ranks: Sequence[int], signum: int) -> None:
        """Send a signal to the processes alone: their children may have no handler for it."""
        for rank in ranks:
            process = self._processes.get(rank)
            if process is not None and process.returncode is None:
                process.send_signal(signum)

    def _signal_groups(self, ranks: Sequence[int], signum: int) -> None:
        # A rank that has not been waited for keeps its number, and with it that of its group, from being used again.
        for rank in ranks:
            process = self._processes.get(rank)
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)

    def _on_exit(self, rank: int, handle: int) -> None:
        self._loop.unwatch(handle)
        os.close(handle)
        if self._started[rank][0].is_restartable:  # what it has started must not stand in the way of that one
            self._signal_groups([rank], signal.SIGKILL)
            for pipe in [each for each in self._pipes if each.rank == rank]:  # its last words, before those of that one
                while self._read(pipe):
                    pass
        exit_code = self._processes[rank].wait()
        cause = self._oom.explain() if exit_code in KILLED_EXIT_CODES else ""
        self._listener.exited(ProcessExited(rank, exit_code, cause))

    def _of(self, stream: int) -> list[_OutputPipe]:
        return [pipe for pipe in self._pipes if pipe.stream == stream]

    def _reader(self, pipe: _OutputPipe) -> Callable[[], object]:
        return lambda: self._read(pipe)

    def _read(self, pipe: _OutputPipe) -> bool:
        """Read once; returns whether there may be more."""
        try:
            data = os.read(pipe.file.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(pipe)
            return False
        self._listener.printed(pipe.rank, pipe.stream, data)
        return True

    def _close(self, pipe: _OutputPipe) -> None:
        self._pipes.remove(pipe)
        self._loop.unwatch(pipe.file)  # it is not watched while it is paused
        pipe.file.close()
        self._listener.closed(pipe.rank, pipe.stream)
