"""Processes that are forked from one that has imported what they need: importing PyTorch takes longer than the tests.

The server is a process of its own, ``python -m tests.elastic.fork_server MODULE``. It is asked by lines of JSON, and
says which processes it has started and which have ended. Their output goes to a pipe of whoever asks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

_DEADLINE_SECONDS = 120.0


class ForkedProcess:
    """A process of the server's, in the place of a `subprocess.Popen` with text in ``stdout``."""

    def __init__(self, server: ForkServer, pid: int, stdout: IO[str]) -> None:
        self._server, self.pid, self.stdout = server, pid, stdout

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._server.codes.get(self.pid)

    def wait(self, timeout: float) -> int:
        """Waits for the end; returns the exit code."""
        with self._server.changed:
            if not self._server.changed.wait_for(lambda: self.pid in self._server.codes, timeout):
                raise subprocess.TimeoutExpired("fork", timeout)
        return self._server.codes[self.pid]


class ForkServer:
    """Client of a server that has imported a module, whose ``main`` its processes run; ``environ``: more variables."""

    def __init__(self, module: str, **environ: str) -> None:
        self.changed = threading.Condition()
        self.codes: dict[int, int] = {}
        self._started: list[int] = []
        command = [sys.executable, "-m", "tests.elastic.fork_server", module]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
        """Starts a process with these arguments and this environment."""
        reading, writing = os.pipe()
        request = {"argv": list(arguments), "environ": dict(environ), "output": f"/proc/{os.getpid()}/fd/{writing}"}
        assert self._process.stdin is not None
        with self.changed:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            assert self.changed.wait_for(lambda: self._started, _DEADLINE_SECONDS)
            pid = self._started.pop()
        os.close(writing)
        return ForkedProcess(self, pid, os.fdopen(reading))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_DEADLINE_SECONDS)
        self._reader.join(_DEADLINE_SECONDS)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, pid, *code = line.split()
            with self.changed:
                if kind == "started":
                    self._started.append(int(pid))
                else:
                    self.codes[int(pid)] = int(code[0])
                self.changed.notify_all()


def _run(module: str, request: dict[str, object]) -> int:
    """In the new process: run the module's ``main``."""
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[call-overload]
    if voter := os.environ.get("REIGEN_VOTER_FD"):
        pid, number = voter.split(":")
        os.environ["REIGEN_VOTER_FD"] = str(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
    sys.argv = [module, *map(str, request["argv"])]  # type: ignore[call-overload]
    try:
        importlib.import_module(module).main()
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        sys.last_value = error
        traceback.print_exc()
        return 1
    return 0


def serve(module: str) -> None:
    """Fork processes, as lines on stdin say, until its end; then kill those that are left."""
    importlib.import_module(module)
    requests = iter(sys.stdin.readline, "")
    lock = threading.Lock()
    children: set[int] = set()

    def say(text: str) -> None:
        with lock:
            os.write(1, (text + "\n").encode())

    def reap(signum: int, frame: object) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                children.discard(found[0])
                os.write(1, f"ended {found[0]} {os.waitstatus_to_exitcode(found[1])}\n".encode())

    for line in requests:
        request = json.loads(line)
        ready, told = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            output = os.open(request["output"], os.O_WRONLY)
            for number in (1, 2):
                os.dup2(output, number)
            os.close(output)
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
            os.write(told, b".")
            os.close(told)
            code = _run(module, request)
            import atexit

            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        children.add(pid)
        signal.signal(signal.SIGCHLD, reap)
        say(f"started {pid}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for pid in [*children]:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
