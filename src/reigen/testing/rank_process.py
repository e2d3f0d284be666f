"""Persistent rank process, as seen from the test."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import Pipe

from reigen.cluster.bootstrap.rank_lock import read_process_stat
from reigen.testing.leaks import Resources
from reigen.testing.worker import RankReply, RankTask

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from reigen.testing.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_TAIL_BYTES = 8192


class RankProcess:
    """Process that performs tasks. Its output goes to unlinked files, so it can never block on a full pipe.

    It is the leader of a session of its own: its children end with it. It dies with the thread that made it.
    """

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._outputs = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115  close() closes them
        self._marks = (0, 0)
        self.connection, inherited = Pipe()
        with inherited:
            arguments = [json.dumps(sys.path), str(inherited.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._outputs[0],
                stderr=self._outputs[1],
                pass_fds=[inherited.fileno()],
                start_new_session=True,
            )
        #: Readable as soon as the process has ended.
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def resources(self) -> Resources:
        """Resources that it needs in the test process."""
        descriptors = {self.pidfd, self.connection.fileno(), *(file.fileno() for file in self._outputs)}
        return Resources(frozenset(descriptors), frozenset({self.pid}))

    def begin(self, task: RankTask) -> None:
        """Send a task; return at once. Raises OSError if the process is gone."""
        self._marks = (self._size(0), self._size(1))
        self.connection.send(task)

    def reply(self) -> RankReply:
        """Return the reply, once the connection is readable; raises EOFError if the process has ended instead."""
        if not self.connection.poll():  # it has ended, and a child that it has forked keeps the connection open
            raise EOFError
        try:
            reply = self.connection.recv()
        except ConnectionResetError as error:  # it ended with a task unread
            raise EOFError from error
        assert isinstance(reply, RankReply)
        return reply

    def output(self) -> tuple[str, str]:
        """Return its stdout and stderr since the last task began."""
        return self._read(0), self._read(1)

    def stderr_tail(self) -> str:
        """Return the end of its stderr since the last task began."""
        return self._read(1)[-_TAIL_BYTES:]

    def wait(self) -> int:
        """Return the exit code, or minus the signal's number. Leaves the zombie, which keeps the group's id."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def stack(self) -> str:
        """Return the stacks of its Python threads, as text; a stopped process (SIGSTOP) is reported as such."""
        if read_process_stat(self.pid)[:1] in (["T"], ["t"]):
            return "stopped by a signal (SIGSTOP or a debugger)"
        before = self._size(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        until, pause, seen = time.monotonic() + 2.0, threading.Event(), before
        while time.monotonic() < until:
            pause.wait(0.02)
            size = self._size(1)
            if size > before and size == seen:  # it has stopped growing
                break
            seen = size
        return self._read(1, before) or "did not answer when asked for its stack"

    def close(self, *, kill: bool) -> None:
        """Ends the process and whatever it started, and gives up everything it needed here.

        Args:
            kill: at once. Otherwise it may finish in its own time, for ten seconds.
        """
        self.connection.close()
        if not kill:
            select.select([self.pidfd], [], [], 10.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.pidfd)
        for file in self._outputs:
            file.close()

    def _size(self, stream: int) -> int:
        return os.fstat(self._outputs[stream].fileno()).st_size

    def _read(self, stream: int, start: int | None = None) -> str:
        # pread: the position of the file belongs to the process that writes it
        start = self._marks[stream] if start is None else start
        return os.pread(self._outputs[stream].fileno(), self._size(stream) - start, start).decode(errors="replace")
