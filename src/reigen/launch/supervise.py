"""The thin side of the launcher: time, signals, pipes and processes around ``launch.job``, which decides."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Self

from reigen.cluster.environ import PREFIXED_VARIABLE
from reigen.cluster.rendezvous import RendezvousServer
from reigen.errors import LaunchError
from reigen.launch.guard import STOP_SIGNALS, guarded
from reigen.launch.job import (
    Event,
    Exited,
    Failure,
    Finish,
    GraceOver,
    Instruction,
    Job,
    Kill,
    Orphaned,
    SignalReceived,
    StartGrace,
    Sweep,
    Swept,
    Terminate,
)
from reigen.launch.local import TERMINAL_VARIABLE, Place, Services, cores_here, plan
from reigen.launch.options import Listener, Options, complain
from reigen.launch.outlet import Outlet, outlets
from reigen.launch.output import Lines, visible
from reigen.launch.processes import below, reap_strangers, signal_all_below, signal_name
from reigen.launch.record import Record
from reigen.launch.spawn import hold_port, spawn
from reigen.wire.auth import SECRET_BYTES

_READ_BYTES = 1 << 16
#: How often to look whether what ranks left behind has gone: nobody tells of the end of a grandchild.
_SWEEP_SECONDS = 0.02
_STDOUT, _STDERR = 0, 1


def run_local(options: Options, environ: Mapping[str, str], listener: Listener | None = None) -> int:
    """Run a job on this host to its end; returns its exit code. Call it before any thread is started.

    Nothing that the job started is left when this returns. The listener is by default the user.

    Raises:
        LaunchError: the kernel refused a process.
    """
    told = listener or Listener()
    try:
        return guarded(lambda lifeline: _run_supervised(options, environ, lifeline, told), told.complain)
    except OSError as error:
        raise LaunchError(f"cannot start: {error}") from error


def _run_supervised(options: Options, environ: Mapping[str, str], lifeline: int, listener: Listener) -> int:
    secret = secrets.token_bytes(SECRET_BYTES)
    with ExitStack() as stack:
        server = RendezvousServer(secret)
        stack.callback(server.close)
        port = stack.enter_context(hold_port()).getsockname()[1]
        places, reason = plan(
            options.num_ranks,
            Services(server.address, secret, port),
            _told(environ, prefix=options.prefix),
            cores_here(),
            bind=options.bind,
            start_timeout_seconds=options.start_timeout_seconds,
        )
        supervisor = stack.enter_context(Supervisor(options, lifeline, listener))
        for place in places:
            supervisor.start(place)
        if options.verbose:
            _tell(places, supervisor.pids, reason)
        server.start()
        return supervisor.run()


def _told(environ: Mapping[str, str], *, prefix: bool) -> dict[str, str]:
    """The environment, and what the ranks' output meets on its way."""
    facts = {TERMINAL_VARIABLE: sys.stdout.isatty(), PREFIXED_VARIABLE: prefix}
    others = {name: text for name, text in environ.items() if name not in facts}
    return others | {name: "1" for name, holds in facts.items() if holds}


def _tell(places: Sequence[Place], pids: Sequence[int], reason: str) -> None:
    complain(reason)
    for place, pid in zip(places, pids, strict=True):
        where = "any processor" if not place.cpus else "processors " + ",".join(map(str, place.cpus))
        threads = place.environ["OMP_NUM_THREADS"]
        complain(f"rank {place.topology.rank}: process {pid}, {where}, OMP_NUM_THREADS={threads}")


@dataclass(frozen=True, slots=True)
class _Pipe:
    """One stream of one rank, read by the launcher."""

    file: IO[bytes]
    lines: Lines
    outlet: Outlet
    record: Record | None


class Supervisor:
    """The processes of a job, from their start to the launcher's exit code. A context manager.

    Args:
        options: of the job.
        lifeline: see ``launch.guard``.
        listener: who is told what happens.
    """

    def __init__(self, options: Options, lifeline: int, listener: Listener) -> None:
        self._options, self._listener = options, listener
        self._job = Job(options.num_ranks)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outlets = outlets(prefix=options.prefix, timestamps=options.timestamps)
        #: Pipes that are open.
        self._pipes: list[_Pipe] = []
        #: Outlets that wait for their reader: the selector has them. It has not the pipes that lead to a full one.
        self._waiting: set[Outlet] = set()
        self._stderr: list[Lines] = []
        self._grace_ends: float | None = None
        self._is_sweeping = self._is_killing = False
        self._finish: Finish | None = None
        #: Do not wait until everything that was printed is written.
        self._is_hurried = False
        self._selector = selectors.DefaultSelector()
        self._lifeline = lifeline
        self._wakeup, self._wakened = socket.socketpair()

    def __enter__(self) -> Self:
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._lifeline, selectors.EVENT_READ, self._on_lifeline)
        self._selector.register(self._wakened, selectors.EVENT_READ, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wakeup.close()
        self._wakened.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def start(self, place: Place) -> None:
        """Start the next rank.

        Raises:
            LaunchError: it cannot be started; those that were are the guard's to end.
        """
        rank = place.topology.rank
        process = spawn(self._options.command, place, self._options.descriptors)
        self._processes.append(process)
        try:
            handle = os.pidfd_open(process.pid)
        except OSError as error:
            raise LaunchError(f"cannot watch the process of rank {rank}: {error.strerror}") from error
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._on_exit(rank, handle))
        for stream, file in ((_STDOUT, process.stdout), (_STDERR, process.stderr)):
            assert file is not None, "spawn asks for pipes"
            os.set_blocking(file.fileno(), False)
            outlet = self._outlets[stream]
            pipe = _Pipe(file, Lines(outlet.screen, (rank, stream)), outlet, self._record(rank, stream))
            self._pipes.append(pipe)
            self._selector.register(file, selectors.EVENT_READ, self._reader(pipe))
            if stream == _STDERR:
                self._stderr.append(pipe.lines)

    def _record(self, rank: int, stream: int) -> Record | None:
        directory = self._options.output_directory
        if directory is None:
            return None
        return Record(directory, rank, self._options.num_ranks, stream, self._listener.complain)

    def run(self) -> int:
        """Keep the job until it ends; returns the exit code."""
        while self._finish is None:
            self._turn()
        for pipe in list(self._pipes):
            self._drain(pipe)
        if self._listener.finished is None:
            self._outlets[_STDERR].put(self._report(self._finish))
        self._write_all(patience=None if self._finish.signum is None else self._options.grace_seconds)
        if self._listener.finished is not None:
            self._listener.finished(self._finish)
        return self._finish.exit_code

    # ---------------------------------------------------------------- one turn

    def _turn(self) -> None:
        self._wait(self._seconds_to_wait())
        reap_strangers({process.pid for process in self._processes if process.returncode is None})
        if self._grace_ends is not None and time.monotonic() >= self._grace_ends:
            self._grace_ends = None
            self._happened(GraceOver())
        if self._is_killing:
            self._is_killing = signal_all_below(signal.SIGKILL) > 0
        if self._is_sweeping and not below(os.getpid()):
            self._happened(Swept())

    def _wait(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            callback: Callable[[], object] = key.data
            callback()
        self._write()

    def _seconds_to_wait(self) -> float | None:
        waits = [] if self._grace_ends is None else [max(0.0, self._grace_ends - time.monotonic())]
        if self._is_sweeping or self._is_killing:
            waits.append(_SWEEP_SECONDS)
        return min(waits, default=None)

    def _happened(self, event: Event) -> None:
        for instruction in self._job.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case Terminate(ranks):
                self._signal_groups(ranks, signal.SIGTERM)
                self._signal_groups(ranks, signal.SIGCONT)  # one that was stopped would not hear it otherwise
            case Kill(ranks):
                self._signal_groups(ranks, signal.SIGKILL)
                self._is_killing = signal_all_below(signal.SIGKILL) > 0
            case StartGrace():
                self._grace_ends = time.monotonic() + self._options.grace_seconds
            case Sweep():
                self._is_sweeping = True
                signal_all_below(signal.SIGTERM)
                signal_all_below(signal.SIGCONT)
            case Finish():
                self._finish = instruction

    def _signal_groups(self, ranks: Sequence[int], signum: int) -> None:
        # A rank that has not been waited for keeps its number, and with it that of its group, from being used again.
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, signum)

    # ---------------------------------------------------------------- what happens

    def _on_exit(self, rank: int, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        exit_code = self._processes[rank].wait()
        self._listener.exited(rank, exit_code)
        self._happened(Exited(rank, exit_code))

    def _on_lifeline(self) -> None:
        signals = os.read(self._lifeline, 64)
        if not signals:
            self._selector.unregister(self._lifeline)
            self._is_hurried = True
            self._happened(Orphaned())
        self._signalled(signals)

    def _on_signal(self) -> None:
        self._signalled(self._wakened.recv(64))

    def _signalled(self, signals: bytes) -> None:
        for signum in signals:
            if signum in STOP_SIGNALS:
                self._is_hurried = self._finish is not None
                self._happened(SignalReceived(signum, time.monotonic()))

    # ---------------------------------------------------------------- output

    def _reader(self, pipe: _Pipe) -> Callable[[], object]:
        return lambda: self._read(pipe)

    def _read(self, pipe: _Pipe) -> bool:
        """Read once; returns whether there may be more."""
        try:
            data = os.read(pipe.file.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(pipe)
            return False
        if pipe.record is not None:
            pipe.record.write(data)
        pipe.outlet.put(pipe.lines.feed(data))
        return True

    def _drain(self, pipe: _Pipe) -> None:
        """Take what is left in a pipe whose writers have ended."""
        while self._read(pipe):
            pass
        if pipe in self._pipes:
            self._close(pipe)

    def _close(self, pipe: _Pipe) -> None:
        pipe.outlet.put(pipe.lines.end())
        self._pipes.remove(pipe)
        with suppress(KeyError):  # it is not registered while its outlet is full
            self._selector.unregister(pipe.file)
        pipe.file.close()
        if pipe.record is not None:
            pipe.record.close()

    def _write(self) -> None:
        for outlet in set(self._outlets):
            was_broken, waited = outlet.broken, outlet in self._waiting
            outlet.flush()
            if outlet.broken and not was_broken and outlet is self._outlets[_STDOUT]:
                self._happened(SignalReceived(signal.SIGPIPE, time.monotonic()))
            if bool(outlet.pending) != waited:
                self._wait_for(outlet) if outlet.pending else self._go_on(outlet)
            if outlet.is_full:
                self._pause(outlet)

    def _write_all(self, patience: float | None) -> None:
        """Wait until everything is written; not longer than ``patience`` seconds, and not after another signal."""
        self._write()
        end = float("inf") if patience is None else time.monotonic() + patience
        while self._waiting and not self._is_hurried and (left := end - time.monotonic()) > 0:
            self._wait(None if patience is None else left)

    def _wait_for(self, outlet: Outlet) -> None:
        self._waiting.add(outlet)
        self._selector.register(outlet.fd, selectors.EVENT_WRITE, lambda: None)

    def _go_on(self, outlet: Outlet) -> None:
        self._waiting.discard(outlet)
        self._selector.unregister(outlet.fd)
        for pipe in self._pipes:
            if pipe.outlet is outlet and pipe.file not in self._selector.get_map():
                self._selector.register(pipe.file, selectors.EVENT_READ, self._reader(pipe))

    def _pause(self, outlet: Outlet) -> None:
        for pipe in self._pipes:
            with suppress(KeyError):
                if pipe.outlet is outlet:
                    self._selector.unregister(pipe.file)

    # ---------------------------------------------------------------- the last words

    def _report(self, finish: Finish) -> bytes:
        """What to say at the end."""
        if finish.failure is not None:
            tail = self._stderr[finish.failure.rank].tail
            return describe(finish.failure, list(tail))
        if finish.signum in STOP_SIGNALS:
            return f"reigen run: stopped by {signal_name(finish.signum)}\n".encode()
        return b""


def describe(failure: Failure, tail: Sequence[bytes]) -> bytes:
    """The block that is printed last: which rank failed first, how, and its last words.

    Args:
        failure: what happened.
        tail: the last lines of that rank's stderr.
    """
    code = failure.exit_code
    how = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
    block = [f"reigen run: rank {failure.rank} failed first: {how}".encode()]
    if tail:
        block += [b"  the last lines of its stderr:", *(b"    " + visible(line) for line in tail)]
    else:
        block.append(b"  it wrote nothing to stderr")
    if failure.num_stopped:
        others = "1 other rank was" if failure.num_stopped == 1 else f"{failure.num_stopped} other ranks were"
        block.append(f"  {others} stopped because of it".encode())
    return b"\n".join(block) + b"\n"
