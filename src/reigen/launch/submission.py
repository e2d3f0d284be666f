"""Interface to engines that `reigen launch` submits a job to, and the loop that follows that job to its end.

Outside a job of the engine, `reigen launch --launcher NAME` makes a job of its options and submits it; in the job, the
launcher of the same name, or ``nodes``, starts the ranks. A `Submission` knows the engine; all else is here, once:

a. The factory, a line in SUBMITTERS, gets a `SubmissionRequest`. It checks what can be checked without asking anybody,
   and raises ConfigError. ``preview`` is what `--print` shows; nothing else is called then.
b. ``submit`` returns when the engine has taken the job. From then on ``poll`` is asked about once a second for the
   job's state, and ``read_output`` twice a second for what it has printed since. While it waits, what it waits for is
   said every 30 s.
c. SIGINT, SIGTERM and SIGHUP cancel the job, once; the end is waited for, as long as its processes' grace and a minute.
   A second one leaves it to the engine. While the engine is asked for something, the first one is said at once and
   waits for that, but a second one does not.
d. ``read_output`` may return a part of what there is, so that signals and states count, too. It is called until there
   is nothing more when ``poll`` has said that the job has ended. The exit code is the job's, or 128 + n after a signal
   n here.
e. ``close`` comes last in any case, and may be called twice.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from reigen.errors import LaunchError
from reigen.launch.options import complain
from reigen.resources.limits import explain_limit

#: Factory ``(request) -> Submission`` of each launcher that submits; a module is imported when it is chosen.
SUBMITTERS: Mapping[str, str] = {
    "kubernetes": "reigen.launch.kubernetes.submission:KubernetesSubmission",
    "sge": "reigen.launch.sge.submission:SgeSubmission",
    "yarn": "reigen.launch.yarn.submission:YarnSubmission",
}

_OUTPUT_SECONDS = 0.5
_POLL_SECONDS = 1.0
#: The same when the job has waited or run for longer than that many seconds.
_LATER, _LATER_POLL_SECONDS = 60.0, 5.0
_NEWS_SECONDS = 30.0
#: How long an engine may not answer before the job is given up, and a cancelled job take to end after its own grace.
_UNANSWERED_SECONDS = 600.0
_CANCEL_SECONDS = 60.0
_CLIENT_SECONDS = 60.0
#: Stop signals that come so soon after another one are the same.
_SAME_SIGNAL_SECONDS = 0.3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class SubmissionOptions:
    """Options of `reigen launch` about the job that is submitted, under MXNet's names; each engine reads its own.

    Attributes:
        job_name: the job's name; None: made of the command.
        queue: queue of the engine; None: the engine's own choice.
        worker_cores, server_cores: processors of each; None: not asked for.
        worker_memory, server_memory: memory of each, as ``4g``; None: not asked for.
        gpus: GPUs of each worker; None: not asked for.
        sge_log_dir: where Grid Engine writes what the job prints; None: the working directory.
        sge_pe: parallel environment; None: the only one that will do.
        kube_namespace, kube_worker_image, kube_server_image, kube_worker_template, kube_server_template: Kubernetes'.
        pods: how many pods the workers share; None: one each.
        hdfs_tempdir: directory of the job's files in HDFS.
        archives, files: files that the job gets, unpacked or as they are.
        auto_file_cache: send files that the command names, too.
        containers_by_host: one container on each node, for as many workers as it has room for.
    """

    job_name: str | None = None
    queue: str | None = None
    worker_cores: int | None = None
    server_cores: int | None = None
    worker_memory: str | None = None
    server_memory: str | None = None
    gpus: int | None = None
    sge_log_dir: Path | None = None
    sge_pe: str | None = None
    kube_namespace: str | None = None
    kube_worker_image: str | None = None
    kube_server_image: str | None = None
    kube_worker_template: Path | None = None
    kube_server_template: Path | None = None
    pods: int | None = None
    hdfs_tempdir: str | None = None
    archives: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    auto_file_cache: bool = True
    containers_by_host: bool = False


@dataclass(frozen=True, slots=True)
class SubmissionRequest:
    """Job that the user wants, as `reigen launch` has read it.

    Attributes:
        arguments: those of `reigen launch` before the command, for the one that runs in the job, where an option that
            is added behind them wins: ``["reigen", "launch", *arguments, "--launcher", "nodes", "--", *command]``.
        command: the user's program and its arguments.
        num_workers, num_servers: of processes.
        options: see there.
        environ: the user's environment, with the variables of `--env`.
        exports: names of the variables of `--env`.
        directory: the working directory.
        grace_seconds: how long the job's processes have from a signal to their end.
    """

    arguments: tuple[str, ...]
    command: tuple[str, ...]
    num_workers: int
    num_servers: int
    options: SubmissionOptions = field(default_factory=SubmissionOptions)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    exports: tuple[str, ...] = ()
    directory: Path = field(default_factory=Path.cwd)
    grace_seconds: float = 5.0


class SubmittedPhase(Enum):
    """Phase of a submitted job."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class SubmittedState:
    """State of a submitted job.

    Attributes:
        phase: it has not begun, it runs, or it has ended.
        reason: while it waits, what for; when it has ended in another way than by its own exit, how. One line, or "".
        exit_code: the job's, when it has ended; None: the engine does not know it, and ``reason`` says why.
    """

    phase: SubmittedPhase
    reason: str = ""
    exit_code: int | None = None


class NoAnswerError(LaunchError):
    """Error of an engine's client that has not answered in time, and may have done its work, or not."""


class Submission(Protocol):
    """Job for an engine, before and after it was submitted."""

    @property
    def preview(self) -> str:
        """Text of everything that would be submitted, and by which command; without secrets."""

    @property
    def cancel_command(self) -> str:
        """Command by which the user removes the job; empty before it is submitted."""

    def submit(self) -> str:
        """Submit the job; returns its name for messages: ``Grid Engine job 17``.

        Raises:
            LaunchError: the engine does not take it; in its own words, and what to do.
        """

    def poll(self) -> SubmittedState:
        """Ask for the job's state; raises LaunchError where the engine does not answer now."""

    def read_output(self) -> Iterable[tuple[int, bytes]]:
        """Return some new output of the job, in pieces for descriptor 1 or 2; empty: there is none. Never waits."""

    def cancel(self) -> float:
        """Have the engine end the job, and return without waiting for that; raises LaunchError where it refuses.

        Returns:
            the seconds that the engine gives the job's processes, where they are its own to give; else 0.
        """

    def close(self) -> Sequence[str]:
        """Remove the files made for the job; returns those that could not be, each with the command for it."""


SubmissionFactory = Callable[[SubmissionRequest], Submission]


def find_submitter(name: str) -> SubmissionFactory:
    """Import the factory of a launcher that is in SUBMITTERS."""
    module, _, attribute = SUBMITTERS[name].partition(":")
    return cast(SubmissionFactory, getattr(import_module(module), attribute))


def run_submission(
    submission: Submission, write: Callable[[int, bytes], None] | None = None, *, grace_seconds: float = 0.0
) -> int:
    """Submit a job and follow it to its end; returns its exit code. Messages for the user go to stderr.

    Args:
        submission: the job.
        write: writes output to descriptor 1 or 2; None: to those of this process.
        grace_seconds: how long the job's processes have to end when it is cancelled.

    Raises:
        LaunchError: the job cannot be submitted, or the engine has not answered for minutes.
    """
    name = "the job"
    with _stop_signals() as stops:
        try:
            with stops.reporting("the job is cancelled as soon as it is submitted"):
                name = submission.submit()
            complain(f"{name} is submitted; Ctrl-C cancels it ({submission.cancel_command})")
            return _Follower(submission, name, stops, write or _write_all, _CANCEL_SECONDS + grace_seconds).run()
        except _SecondSignal:
            command = submission.cancel_command
            complain(f"a second signal: {name} may still be there{command and '; to remove it: '}{command}")
            return 128 + stops.first
        finally:
            _close(submission, stops)


def _close(submission: Submission, stops: _StopSignals) -> None:
    what = "the files made for the job are being removed"
    if len(stops.received) > 1:
        complain(f"{what}; another signal leaves them")
    try:
        with stops.reporting(what):
            for message in submission.close():
                complain(message)
    except _SecondSignal:
        complain("another signal: files made for the job may be left")


class _Follower:
    """Loop that follows one job."""

    def __init__(
        self,
        submission: Submission,
        name: str,
        stops: _StopSignals,
        write: Callable[[int, bytes], None],
        cancel_seconds: float,
    ) -> None:
        self._submission, self._name, self._stops, self._write = submission, name, stops, write
        self._cancel_seconds = cancel_seconds
        self._began = self._answered = time.monotonic()
        self._next_poll = self._began
        self._next_news = self._began + _NEWS_SECONDS
        #: Signal by which the user has cancelled the job, and when.
        self._cancelled: tuple[int, float] | None = None
        self._state = SubmittedState(SubmittedPhase.WAITING)

    def run(self) -> int:
        """Follow it to its end."""
        is_busy = False
        while self._state.phase is not SubmittedPhase.ENDED:
            self._stops.wait(0.0 if is_busy else _OUTPUT_SECONDS)
            for signum in self._stops.take():
                if self._cancelled is not None:
                    return self._leave("a second signal")
                self._cancel(signum)
            now = time.monotonic()
            if now >= self._next_poll:
                with self._stops.reporting("the job is cancelled as soon as its engine answers"):
                    self._poll(now)
                later = now - self._began > _LATER and self._cancelled is None
                self._next_poll = time.monotonic() + (_LATER_POLL_SECONDS if later else _POLL_SECONDS)
            with self._stops.reporting("the job is cancelled as soon as somebody reads its output"):
                is_busy = self._copy()
            if self._cancelled is not None and now - self._cancelled[1] > self._cancel_seconds:
                return self._leave(f"it has not ended within {self._cancel_seconds:g} s")
        return self._write_rest() or self._end()

    def _write_rest(self) -> int:
        """Write the rest of the output; returns an exit code if a signal came, else 0."""
        while True:
            with self._stops.reporting("the rest of the job's output is not written"):
                has_some = self._copy()
            for signum in self._stops.take() if has_some else ():
                complain(f"{signal.Signals(signum).name}: the rest of the job's output is not written")
                return 128 + signum
            if not has_some:
                return 0

    def _poll(self, now: float) -> None:
        before = self._state.phase
        try:
            self._state = self._submission.poll()
            self._answered = time.monotonic()
        except LaunchError as error:
            if now - self._answered > _UNANSWERED_SECONDS:
                raise LaunchError(f"{error}\n{self._name} is given up; to remove it: {self._command}") from None
            self._news(now, f"{self._name}: no answer since {now - self._answered:.0f} s: {error}")
            return
        waiting = self._state.phase is SubmittedPhase.WAITING
        if before is SubmittedPhase.WAITING and self._state.phase is SubmittedPhase.RUNNING:
            complain(f"{self._name} runs, after {now - self._began:.0f} s")
        elif waiting and self._cancelled is None:
            why = f": {self._state.reason}" if self._state.reason else ""
            self._news(now, f"{self._name} has waited for {now - self._began:.0f} s{why}")

    def _news(self, now: float, text: str) -> None:
        if now >= self._next_news:
            complain(text)
            self._next_news = now + _NEWS_SECONDS

    def _copy(self) -> bool:
        """Write some of the job's new output; returns whether there was any."""
        has_some = False
        for descriptor, data in self._submission.read_output():
            has_some = True
            try:
                self._write(descriptor, data)
            except BrokenPipeError:  # nobody reads it any more
                if self._cancelled is None:
                    self._cancel(signal.SIGPIPE)
        return has_some

    def _cancel(self, signum: int) -> None:
        self._cancelled = signum, time.monotonic()
        self._next_poll = 0.0
        complain(f"{signal.Signals(signum).name}: {self._name} is cancelled; waiting for its end")
        try:
            with self._stops.reporting("the engine has not taken that yet"):
                engine_seconds = self._submission.cancel()
            self._cancel_seconds = max(self._cancel_seconds, _CANCEL_SECONDS + engine_seconds)
        except LaunchError as error:
            complain(f"{error}; to remove it: {self._command}")

    @property
    def _command(self) -> str:
        return self._submission.cancel_command

    def _leave(self, reason: str) -> int:
        assert self._cancelled is not None, "only a cancelled job is left alone"
        complain(f"{reason}: {self._name} may still be there; to remove it: {self._command}")
        return 128 + self._cancelled[0]

    def _end(self) -> int:
        if self._cancelled is not None:
            return 128 + self._cancelled[0]
        if self._state.exit_code is None or self._state.reason:
            complain(f"{self._name} has ended: {self._state.reason or 'the engine does not say how'}")
        return 1 if self._state.exit_code is None else self._state.exit_code


class _SecondSignal(KeyboardInterrupt):
    """A second stop signal has come while the engine is asked for something."""


class _StopSignals:
    """Stop signals of this process, none of which is lost.

    Attributes:
        received: all of them.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._received_at = -math.inf
        self._num_taken = 0
        self._outlook = ""

    @property
    def first(self) -> int:
        """The first one."""
        return self.received[0]

    def wait(self, seconds: float) -> None:
        """Wait; a signal is seen when that is over."""
        time.sleep(seconds)

    def take(self) -> list[int]:
        """Return the signals that have come since the last call."""
        taken = self.received[self._num_taken :]
        self._num_taken += len(taken)
        return taken

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """While something lasts that may take long: say what comes of the first signal; end it at the second one."""
        self._outlook = what
        try:
            yield
        finally:
            self._outlook = ""

    def receive(self, signum: int, _frame: object) -> None:
        """Take note of a signal: the handler of all of them. A terminal that closes sends several, wrappers theirs."""
        now = time.monotonic()
        if now - self._received_at < _SAME_SIGNAL_SECONDS:
            return
        self._received_at = now
        self.received.append(signum)
        if not self._outlook:
            return
        if len(self.received) > 1:
            raise _SecondSignal
        with suppress(RuntimeError):  # it came in the middle of another message
            complain(f"{signal.Signals(signum).name}: {self._outlook}; a second signal does not wait for that")


@contextmanager
def _stop_signals() -> Iterator[_StopSignals]:
    stops = _StopSignals()
    # nohup(1) says that SIGHUP shall not matter
    handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stops.receive) for number in handled}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write without a buffer, which would be written again at the end of this process."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def run_client(
    command: Sequence[str], *, input_text: str | None = None, timeout_seconds: float = _CLIENT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a client command of an engine to its end, out of the reach of a terminal's Ctrl-C.

    Raises:
        LaunchError: it cannot be started; whatever exit code it has is the caller's matter.
        NoAnswerError: it has not ended in time.
    """
    try:
        return subprocess.run(
            command,
            check=False,
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]} has not answered within {timeout_seconds:g} s") from None
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {explain_limit(error).strerror}") from None
