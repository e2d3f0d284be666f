"""Jobs of Grid Engine that `reigen launch --launcher sge` submits by qsub.

The script that qsub gets, and that others may read in Grid Engine's spool, only reads another one, which is this
user's alone: in a directory beside the logs, with the environment and the command. There the job leaves its exit code,
too.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from reigen.errors import ConfigError, LaunchError
from reigen.files import write_atomically
from reigen.launch.env_export import select_exported
from reigen.launch.job_options import name_of_command, parse_memory
from reigen.launch.sge.environment import (
    explain_parallel_environment,
    list_environments_of_queue,
    list_parallel_environments,
    read_parallel_environment,
)
from reigen.launch.submission import SubmissionRequest, SubmittedPhase, SubmittedState, run_client

#: What Grid Engine does not take in a job's name.
_NO_NAME = re.compile(r"[^A-Za-z0-9_.+-]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Shells have them for themselves, and some end a script that sets one.
_READ_ONLY_VARIABLES = frozenset({"BASHOPTS", "EUID", "PPID", "SHELLOPTS", "UID"})
#: Seconds until the exit code of a job that has gone must be there, in its file or in the accounting.
_ACCOUNT_SECONDS = 15.0
_READ_BYTES = 1 << 20
_NAMED_PE = "the only parallel environment that will do"


class SgeSubmission:
    """Job of workers and servers, each of which has a slot, or as many as it is to have processors.

    Raises:
        ConfigError: there is no qsub, or an option means nothing to Grid Engine.
    """

    def __init__(self, request: SubmissionRequest) -> None:
        self._request, self._options = request, request.options
        self._name = choose_job_name(self._options.job_name, request.command)
        self._logs = (request.directory / (self._options.sge_log_dir or "")).absolute()
        self._resources = _resources(request)
        self._directory = self._logs / f".{self._name}.{secrets.token_hex(6)}"
        self._job_id = ""
        self._gone_at: float | None = None
        #: Bytes of each stream that have been returned.
        self._num_read = {1: 0, 2: 0}
        if "," in str(self._logs):
            raise ConfigError(f"--sge-log-dir {self._logs}: Grid Engine takes no path with a comma")
        if shutil.which("qsub", path=request.environ.get("PATH")) is None:
            raise ConfigError(
                "--launcher sge: this is in no parallel job of Grid Engine's, and there is no qsub in PATH for one "
                "(. $SGE_ROOT/default/common/settings.sh)"
            )

    @property
    def preview(self) -> str:
        """The command of qsub, and the script, without the environment."""
        named = self._options.sge_pe or f"<{_NAMED_PE}>"
        names = ", ".join(sorted(self._environ()))
        return (
            f"{shlex.join(self._qsub(named))} <<'END'\n{self._script()}END\n\n"
            f"# {self._directory}/job (mode 0600)\n# export {names}\n{self._last_line()}"
        )

    @property
    def cancel_command(self) -> str:
        """qdel and the job's number."""
        return f"qdel {self._job_id}" if self._job_id else ""

    def submit(self) -> str:
        """Submit the job by qsub; raises LaunchError in its words."""
        environment = self._options.sge_pe or choose_parallel_environment(self._options.queue)
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700)
            exports = [f"export {name}={shlex.quote(text)}\n" for name, text in self._environ().items()]
            text = "".join([*exports, self._last_line()])
            write_atomically(self._directory / "job", [text.encode(errors="surrogateescape")], mode=0o600)
        except OSError as error:
            raise LaunchError(
                f"{error.filename or self._logs}: {error.strerror}; --sge-log-dir names another"
            ) from None
        ended = run_client(self._qsub(environment), input_text=self._script())
        job_id = ended.stdout.strip().splitlines()[-1:] or [""]
        if ended.returncode != 0 or not job_id[0].isdigit():
            words = (ended.stderr.strip() or ended.stdout.strip()).replace("\n", " ")
            raise LaunchError(f"qsub has not taken the job: {words or f'exit code {ended.returncode}'}")
        self._job_id = job_id[0]
        return f"Grid Engine job {self._job_id} ({self._name})"

    def poll(self) -> SubmittedState:
        """Ask qstat for the job, and when it is not there any more, its file or qacct for its exit code."""
        ended = run_client(["qstat", "-u", "*"])
        if ended.returncode != 0:
            raise LaunchError(f"qstat: {(ended.stderr or ended.stdout).strip()}")
        state = find_state(ended.stdout, self._job_id)
        if state is None:
            return self._look_for_exit_code()
        if "E" in state:
            reason = self._ask("error reason")
            self.cancel()
            self._gone_at = time.monotonic()
            return SubmittedState(SubmittedPhase.ENDED, f"it could not be started ({state}): {reason}", 1)
        if "q" in state or "w" in state:
            reason = "it is held (qrls)" if "h" in state else self._ask("scheduling info")
            return SubmittedState(
                SubmittedPhase.WAITING, reason or "no slots are free, or it is not its turn (qstat -j)"
            )
        return SubmittedState(SubmittedPhase.RUNNING)

    def read_output(self) -> Iterable[tuple[int, bytes]]:
        """Read on in the job's files; they are opened each time, for other hosts write them."""
        if not self._job_id:
            return
        for descriptor, kind in ((1, "o"), (2, "e")):
            file = self._logs / f"{self._name}.{kind}{self._job_id}"
            if data := read_from(file, self._num_read[descriptor]):
                self._num_read[descriptor] += len(data)
                yield descriptor, data

    def cancel(self) -> float:
        """Have the job deleted; raises LaunchError, in qdel's words."""
        ended = run_client(["qdel", self._job_id])
        if ended.returncode != 0 and "does not exist" not in ended.stdout + ended.stderr:
            raise LaunchError(f"qdel {self._job_id}: {(ended.stderr or ended.stdout).strip()}")
        return 0.0

    def close(self) -> tuple[str, ...]:
        """Remove the job's directory, if it has ended or was not submitted."""
        if self._job_id and self._gone_at is None:
            return (f"the job needs {self._directory} as long as it is there; then: rm -r {self._directory}",)
        shutil.rmtree(self._directory, ignore_errors=True)
        return ()

    def _environ(self) -> dict[str, str]:
        request = self._request
        exported = select_exported(request.environ, request.exports)
        return {
            name: text
            for name, text in exported.items()
            if _VARIABLE.fullmatch(name) and name not in _READ_ONLY_VARIABLES
        }

    def _qsub(self, environment: str) -> list[str]:
        request, options = self._request, self._options
        num_slots = request.num_workers * (options.worker_cores or 1) + request.num_servers * (
            options.server_cores or 1
        )
        words = ["qsub", "-terse", "-cwd", "-S", "/bin/sh", "-N", self._name, "-pe", environment, str(num_slots)]
        words += ["-q", options.queue] if options.queue else []
        words += [word for each in self._resources for word in ("-l", each)]
        if "--requeue-on-notice" in request.arguments:
            words += ["-notify", "-r", "y"]
        # the colon: a path may have others
        return [*words, "-o", f":{self._logs}", "-e", f":{self._logs}"]

    def _script(self) -> str:
        return f"#!/bin/sh\n. {shlex.quote(str(self._directory / 'job'))}\n"

    def _last_line(self) -> str:
        """The command, by exec: signals are for it, and no shell waits for it."""
        request = self._request
        file = str(self._directory / "exit-code")
        command = [sys.executable, "-m", "reigen", "launch", *request.arguments]
        command += ["--exit-code-file", file, "--", *request.command]
        return f"rm -f {shlex.quote(file)}\nexec {shlex.join(command)}\n"  # one may be there, of a job that runs again

    def _ask(self, what: str) -> str:
        """Return the lines about something in what qstat tells of the job, in one; empty: there are none."""
        found = run_client(["qstat", "-j", self._job_id])
        return find_lines(found.stdout, what)

    def _look_for_exit_code(self) -> SubmittedState:
        now = time.monotonic()
        self._gone_at = self._gone_at or now
        if text := read_from(self._directory / "exit-code", 0).strip():
            return SubmittedState(SubmittedPhase.ENDED, exit_code=int(text))
        if account := find_account(run_client(["qacct", "-j", self._job_id]).stdout):
            return account
        if now - self._gone_at < _ACCOUNT_SECONDS:
            return SubmittedState(SubmittedPhase.RUNNING)
        reason = (
            f"it left no exit code: it was deleted, or {self._logs} is not there on its hosts (qacct -j {self._job_id})"
        )
        return SubmittedState(SubmittedPhase.ENDED, reason)


def choose_job_name(name: str | None, command: tuple[str, ...]) -> str:
    """Return the job's name: the user's, or one that is made of the command.

    Raises:
        ConfigError: Grid Engine does not take it.
    """
    if name is None:
        made = _NO_NAME.sub("_", name_of_command(command))
        return made if made[:1].isalpha() else f"job_{made}"
    if not name or name[0].isdigit() or _NO_NAME.search(name):
        raise ConfigError(f"--jobname {name}: Grid Engine wants letters, digits, . _ + -, and no digit first")
    return name


def choose_parallel_environment(queue: str | None) -> str:
    """Choose the parallel environment: the only one where agents can be started, of the queue's if there is one.

    Raises:
        LaunchError: there is none, or there are several; the message lists them.
    """
    names = list_parallel_environments() if queue is None else list_environments_of_queue(queue)
    if not names or names == ["NONE"]:
        where = "there is" if queue is None else f"the queue {queue} has"
        raise LaunchError(f"{where} no parallel environment: an administrator makes one (qconf -ap)")
    found = {name: read_parallel_environment(name) for name in names}
    problems = {name: explain_parallel_environment(name, settings) for name, settings in found.items()}
    right = [name for name, problem in problems.items() if not problem]
    if not right:
        raise LaunchError("\n".join(problems.values()))
    if len(right) > 1:
        listed = ", ".join(f"{name} (slots by {found[name].get('allocation_rule')})" for name in right)
        raise LaunchError(f"which parallel environment? Say --sge-pe NAME; there are {listed}")
    return right[0]


def find_state(qstat: str, job_id: str) -> str | None:
    """Return a job's state in the output of qstat, ``qw`` or ``r``; None: it is not there."""
    rows = (line.split() for line in qstat.splitlines())
    return next((row[4] for row in rows if len(row) > 4 and row[0] == job_id), None)


def find_lines(text: str, what: str) -> str:
    """Return what ``qstat -j`` says behind a word, with the lines that go on with it, in one line."""
    lines = iter(text.splitlines())
    found: list[str] = []
    for line in lines:
        name, _, rest = line.partition(":")
        if line[:1] == " " and found:
            found.append(line.strip())
        elif name.startswith(what):
            found.append(rest.strip())
        elif found:
            break
    # it does not say why, but that it would have to be configured for that
    kept = [each for each in found if each and "Collecting of scheduler job information is turned off" not in each]
    return "; ".join(kept)[:500]


def find_account(qacct: str) -> SubmittedState | None:
    """Return the end of a job by the last record of qacct; None: there is none yet."""
    records: dict[str, str] = {}
    for line in qacct.splitlines():
        name, _, text = line.partition(" ")
        records[name] = text.strip()
    if not records.get("exit_status", "").isdigit():
        return None
    failed = records.get("failed", "0")
    reason = "" if failed == "0" else f"Grid Engine says: failed {failed}, and qacct -j more"
    return SubmittedState(SubmittedPhase.ENDED, reason, int(records["exit_status"]))


def read_from(file: Path, position: int) -> bytes:
    """Read a part of a file; empty where there is nothing, or no such file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, _READ_BYTES, position)
    finally:
        os.close(descriptor)


def _resources(request: SubmissionRequest) -> list[str]:
    options = request.options
    if options.gpus is not None:
        raise ConfigError(
            "--gpus: Grid Engine has no common name for them; ask for them in a file .sge_request here: -l gpu=1"
        )
    asked = {"--worker-memory": options.worker_memory, "--server-memory": options.server_memory}
    sizes = [parse_memory(option, text) for option, text in asked.items() if text is not None]
    for option, cores in (("--worker-cores", options.worker_cores), ("--server-cores", options.server_cores)):
        if cores is not None and cores < 1:
            raise ConfigError(f"{option} {cores}: at least 1")
    return [f"h_vmem={-(-max(sizes) >> 20)}M"] if sizes else []
