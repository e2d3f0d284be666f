"""Running `reigen run` in tests: start it, talk with it, and make sure that nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.network.waiting import wait_for

DEADLINE_SECONDS = 60.0
MARK = "REIGEN_TEST_MARK"


def until(condition: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
    """Waits for a condition that nothing announces."""
    wait_for(condition, "what the test expects", seconds)


def marked(mark: str) -> dict[int, str]:
    """Processes that have ``mark`` in their environment, whoever their parents are; zombies have none."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes()
                    if command:
                        found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def child_of(family: Sequence[int]) -> int:
    """The one of two processes that is the other's child."""
    [child] = [
        pid for pid in family if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in family
    ]
    return child


class Launcher:
    """A running `reigen run`."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self.process = process
        self._mark = mark

    def processes(self) -> dict[int, str]:
        """Everything that belongs to the job, the launcher too."""
        return marked(self._mark)

    def supervisor(self) -> int:
        """The process that is the parent of the ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def lines(self, num_lines: int) -> list[str]:
        """The next lines of its stdout."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline().decode().rstrip("\n") for _ in range(num_lines)]

    def finish(self) -> tuple[int, str, str]:
        """Waits for its end: (exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, out.decode(), err.decode()


@contextmanager
def launched(*arguments: str, **options: object) -> Iterator[Launcher]:
    """`reigen run ARGUMENTS`, or another ``program``; at the end of the block no process of the job may be left."""
    mark = uuid.uuid4().hex
    pipes: dict[str, object] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**os.environ, MARK: mark, **dict(options.pop("env", {}))}  # type: ignore[call-overload]
    command = [sys.executable, "-m", "reigen", str(options.pop("program", "run")), *arguments]
    process = subprocess.Popen(command, env=environ, **{**pipes, **options})  # type: ignore[call-overload]
    try:
        yield Launcher(process, mark)
        process.wait(DEADLINE_SECONDS)
        until(lambda: not marked(mark))
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait(DEADLINE_SECONDS)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def run(*arguments: str, **options: object) -> tuple[int, str, str]:
    """`reigen run ARGUMENTS` to its end: (exit code, stdout, stderr)."""
    with launched(*arguments, **options) as launcher:
        return launcher.finish()


def python(code: str) -> tuple[str, str, str]:
    """A command that runs ``code``; fast to start."""
    return sys.executable, "-Sc", "import os, signal, sys, time\nrank = int(os.environ['REIGEN_RANK'])\n" + code
