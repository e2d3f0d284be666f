"""Conformance suite of launchers: every launcher passes the same one, with real jobs of `reigen run`.

A job's processes are known by a mark in their environment, agents by the same mark in their PYTHONPATH: so processes
that a job leaves behind are found, even when their parents have ended.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from reigen.cluster.bootstrap.rank_lock import read_process_stat
from reigen.files import write_atomically
from reigen.launch.base import LauncherFactory, find_launcher
from reigen.launch.hosts import parse_hosts
from reigen.launch.options import LaunchOptions
from reigen.testing.environment import clean_environment

_MARK = "REIGEN_TEST_MARK"
#: How many jobs many_starts starts.
_STARTS_VARIABLE = "REIGEN_TEST_STARTS"
#: An agent's program, and an option of commands that become agents by themselves.
_AGENT, _NODE = "reigen.launch.agent", "--nodes-from-env"
#: With it, hosts are not named.
_DISCOVERY = "--host-discovery-script"
#: Beginning of every rank's program. The rank is in Reigen's variable, or in that of the engine that has started it.
_RANK = """
import os, signal, subprocess, sys, time
rank = int(next(os.environ[name] for name in ("REIGEN_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
_WAIT = "say('ready'); time.sleep(600)"
_NO_SPACE = os.strerror(errno.ENOSPC)
#: Texts that shells, argument lists and variables distort if they are not careful.
_SPECIAL_ARGUMENTS = ("a b", "$HOME", '"', "'", "*", ";", "--flag", "x=y", "two\nlines", "ü", "\\")


def check_launcher(
    make: str | LauncherFactory,
    hosts: str,
    *,
    leave_out: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    prefix: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    records: Callable[[], str] | None = None,
    is_empty: Callable[[], bool] | None = None,
    cancel_job: Callable[[], bool] | None = None,
    kill_host: Callable[[str], object] | None = None,
    directory: str | None = None,
    full_directory: str | None = None,
) -> dict[str, str]:
    """Run the suite on a launcher.

    The case many_starts starts 5 jobs, or as many as REIGEN_TEST_STARTS says. The case resize is an elastic job whose
    hosts come and go; where the launcher refuses elastic jobs, its sentence is the result. killed_host is the last one.

    Not covered, so for the launcher's own tests: ``remote_shell`` (`--sync-dst-dir`), waiting in ``allocate`` and what
    ``close`` gives back after it, ``JobPlan.addresses``, PS processes, and what ``explain_exit`` says of other failures
    than a missing Python.

    Args:
        make: its name, as `--launcher` takes it, or its factory: something at the top of a module.
        hosts: hosts and slots, as `-H` takes them; at least two slots.
        leave_out: names of cases that do not hold for it, and why; for a launcher without agents killed_agent,
            stopped_agent, notice, agent_environment and missing_python.
        arguments: further options of `reigen run`.
        prefix: command before that of a job: a program that runs the rest elsewhere, in another namespace
            for example. Process ids are those of this process's namespace.
        environ: variables that jobs inherit besides this process's.
        timeout: seconds for each job.
        records: returns all that the engine shows to others about its jobs, where the secret must not be.
        is_empty: returns whether the engine has nothing left of a job that has ended; waited for.
        cancel_job: cancels the job that runs now, or its part in this allocation, as users of the engine do; returns
            whether there was something to cancel. None: the case cancelled_job is left out.
        kill_host: ends a host, without a word, with all that runs there; gets its name. It need not come back. None:
            the case killed_host is left out.
        directory: one that all hosts share with this process, for a file; by default a temporary one.
        full_directory: one of the launcher's host, on a disk without space. None: only the job's own stdout is full.

    Returns:
        The result of each case: "passed", or why it was left out.

    Raises:
        AssertionError: a case failed; its name and the job's output are in the message.
        ValueError: ``leave_out`` names a case that there is not, or there are fewer than two slots.
    """
    skipped = dict(leave_out or {})
    if unknown := sorted(skipped.keys() - _CASES.keys()):
        raise ValueError(f"there are no cases {', '.join(unknown)}; there are {', '.join(_CASES)}")
    name = make if isinstance(make, str) else f"{make.__module__}:{make.__qualname__}"
    check = _LauncherCheck(
        name,
        hosts,
        arguments,
        prefix,
        dict(environ or {}),
        timeout,
        records,
        is_empty,
        cancel_job,
        kill_host,
        directory,
        full_directory,
    )
    if check.size < 2:
        raise ValueError(f"hosts {hosts!r} have fewer than two slots")
    for case, body in _CASES.items():
        if case not in skipped:
            try:
                if reason := body(check):
                    skipped[case] = reason
            except AssertionError as error:
                error.add_note(f"launcher {name}, case {case}")
                raise
    return {case: skipped.get(case, "passed") for case in _CASES}


def looks(shortest: float = 0.01) -> Iterator[float]:
    """Yield the time again and again, to a loop that waits for what nothing announces.

    The pauses in between are three times as long as the last look took, at most 0.3 s: a look at all processes takes
    milliseconds, a question to an engine many, of processors that what is awaited needs.

    Args:
        shortest: the shortest pause, in seconds.
    """
    pause = threading.Event()
    while True:
        began = time.monotonic()
        yield began
        pause.wait(min(max(shortest, 3 * (time.monotonic() - began)), 0.3))


@dataclass(frozen=True)
class _Ended:
    """Finished job, of which nothing is left."""

    exit_code: int
    stdout: bytes
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.decode().splitlines()

    def expect(self, exit_code: int) -> _Ended:
        assert self.exit_code == exit_code, f"exit code {self.exit_code}, not {exit_code}: {self.lines}\n{self.stderr}"
        return self


@dataclass(frozen=True)
class _LauncherCheck:
    """Launcher under test, and its hosts."""

    name: str
    hosts: str
    arguments: Sequence[str]
    prefix: Sequence[str]
    environ: dict[str, str]
    timeout: float
    records: Callable[[], str] | None
    is_empty: Callable[[], bool] | None
    cancel_job: Callable[[], bool] | None
    kill_host: Callable[[str], object] | None
    directory: str | None
    full_directory: str | None

    @property
    def slots(self) -> list[int]:
        return [host.slots for host in parse_hosts(self.hosts)]

    @property
    def size(self) -> int:
        return sum(self.slots)

    def run(self, program: str | Sequence[str], *options: str, **more: str) -> _Ended:
        """Run a job to its end; see `start`."""
        with self.start(program, *options, **more) as job:
            return job.finish()

    @contextmanager
    def start(
        self, program: str | Sequence[str], *options: str, stdout: str | None = None, **more: str
    ) -> Iterator[_Job]:
        """Start a job on all slots, and kill in the end all that is left of it.

        Args:
            program: the ranks' program: Python behind `_RANK`, or a command line.
            options: of `reigen run`, behind those that all jobs have.
            stdout: a file for its output, which is not read.
            more: environment variables.
        """
        mark = uuid.uuid4().hex
        path = os.pathsep.join([*filter(None, sys.path), f"no-such-directory/{mark}"])
        environ = {**clean_environment(), "REIGEN_RANK": "77", **self.environ, **more, _MARK: mark, "PYTHONPATH": path}
        command = [*self.prefix, sys.executable, "-m", "reigen", "run"]
        command += [] if _DISCOVERY in options else ["-np", str(self.size), "-H", self.hosts]
        command += ["--launcher", self.name, *self.arguments, *options]
        command += [sys.executable, "-Sc", _RANK + program] if isinstance(program, str) else program
        with ExitStack() as stack:
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            shown = out if stdout is None else stack.enter_context(os.fdopen(os.open(stdout, os.O_WRONLY), "wb"))
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=shown, stderr=err)
            job = _Job(process, (out.fileno(), err.fileno()), mark, self)
            try:
                yield job
            finally:
                for pid in job.processes():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.kill()
                process.wait()


class _Job:
    """Running job."""

    def __init__(
        self, process: subprocess.Popen[bytes], files: tuple[int, int], mark: str, check: _LauncherCheck
    ) -> None:
        self._process, self._files, self.mark, self._check = process, files, mark, check
        self._deadline = time.monotonic() + check.timeout

    def processes(self) -> dict[int, str]:
        """Find everything on this host that belongs to it: command lines by process id. Also in other namespaces."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has ended meanwhile, or belongs to another user
                    has_mark = self.mark.encode() in (entry / "environ").read_bytes()
                    if has_mark and (command := (entry / "cmdline").read_bytes()):  # a zombie has none
                        found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def read(self, stream: int = 0) -> bytes:
        """Return its output until now."""
        file = self._files[stream]
        return os.pread(file, os.fstat(file).st_size, 0)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition that is not announced."""
        for now in looks():
            if condition():
                return
            assert now < self._deadline, f"not in time: {what}; {self.processes()}\n{self._output()}"

    def wait_until_ready(self) -> None:
        """Wait until all ranks have printed that they are ready."""
        self.wait_until(
            lambda: self.read().count(b"ready") >= self._check.size or self._process.poll() is not None,
            "ranks are ready",
        )
        assert self._process.returncode is None, f"it ended early: {self._output()}"

    def launcher(self) -> tuple[int, int]:
        """Return the process that the user has started, and the supervisor, its child."""
        pids = [pid for pid, command in self.processes().items() if _is_launcher(command)]
        parents = {pid: int(read_process_stat(pid)[1]) for pid in pids}
        [supervisor] = [pid for pid in pids if parents[pid] in pids]
        return parents[supervisor], supervisor

    def agents(self) -> list[int]:
        """Return the process ids of its agents, in ascending order; there is at least one."""
        found = sorted(pid for pid, command in self.processes().items() if _is_agent(command))
        assert found, f"no agent among {self.processes()}"
        return found

    def stop(self) -> bool:
        """Ask the process that the user has started to stop, as soon as it is there; returns whether it is."""
        pids = [pid for pid, command in self.processes().items() if _is_launcher(command)]
        for pid in pids:
            stat = read_process_stat(pid)
            if stat and int(stat[1]) not in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                    return True
        return False

    @property
    def has_ended(self) -> bool:
        """Return whether the command that started it has ended."""
        return self._process.poll() is not None

    def finish(self, *, empties: bool = True) -> _Ended:
        """Wait for its end, and until nothing of it is left; ``empties``: in the engine, too."""
        self.wait_until(lambda: self.has_ended, "the job ends")
        self.wait_until(lambda: not self.processes(), "nothing is left")
        if empties and self._check.is_empty is not None:
            self.wait_until(self._check.is_empty, "the engine has nothing left of it")
        return _Ended(self._process.returncode, self.read(), self.read(1).decode(errors="replace"))

    def _output(self) -> str:
        return (self.read() + self.read(1)).decode(errors="replace")


def _is_launcher(command: str) -> bool:
    return command.startswith(f"{sys.executable} -m reigen run ") and _NODE not in command


def _is_agent(command: str) -> bool:
    is_node = command.startswith(f"{sys.executable} -m reigen run ") and _NODE in command
    return is_node or command.startswith(f"{sys.executable} -P -m {_AGENT}")


# ---------------------------------------------------------------------------------------------- cases


def _all_ranks(check: _LauncherCheck) -> None:
    """Every rank runs once; variables of an outer job do not reach it."""
    ended = check.run("say('rank', rank)", "--no-prefix").expect(0)
    assert sorted(ended.lines) == sorted(f"rank {rank}" for rank in range(check.size)), ended


def _placement(check: _LauncherCheck) -> None:
    """Ranks fill one host after the other, and know where they are."""
    names = [f"REIGEN_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
    ended = check.run(f"say(*[os.environ[name] for name in {names}])", "--no-prefix").expect(0)
    expected, rank = [], 0
    for host, slots in enumerate(check.slots):
        for local in range(slots):
            crosses = [index for index, count in enumerate(check.slots) if count > local]
            expected.append(f"{rank} {check.size} {local} {slots} {crosses.index(host)} {len(crosses)}")
            rank += 1
    assert sorted(ended.lines) == sorted(expected), ended


def _too_many_ranks(check: _LauncherCheck) -> None:
    """More ranks than slots are an error before anything runs."""
    ended = check.run("say('ran')", "-np", str(check.size + 1))
    assert ended.exit_code != 0, ended
    assert "ran" not in ended.lines, ended
    assert "slots" in ended.stderr, ended


def _arguments(check: _LauncherCheck) -> None:
    """Arguments arrive as they were given."""
    code = _RANK + "say(ascii(sys.argv[1:]))"
    ended = check.run([sys.executable, "-Sc", code, *_SPECIAL_ARGUMENTS], "--no-prefix").expect(0)
    assert ended.lines == [ascii(list(_SPECIAL_ARGUMENTS))] * check.size, ended


def _environment(check: _LauncherCheck) -> None:
    """Variables arrive as they were given, long ones, too."""
    values = {f"AWKWARD_{number}": text for number, text in enumerate(_SPECIAL_ARGUMENTS)}
    code = f"say(os.environ['LONG'] == 'x' * 100_000, ascii([os.environ.get(name) for name in {sorted(values)}]))"
    ended = check.run(code, "--no-prefix", LONG="x" * 100_000, **values).expect(0)
    expected = f"True {[values[name] for name in sorted(values)]!a}"
    assert ended.lines == [expected] * check.size, ended


def _directory(check: _LauncherCheck) -> None:
    """Ranks run in the directory where the job was started."""
    ended = check.run("say(os.getcwd())", "--no-prefix").expect(0)
    assert ended.lines == [str(Path.cwd())] * check.size, ended


def _streams(check: _LauncherCheck) -> None:
    """stdout and stderr stay apart; lines are whole, and in the order of their rank."""
    code = "for i in range(2000): (sys.stdout, sys.stderr)[i % 2].write(f'{rank} {i} ' + 'x' * 100 + '\\n')"
    ended = check.run(code, "--no-prefix").expect(0)
    for parity, lines in enumerate((ended.lines, ended.stderr.splitlines())):
        for rank in range(check.size):
            own = [line for line in lines if line.startswith(f"{rank} ")]
            assert own == [f"{rank} {i} " + "x" * 100 for i in range(parity, 2000, 2)], f"rank {rank}: {own[:5]}"


def _prefixes(check: _LauncherCheck) -> None:
    """Lines begin with their rank, on both streams."""
    ended = check.run("say('out'); os.write(2, b'err\\n')").expect(0)
    assert sorted(ended.lines) == sorted(f"[{rank}] out" for rank in range(check.size)), ended
    assert sorted(ended.stderr.splitlines()) == sorted(f"[{rank}] err" for rank in range(check.size)), ended


def _bytes(check: _LauncherCheck) -> None:
    """Every byte value comes through; so does a megabyte without a line's end, in lines as long as are kept."""
    code = "data = bytes(range(256)) * 16 + b'x' * (1 << 20) + b'\\n'\nif rank == 1: sys.stdout.buffer.write(data)"
    ended = check.run(code, "--no-prefix").expect(0)
    head, rest = ended.stdout[:4096], ended.stdout[4096:]
    assert head == bytes(range(256)) * 16, head
    assert rest.replace(b"\n", b"") == b"x" * (1 << 20), f"{len(rest)} bytes, and others"


def _exit_code(check: _LauncherCheck) -> None:
    """A rank's exit code is the job's, and ends the others."""
    check.run(f"if rank == {check.size - 1}: sys.exit(7)\ntime.sleep(600)").expect(7)


def _first_failure(check: _LauncherCheck) -> None:
    """The rank that failed first is named last, with its last words."""
    last = check.size - 1
    ended = check.run(f"if rank == {last}: sys.exit('what happened')\ntime.sleep(600)").expect(1)
    block = ended.stderr[ended.stderr.index("reigen run: ") :].splitlines()
    assert re.fullmatch(rf"reigen run: rank {last}( \(host .+\))? failed first: exit code 1", block[0]), ended
    assert block[1:3] == ["  the last lines of its stderr:", "    what happened"], ended
    stopped = "1 other rank was" if last == 1 else f"{last} other ranks were"
    assert block[3:] == [f"  {stopped} stopped because of it"], ended


def _killed_rank(check: _LauncherCheck) -> None:
    """A rank that a signal ends gives 128 + n."""
    for signum in (signal.SIGKILL, signal.SIGSEGV):
        code = f"if rank == {check.size - 1}: os.kill(os.getpid(), {int(signum)})\ntime.sleep(600)"
        check.run(code).expect(128 + signum)


def _stubborn_rank(check: _LauncherCheck) -> None:
    """A rank that ignores SIGTERM is killed after the time of grace."""
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 1: sys.exit(5)\ntime.sleep(600)"
    check.run(code, "--grace-seconds", "0.3").expect(5)


def _orphans(check: _LauncherCheck) -> None:
    """Descendants of ranks in sessions of their own do not outlive the job, and do not keep it alive."""
    check.run("subprocess.Popen(['sleep', '600'], start_new_session=True)\nif rank == 1: sys.exit(5)").expect(5)


def _stopped_job(check: _LauncherCheck) -> None:
    """SIGINT and SIGTERM end the job, with all descendants of ranks."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        with check.start(f"subprocess.Popen(['sleep', '600'], start_new_session=True)\n{_WAIT}") as job:
            job.wait_until_ready()
            os.kill(job.launcher()[0], signum)
            ended = job.finish().expect(128 + signum)
            assert f"reigen run: stopped by {signum.name}" in ended.stderr, ended


def _killed_supervisor(check: _LauncherCheck) -> None:
    """Killed supervisor: no process of the job is left, on any host."""
    with check.start(_WAIT) as job:
        job.wait_until_ready()
        os.kill(job.launcher()[1], signal.SIGKILL)
        ended = job.finish().expect(128 + signal.SIGKILL)
        assert "the supervising process was ended by SIGKILL" in ended.stderr, ended


def _killed_watchdog(check: _LauncherCheck) -> None:
    """Killed first process: no process of the job is left, on any host."""
    with check.start(_WAIT) as job:
        job.wait_until_ready()
        os.kill(job.launcher()[0], signal.SIGKILL)
        job.finish()


def _killed_agent(check: _LauncherCheck) -> None:
    """Killed agent: its host is lost and named, and the others end."""
    with check.start(_WAIT) as job:
        job.wait_until_ready()
        os.kill(job.agents()[-1], signal.SIGKILL)
        ended = job.finish().expect(255)
        assert re.search(r"reigen run: host \S+ was lost, with ranks? ", ended.stderr), ended


def _stopped_agent(check: _LauncherCheck) -> None:
    """Agent that stands still: its host is lost when nothing was heard of it for a while, and the others end."""
    with check.start(_WAIT, REIGEN_PEER_TIMEOUT="1") as job:
        job.wait_until_ready()
        agents = [pid for pid in job.agents() if not _is_parent(pid, job.agents())]
        os.kill(agents[-1], signal.SIGSTOP)
        job.wait_until(lambda: b" was lost" in job.read(1), "the host is lost")
        with suppress(ProcessLookupError):
            os.kill(agents[-1], signal.SIGCONT)  # then it learns that the launcher has gone
        ended = job.finish().expect(255)
        assert "nothing has been heard of it for" in ended.stderr, ended


def _is_parent(pid: int, others: Sequence[int]) -> bool:
    """Return whether a process has one of the others as a child: an agent's watchdog, which does not talk."""
    return any(int((read_process_stat(other) or ["", "0"])[1]) == pid for other in others if other != pid)


def _notice(check: _LauncherCheck) -> None:
    """SIGTERM for one agent, as engines announce an end, reaches every rank, once; its host is named."""
    code = """
def hear(signum, frame):
    say('heard')
    os._exit(0)
signal.signal(signal.SIGTERM, hear)
"""
    with check.start(code + _WAIT, "--no-prefix") as job:
        job.wait_until_ready()
        agents = [pid for pid in job.agents() if not _is_parent(pid, job.agents())]
        os.kill(agents[-1], signal.SIGTERM)
        ended = job.finish().expect(128 + signal.SIGTERM)
        assert ended.lines.count("heard") == check.size, ended
        assert re.search(r"reigen run: host \S+ was sent SIGTERM", ended.stderr), ended


def _stopped_start(check: _LauncherCheck) -> None:
    """A job that is stopped while it starts leaves nothing: at once, and when the first agent or rank is there."""
    for num_processes in (1, 3, 5):
        with check.start(_WAIT) as job:
            job.wait_until(lambda: len(job.processes()) >= num_processes and job.stop(), "it has started")  # noqa: B023
            ended = job.finish()
            # before the interpreter is up, the signal ends it
            assert ended.exit_code in {128 + signal.SIGTERM, -signal.SIGTERM}, ended


def _unauthenticated_connections(check: _LauncherCheck) -> None:
    """A hundred connections without a secret do not harm the job."""
    code = """
import socket
host, _, port = os.environ["REIGEN_RENDEZVOUS"].rpartition(":")
sockets = [socket.create_connection((host.strip("[]"), int(port))) for _ in range(100)]
for number, each in enumerate(sockets):
    try: each.sendall(os.urandom(number))
    except OSError: pass
say('unharmed')
"""
    ended = check.run(code, "--no-prefix").expect(0)
    assert ended.lines == ["unharmed"] * check.size, ended


def _many_starts(check: _LauncherCheck) -> None:
    """Jobs, one after the other, leave no process, and no file in the temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(int(os.environ.get(_STARTS_VARIABLE, "5"))):
            check.run("pass", TMPDIR=directory).expect(0)
        left = [path.name for path in Path(directory).iterdir()]
        assert not left, left


def _agent_environment(check: _LauncherCheck) -> None:
    """Agents have the variables of their `AgentCommand`, not only those that a client process here inherits."""
    with check.start(_WAIT) as job:
        job.wait_until_ready()
        for pid in job.agents():
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            path = next((each for each in variables if each.startswith("PYTHONPATH=")), "no PYTHONPATH")
            # relative in this job's environment, absolute in the command
            assert re.search(rf"[=:]/[^:]*/no-such-directory/{job.mark}", path), f"an agent has {path}"
        os.kill(job.launcher()[0], signal.SIGTERM)
        job.finish()


def _missing_python(check: _LauncherCheck) -> None:
    """A Python that other hosts do not have is named, with a host, and nothing runs."""
    python = f"/no-such-directory/python-{secrets.token_hex(4)}"
    ended = check.run("say('ran')", "--remote-python", python)
    assert ended.exit_code != 0, ended
    assert b"ran" not in ended.stdout, ended
    assert python in ended.stderr, f"the message does not name {python}, which is missing: {ended.stderr}"
    if "cannot take part" in ended.stderr:  # the launcher was asked to explain that
        named = [host.name for host in parse_hosts(check.hosts) if f"\n  {host.name} " in ended.stderr]
        assert named, f"the message names no host: {ended.stderr}"


def _secret(check: _LauncherCheck) -> None:
    """The job's secret is on no command line, in no record of the engine's, and in the environment of ranks alone."""
    with check.start(f"say('secret', os.environ['REIGEN_SECRET'])\n{_WAIT}", "--no-prefix") as job:
        job.wait_until_ready()
        [secret] = {line.split()[1] for line in job.read().decode().splitlines() if line.startswith("secret")}
        for pid, command in job.processes().items():
            assert secret not in command, command
            with suppress(OSError):
                is_rank = "-Sc" in command and " -m reigen " not in command
                assert is_rank or secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), command
        assert check.records is None or secret not in check.records()
        os.kill(job.launcher()[0], signal.SIGTERM)
        job.finish()


def _missing_program(check: _LauncherCheck) -> None:
    """A program that is not there is named; the exit code is 127, as a shell's."""
    name = f"no-such-program-{secrets.token_hex(4)}"
    assert name in check.run([name]).expect(127).stderr


def _two_jobs(check: _LauncherCheck) -> None:
    """Two jobs at once have nothing to do with each other."""
    with check.start(f"{_WAIT}", "--no-prefix") as first:
        first.wait_until_ready()
        _all_ranks(replace(check, is_empty=None))  # the engine has the first one
        os.kill(first.launcher()[0], signal.SIGTERM)
        first.finish().expect(143)


def _collective(check: _LauncherCheck) -> None:
    """Ranks find each other, and compute together."""
    code = """
import os, numpy, reigen
reigen.init()
total = reigen.allreduce(numpy.full(1000, reigen.rank() + 1.0), op=reigen.Sum)
os.write(1, f"{reigen.size()} {total.min():g} {total.max():g}\\n".encode())
reigen.shutdown()
"""
    total = check.size * (check.size + 1) // 2
    ended = check.run([sys.executable, "-c", code], "--no-prefix").expect(0)
    assert ended.lines == [f"{check.size} {total} {total}"] * check.size, ended


def _unused_launcher(check: _LauncherCheck) -> None:
    """A launcher that never started anything has nothing to give back, however often it is asked."""
    options = LaunchOptions(("true",), check.size, hosts=tuple(parse_hosts(check.hosts)))
    launcher = find_launcher(check.name)(options, {**os.environ, **check.environ})
    assert not launcher.close()
    assert not launcher.close()


def _full_disk(check: _LauncherCheck) -> None:
    """Output that cannot be written ends the job, and says why; files that cannot be made are no obstacle, or named."""
    with check.start(f"say('x' * 100)\n{_WAIT}", "--no-prefix", stdout="/dev/full") as job:
        ended = job.finish().expect(128 + signal.SIGPIPE)
        assert _NO_SPACE in ended.stderr, ended
    if check.full_directory is None:
        return
    kept = check.run("say('x' * 100)", "--no-prefix", "--output-filename", f"{check.full_directory}/kept")
    assert _NO_SPACE in kept.stderr, f"nothing is said of the output that is not kept: {kept}"
    assert len(kept.lines) == (0 if kept.exit_code else check.size), kept
    ended = check.run("say('ran')", "--no-prefix", TMPDIR=check.full_directory)
    assert "Traceback" not in ended.stderr, ended
    if ended.exit_code:
        assert _NO_SPACE in ended.stderr, f"the message does not say that the disk is full: {ended}"
        assert "ran" not in ended.lines, ended
    else:
        assert ended.lines == ["ran"] * check.size, ended


#: Process of an elastic job that knows the launcher's side of one alone: it trains nothing. Slot 0 announces the first
#: view, before which hosts that come and go are not heeded.
_ELASTIC_PROGRAM = """
import os, signal, threading
from pathlib import Path
import msgspec
from reigen.cluster.environ import ELASTIC_FINISHED_KEY, ELASTIC_VIEW_KEY, parse_secret
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.cluster.membership.views.record import StepBase, View, ViewHost, ViewMember
slot, host = os.environ["REIGEN_SLOT"], os.environ["HOROVOD_HOSTNAME"]
def connect():
    return RendezvousClient(os.environ["REIGEN_RENDEZVOUS"], parse_secret(os.environ["REIGEN_SECRET"]), int(slot), 30.0)
def say(word): os.write(1, f"{word} {host} {slot}\\n".encode())
def leave(*_):
    say("left")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
say("came")
if slot == "0":
    members = tuple(ViewMember(number, 0, 1) for number in range(int(os.environ["REIGEN_SIZE"])))
    view = View.make(1, [ViewHost(host, 1, "127.0.0.1", members)], base=StepBase(), sizes=(1, 1024))
    client = connect()
    client.put(ELASTIC_VIEW_KEY, msgspec.msgpack.encode(view))
    client.close()
pause = threading.Event()
while not Path(os.environ["ELASTIC_OVER"]).exists(): pause.wait(0.05)
client = connect()
client.put_first(ELASTIC_FINISHED_KEY, slot.encode())
client.close()
"""


def _resize(check: _LauncherCheck) -> str | None:
    """Hosts of an elastic job come and go, one for another, too: processes start there, and are asked to leave."""
    listed = [f"{host.name}:{host.slots}" for host in parse_hosts(check.hosts)]
    if len(listed) < 2:
        return "it has one host"
    two, changed = listed[:2], [listed[0], listed[-1]] if len(listed) > 2 else listed[:1]
    with tempfile.TemporaryDirectory(dir=check.directory) as directory:
        file, over = Path(directory) / "hosts", Path(directory) / "over"
        options = ("--min-np", "1", "--max-np", str(check.size), _DISCOVERY, f"cat {file}", "--no-prefix")
        _replace_lines(file, two)
        with check.start([sys.executable, "-c", _ELASTIC_PROGRAM], *options, ELASTIC_OVER=str(over)) as job:
            for hosts in (two, changed, listed):
                _replace_lines(file, hosts)
                wanted = {host.name: host.slots for host in parse_hosts(",".join(hosts))}
                job.wait_until(lambda: job.has_ended or _count_members(job) == wanted, f"{wanted}")  # noqa: B023
            over.touch()
            ended = job.finish()
    refusal = re.search(r"^reigen run: (.* cannot be elastic.*)$", ended.stderr, re.MULTILINE)
    if ended.exit_code and refusal:
        assert not ended.stdout, ended
        return refusal[1]
    ended.expect(0)
    return None


def _count_members(job: _Job) -> dict[str, int]:
    """Count the processes of each host that have come, and have not left."""
    members: dict[str, int] = {}
    for word, host, _ in map(str.split, job.read().decode().splitlines()):
        members[host] = members.get(host, 0) + (1 if word == "came" else -1)
    return {host: number for host, number in members.items() if number}


def _replace_lines(file: Path, lines: Sequence[str]) -> None:
    write_atomically(file, ["".join(f"{line}\n" for line in lines).encode()])


def _cancelled_job(check: _LauncherCheck) -> str | None:
    """A job that its engine cancels says so, and leaves nothing: while it starts, runs, or ends."""
    if (cancel := check.cancel_job) is None:
        return "no cancel_job was given"
    with check.start(_WAIT) as job:
        job.wait_until(lambda: job.has_ended or cancel(), "there is something to cancel")
        ended = job.finish()
        assert ended.exit_code != 0, ended
    with check.start(_WAIT) as job:
        job.wait_until_ready()
        assert cancel(), "a job runs, and cancel_job has found none"
        ended = job.finish()
        assert ended.exit_code != 0, ended
        is_explained = re.search(r"SIGTERM|SIGINT|cancel", ended.stderr, re.IGNORECASE)
        is_killed = ended.exit_code in {-signal.SIGKILL, 128 + signal.SIGKILL, 128 + signal.SIGHUP}
        assert is_explained or is_killed, f"nothing says that the job was cancelled: {ended}"
    code = "def end(*_): say('ending'); time.sleep(0.5); os._exit(0)\nsignal.signal(signal.SIGTERM, end)\n"
    with check.start(code + _WAIT, "--no-prefix") as job:
        job.wait_until_ready()
        os.kill(job.launcher()[0], signal.SIGTERM)
        job.wait_until(lambda: b"ending" in job.read(), "the job ends")
        cancel()
        job.finish().expect(128 + signal.SIGTERM)
    return None


def _killed_host(check: _LauncherCheck) -> str | None:
    """A host that dies without a word is named when it was silent for a while, and the others end."""
    if check.kill_host is None:
        return "no kill_host was given"
    host = parse_hosts(check.hosts)[-1].name
    with check.start(_WAIT, REIGEN_PEER_TIMEOUT="1") as job:
        job.wait_until_ready()
        check.kill_host(host)
        ended = job.finish(empties=False).expect(255)
        assert re.search(rf"reigen run: host {re.escape(host)} was lost, with ranks? ", ended.stderr), ended
    return None


_CASES: Mapping[str, Callable[[_LauncherCheck], str | None]] = {
    case.__name__[1:]: case
    for case in (
        *(_unused_launcher, _all_ranks, _placement, _too_many_ranks, _arguments, _environment, _directory),
        *(
            _streams,
            _prefixes,
            _bytes,
            _exit_code,
            _first_failure,
            _killed_rank,
            _stubborn_rank,
            _orphans,
        ),
        *(_stopped_job, _killed_supervisor, _killed_watchdog, _killed_agent, _stopped_agent, _notice, _stopped_start),
        *(_agent_environment, _missing_python, _unauthenticated_connections, _many_starts),
        *(_secret, _missing_program),
        *(_two_jobs, _collective, _full_disk, _resize, _cancelled_job, _killed_host),
    )
}
