"""Python processes that begin with a framework imported: tests that start many of them import it once.

`server.py` imports it, and forks whenever a client asks. `client.py` is what a test starts in place of Python: it hands
its arguments, its environment and its descriptors over, passes on signals, and ends as the forked process ends.

All workers of a test session share the servers, which are started when they are first asked for, and end with the
session's first process. Not for tests of how Python starts or imports, and not for what reads the environment when it
is imported.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Session:
    """What the workers of a test session share.

    Attributes:
        directory: of the servers' sockets. It is removed by whoever has made it.
        pid: the process with which the servers end.
    """

    directory: Path
    pid: int

    def command(self, name: str, modules: list[str], environ: Mapping[str, str]) -> list[str]:
        """Return what stands in place of Python in a command line; the first call for a name starts its server.

        Args:
            name: of the server.
            modules: what it imports, in order; one that is not installed is left out.
            environ: of the server. Variables that are read by imports have to be the same in its processes.
        """
        address = self.directory / f"{name}.socket"
        with (self.directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_served(address):
                address.unlink(missing_ok=True)
                _start_server(address, self.pid, modules, environ)
        return [sys.executable, "-I", "-S", str(_HERE / "client.py"), str(address)]

    def is_first(self, name: str) -> bool:
        """Return whether nobody in this session has asked so for this name."""
        try:
            (self.directory / f"{name}.begun").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


_sessions: list[Session] = []


def join_session(directory: str, pid: int) -> None:
    """Say which session's worker this process is: of the process ``pid``."""
    _sessions.append(Session(Path(directory), pid))


def current_session() -> Session:
    """Return this process's session."""
    return _sessions[-1]


def _is_served(address: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(address))
        except OSError:
            return False
    return True


def _start_server(address: Path, session_pid: int, modules: list[str], environ: Mapping[str, str]) -> None:
    """Start a server that is no child of this process: a worker may end before the others do."""
    with socket.socket(socket.AF_UNIX) as listener, os.fdopen(os.pidfd_open(session_pid)) as session:
        listener.bind(str(address))
        listener.listen(64)
        subprocess.run(
            [sys.executable, str(_HERE / "server.py"), str(listener.fileno()), str(session.fileno()), *modules],
            env=dict(environ),
            pass_fds=[listener.fileno(), session.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
