"""Discovery of the hosts of an elastic job: a program of the user's, or an engine, is asked again and again.

The program prints a line for each host that may be used: ``name`` or ``name:slots``. It is never waited for: the loop
tells when it has ended, and one that does not is killed. An engine answers at once (``launch.base.JobPlan.poll``).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from reigen.errors import ConfigError, LaunchError
from reigen.launch.base import PolledHost
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.process_tree import dies_with_parent, signal_name
from reigen.resources.limits import explain_limit

#: Seconds between the end of one run and the next.
POLL_SECONDS = 1.0
#: How long a run may take.
RUN_SECONDS = 30.0
#: Most bytes that it may print.
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_HOSTS = 1 << 14
_READ_BYTES = 1 << 16
_LINE = re.compile(r"(?P<name>[^\s:,=\[\]]+|\[[\w:.%]+\])(?::(?P<slots>\d+))?")
_MOST_TEXT = 200
#: Seconds without another host or slot after which a job begins with fewer than it could use.
SETTLE_SECONDS = 3.0


def parse_discovered(text: str, slots_per_host: int) -> tuple[tuple[str, int], ...]:
    r"""Parse the output of a discovery program into hosts and their slots; a host with 0 slots counts as absent.

    Args:
        text: lines ``host`` or ``host:slots``; empty ones count for nothing.
        slots_per_host: of hosts without a number.

    Raises:
        ConfigError: a line has another form, or names a host a second time.

    Example:
        >>> parse_discovered("h1:2\n\nh2\n", 4)
        (('h1', 2), ('h2', 4))
    """
    hosts: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"it has printed {line[:_MOST_TEXT]!r}, which is neither 'host' nor 'host:slots'")
        name = match["name"].strip("[]")
        if name in hosts:
            raise ConfigError(f"it has named host {name} twice")
        hosts[name] = slots_per_host if match["slots"] is None else int(match["slots"])
    if len(hosts) > _MAX_HOSTS or sum(hosts.values()) > 1 << 20:
        raise ConfigError(f"it has named {len(hosts)} hosts with {sum(hosts.values())} slots: too many")
    return tuple((name, slots) for name, slots in hosts.items() if slots)


def describe_missing_slots(hosts: Sequence[tuple[str, int]], options: ElasticOptions) -> str:
    """Describe a list of hosts with too few slots for the job; empty: there are enough."""
    num_slots = sum(slots for _, slots in hosts)
    if options.discovery is None or num_slots >= options.min_ranks:
        return ""
    listed = "no slots" if not num_slots else f"{num_slots} slot{'s' if num_slots > 1 else ''}"
    processes = "1 process is" if options.min_ranks == 1 else f"{options.min_ranks} processes are"
    needs = "; it must print host or host:slots for each host that may be used" if not num_slots else ""
    return f"the discovery script {options.discovery} lists {listed}, and {processes} needed at least{needs}"


def discovery_command(text: str) -> list[str]:
    """Return the words of the command: a file's name, which may hold blanks, or a command with arguments.

    Raises:
        ConfigError: it makes no sense.
    """
    if Path(text).is_file():
        return [str(Path(text).absolute())]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--host-discovery-script {text}: {error}") from None
    if not words:
        raise ConfigError("--host-discovery-script: the program has no name")
    return words


class DiscoveryRuns:
    """Runs of a discovery program, one after the other.

    Args:
        command: program and arguments.
        environ: its environment.
        slots_per_host: of hosts that it prints without a number.
        loop: waits for it.
        on_hosts: called with the hosts after each run that went well.
        on_problem: called with the reason after each run that did not.
        excluded: gets the process id of each run while it lasts, for it is no process of the job.
    """

    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        slots_per_host: int,
        loop: LauncherLoop,
        on_hosts: Callable[[tuple[tuple[str, int], ...]], None],
        on_problem: Callable[[str], None],
        excluded: set[int],
    ) -> None:
        self._command, self._environ, self._slots_per_host = command, dict(environ), slots_per_host
        self._loop, self._on_hosts, self._on_problem = loop, on_hosts, on_problem
        self._excluded = excluded
        self._process: subprocess.Popen[bytes] | None = None
        self._handle = -1
        self._outputs: dict[int, bytearray] = {}
        self._next_at = 0.0
        self._deadline = inf
        self._is_closed = False

    def turn(self) -> float | None:
        """Begin the next run when it is due, kill one that takes too long; returns seconds until the next call."""
        if self._is_closed:
            return None
        now = time.monotonic()
        if self._process is not None:
            if now < self._deadline:
                return self._deadline - now
            self._end(f"it has not ended within {RUN_SECONDS:g} s, and was killed")
            return POLL_SECONDS
        if now >= self._next_at:
            self._begin(now)
            return RUN_SECONDS if self._process is not None else 0.0
        return self._next_at - now

    def close(self) -> None:
        """Run it no more. May be called twice."""
        self._is_closed = True
        self._reap()

    def _begin(self, now: float) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=self._environ,
                start_new_session=True,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  it takes no lock
            )
            self._handle = os.pidfd_open(process.pid)
        except OSError as error:
            self._next_at = now + POLL_SECONDS
            self._on_problem(f"it cannot be run: {explain_limit(error).strerror}")
            return
        self._process, self._deadline = process, now + RUN_SECONDS
        self._excluded.add(process.pid)
        self._outputs = {}
        for file in (process.stdout, process.stderr):
            assert file is not None, "pipes were asked for"
            number = file.fileno()
            os.set_blocking(number, False)
            self._outputs[number] = bytearray()
            self._loop.watch(number, self._reader(number))
        self._loop.watch(self._handle, self._on_exit)

    def _reader(self, number: int) -> Callable[[], object]:
        return lambda: self._read(number)

    def _read(self, number: int) -> bool:
        """Read once; returns whether there may be more."""
        try:
            data = os.read(number, _READ_BYTES)
        except BlockingIOError:
            return False
        output = self._outputs[number]
        output += data
        if len(output) > _MAX_OUTPUT_BYTES:
            self._end(f"it has printed more than {_MAX_OUTPUT_BYTES >> 20} MiB, and was killed")
            return False
        if not data:
            self._loop.unwatch(number)
        return bool(data)

    def _on_exit(self) -> None:
        for number in list(self._outputs):
            while self._process is not None and self._read(number):
                pass
        if self._process is None:
            return
        _kill_group(self._process)  # what it has left behind, before its number can be another's
        code = self._process.wait()
        out, err = (bytes(each).decode(errors="replace") for each in self._outputs.values())
        if code:
            how = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
            words = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
            self._end(f"it has failed ({how}){words and ': '}{words[:_MOST_TEXT]}")
            return
        try:
            hosts = parse_discovered(out, self._slots_per_host)
        except ConfigError as error:
            self._end(str(error))
            return
        self._reap()
        self._next_at = time.monotonic() + POLL_SECONDS
        self._on_hosts(hosts)

    def _end(self, problem: str) -> None:
        self._reap()
        self._next_at = time.monotonic() + POLL_SECONDS
        self._on_problem(problem)

    def _reap(self) -> None:
        """Kill the rest of a run, and forget it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            _kill_group(process)
            process.wait()
        self._excluded.discard(process.pid)
        self._deadline = inf
        for number in self._outputs:
            self._loop.unwatch(number)
        self._loop.unwatch(self._handle)
        os.close(self._handle)
        for file in (process.stdout, process.stderr):
            if file is not None:
                file.close()


class HostPolls:
    """Questions to the engine of a job, each second, which hosts there are.

    Args:
        poll: as ``JobPlan.poll``.
        loop: for it.
        on_hosts: called with hosts and slots after each question.

    Attributes:
        hosts: by name, all that there ever were, as they were named last.
    """

    def __init__(
        self,
        poll: Callable[[LauncherLoop], Sequence[PolledHost]],
        loop: LauncherLoop,
        on_hosts: Callable[[tuple[tuple[str, int], ...]], None],
    ) -> None:
        self._poll, self._loop, self._on_hosts = poll, loop, on_hosts
        self.hosts: dict[str, PolledHost] = {}
        self._next_at = 0.0
        self._is_closed = False

    def turn(self) -> float | None:
        """Ask when it is time to; returns seconds until the next call."""
        if self._is_closed:
            return None
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + POLL_SECONDS
            found = [host for host in self._poll(self._loop) if host.slots]
            self.hosts |= {host.name: host for host in found}
            self._on_hosts(tuple((host.name, host.slots) for host in found))
        return max(0.0, self._next_at - time.monotonic())

    def close(self) -> None:
        """Ask no more. May be called twice."""
        self._is_closed = True


def can_begin(num_slots: int, options: ElasticOptions, unchanged_seconds: float) -> bool:
    """Decide whether a job begins with the slots that an engine has granted so far: they come one after the other.

    ``unchanged_seconds``: since when there were no more, nor fewer.
    """
    if num_slots >= options.max_ranks:
        return True
    return num_slots >= options.min_ranks and unchanged_seconds >= SETTLE_SECONDS


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def first_discovery_error(command: str, problem: str) -> LaunchError:
    """Make the error for a program that has failed before it has ever named hosts."""
    return LaunchError(f"--host-discovery-script {command}: {problem}; nothing was started")
