"""Jobs with parameter servers, started by hand: processes with DMLC_* variables."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from reigen.cluster.bootstrap.local import bootstrap_socket_name
from reigen.testing.environment import clean_environment

#: For eight processes of Python that start together on a busy core, too.
DEADLINE_SECONDS = 120.0
NODE = (sys.executable, str(Path(__file__).with_name("node.py")))
SCHEDULER = (sys.executable, "-m", "reigen", "scheduler")


class Port:
    """A port at which nobody listens, and which is given to nobody else until it is closed.

    Whoever sets SO_REUSEADDR, as `socket.create_server` does, can listen there.

    Attributes:
        number: of the port.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class Process:
    """A process of a job."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._read = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def ask(self, command: str) -> Any:
        """Have it do something; returns its answer."""
        self.tell(command)
        return self.hear()

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next line that it says."""
        assert self._process.stdout is not None
        end = time.monotonic() + DEADLINE_SECONDS
        while b"\n" not in self._read:
            ready = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"it said nothing; its errors: {self.errors()}"
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, f"it has ended; its errors: {self.errors()}"
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def let_go(self) -> None:
        """Nothing more is told to it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> int:
        """Nothing more is told to it: its exit code."""
        self.let_go()
        return self._process.wait(DEADLINE_SECONDS)

    def rest(self) -> str:
        """All that it has said and nobody has heard; it has ended."""
        assert self._process.stdout is not None
        return (self._read + self._process.stdout.read()).decode()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def wait_for(self, words: str) -> None:
        """Until it has written this to stderr."""
        end = time.monotonic() + DEADLINE_SECONDS
        while words not in self.errors():
            assert time.monotonic() < end, f"it did not write {words!r}, but {self.errors()}"
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with suppress(OSError):  # what was not told to it yet
                stream.close()


class Job:
    """A job; its processes end with the block.

    Args:
        variables: of all its processes, beside those of the job.
    """

    def __init__(self, num_workers: int, num_servers: int, *, host: str = "127.0.0.1", **variables: str) -> None:
        self._ports = [Port(host)]
        self.variables = {
            **clean_environment(),
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": str(self._ports[0].number),
            "DMLC_NUM_WORKER": str(num_workers),
            "DMLC_NUM_SERVER": str(num_servers),
            **variables,
        }
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is not None:
                sys.stderr.write(process.errors())
            process.close()
        for port in self._ports:
            port.close()

    def another_port(self) -> str:
        """A port that nobody uses, until the end of the block."""
        self._ports.append(Port())
        return str(self._ports[-1].number)

    def start(self, command: Sequence[str], **variables: str) -> Process:
        process = Process(command, {**self.variables, **variables})
        self._processes.append(process)
        return process

    def scheduler(self, **variables: str) -> Process:
        return self.start(SCHEDULER, **{"PS_VERBOSE": "1", **variables})

    def node(self, role: str, number: int | None = None, **variables: str) -> Process:
        """A worker or a server; without a number, it is given one."""
        task = {} if number is None else {"DMLC_TASK_ID": str(number)}
        return self.start(NODE, DMLC_ROLE=role, **task, **variables)

    def secret_keeper(self) -> Process | None:
        """The worker or server that would give the job's secret to another scheduler (`kv.membership.discovery`)."""
        name = bootstrap_socket_name("kv", f"keeper 127.0.0.1 {self._ports[0].number}", 1)[1:].decode()
        lines = Path("/proc/net/unix").read_text().splitlines()
        inodes = {fields[6] for fields in map(str.split, lines) if fields[7:] == [f"@{name}"] and fields[5] == "01"}
        for process in self._processes:
            with suppress(OSError):  # it has ended
                links = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
                if any(f"socket:[{inode}]" in links for inode in inodes):
                    return process
        return None

    def wait_for_secret_keeper(self) -> Process:
        """Wait until there is one."""
        end = time.monotonic() + DEADLINE_SECONDS
        while (keeper := self.secret_keeper()) is None:
            assert time.monotonic() < end, "no process keeps the secret"
            time.sleep(0.02)
        return keeper

    def all(self) -> tuple[Process, list[Process], list[Process]]:
        """The scheduler, the servers, the workers: all of them there."""
        scheduler = self.scheduler()
        servers = [self.node("server", number) for number in range(int(self.variables["DMLC_NUM_SERVER"]))]
        workers = [self.node("worker", number) for number in range(int(self.variables["DMLC_NUM_WORKER"]))]
        for number, node in [*enumerate(servers), *enumerate(workers)]:
            assert node.hear()["joined"] == number
        return scheduler, servers, workers
