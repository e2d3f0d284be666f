"""Sockets between the launcher and the server processes of an elastic job whose servers move.

A message is a line of `launch.elastic.server_placement`, one way, or of `kv.server.server_process`, the other way. The
launcher holds both ends: a process that is started again inherits the same one.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from reigen.cluster.environ import HANDOVER_VARIABLE, SERVER_CONTROL_VARIABLE
from reigen.cluster.inherited_files import describe_inherited
from reigen.files import open_locked
from reigen.launch.local_plan import ProcessSpec
from reigen.launch.ps_processes import SNAPSHOT_VARIABLE, PsRole

_MOST_BYTES = 1 << 12
_SHARED_MEMORY = Path("/dev/shm")
_DIRECTORY_PREFIX = "reigen-handover-"


class ServerControls:
    """Sockets, by process, and the directory by which these hand over servers if they keep no snapshots.

    Args:
        environ: of the processes.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._ends: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._new: list[int] = []
        self._needs_directory = not environ.get(SNAPSHOT_VARIABLE)
        #: made with the first process
        self._directory: _HandoverDirectory | None = None

    @property
    def processes(self) -> Sequence[int]:
        """Return the processes that have a socket."""
        return tuple(self._ends)

    def attach(self, spec: ProcessSpec) -> ProcessSpec:
        """Return a process's spec with its socket, if it is a server process."""
        if spec.ps_process is None or spec.ps_process.role is not PsRole.SERVER:
            return spec
        process = spec.ps_process.index
        if process not in self._ends:
            own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            own.setblocking(False)
            self._ends[process] = own, other
            self._new.append(process)
        self.forget(process)
        descriptor = self._ends[process][1].fileno()
        variables = {SERVER_CONTROL_VARIABLE: describe_inherited(descriptor)}
        if self._needs_directory:
            if self._directory is None:
                self._directory = _HandoverDirectory()
            variables[HANDOVER_VARIABLE] = str(self._directory.path)
        return replace(spec, environ={**spec.environ, **variables}, descriptors=(*spec.descriptors, descriptor))

    def open_now(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield the sockets that were opened since the last call, by process."""
        new, self._new = self._new, []
        for process in new:
            yield process, self._ends[process][0]

    def tell(self, process: int, text: str) -> None:
        """Send a process a message."""
        with suppress(BlockingIOError):  # a process that reads nothing is stopped, and is killed at the end
            self._ends[process][0].send(text.encode())

    def read(self, process: int) -> Iterator[str]:
        """Yield the messages of a process that have come. Does not wait."""
        with suppress(BlockingIOError):
            while data := self._ends[process][0].recv(_MOST_BYTES):
                yield data.decode(errors="replace")

    def forget(self, process: int) -> None:
        """Drop messages that a process has not read."""
        if process in self._ends:
            with suppress(BlockingIOError):
                while self._ends[process][1].recv(_MOST_BYTES, socket.MSG_DONTWAIT):
                    pass

    def close(self) -> None:
        """Close all sockets, and remove the directory. May be called twice."""
        for ends in self._ends.values():
            for end in ends:
                end.close()
        self._ends.clear()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None


class _HandoverDirectory:
    """A new private directory, in shared memory if there is some; the launcher holds it locked (flock).

    Directories of launchers that were killed are removed first: nobody holds their locks.

    Attributes:
        path: of the directory.
    """

    def __init__(self) -> None:
        where = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
        for path in where.glob(f"{_DIRECTORY_PREFIX}*"):
            with suppress(OSError):  # its launcher lives; or it is no directory
                descriptor = open_locked(path, os.O_RDONLY | os.O_DIRECTORY)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=where))
            try:
                self._descriptor: int | None = open_locked(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except (BlockingIOError, FileNotFoundError):  # another launcher takes it for one that was left behind
                continue
            except OSError:  # such a file system has no locks
                self._descriptor = None
            if self.path.exists():
                return
            self._close()

    def remove(self) -> None:
        """Remove it, with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
