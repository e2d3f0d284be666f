"""Memory of a host's voter: a file in memory that all processes of a job on that host have open.

Whoever starts the ranks of a host makes the file, and gives its descriptor to all of them (`REIGEN_VOTER_FD`). So what
the host has promised outlives each of its processes; when the last one and the starter have gone, the voter is lost.

One process at a time reads and writes: it holds a lock on an open file description of its own (`F_OFD_SETLK`), which
the kernel releases however the process ends. Each of them may therefore answer for the voter, and a death in the middle
of a write leaves the other slot whole (`views.slots`). A process that is stopped while it holds the lock keeps the
others from it; who waits for longer than a second kills it: its number stands in front of the slots.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from reigen.cluster.membership.elastic.host_page import HostPage
from reigen.cluster.membership.elastic.messages import VoterReply, VoterRequest
from reigen.cluster.membership.elastic.process_identity import LocalProcess
from reigen.cluster.membership.views.paxos import Acceptor
from reigen.cluster.membership.views.record import MAX_VIEW_BYTES, VoterId
from reigen.cluster.membership.views.slots import NUM_SLOTS, decode_slots, encode_slot
from reigen.errors import ConfigError, DeadlineError, SharedMemoryError, WireError
from reigen.net.fork_safety import close_in_children
from reigen.resources.limits import explain_limit

#: Two views and a page. Pages that nobody writes to cost nothing.
SLOT_BYTES = 2 * MAX_VIEW_BYTES + 4096
VOTER_MEMORY_BYTES = 4096 + NUM_SLOTS * SLOT_BYTES
_FIRST_SLOT = 4096
#: struct flock: type, whence, start, length, process (0 for locks of open file descriptions)
_FLOCK = struct.Struct("hhqqi4x")
#: who holds the lock: process id and when it was started
_HOLDER = struct.Struct("=QQ")
_LOCK_SECONDS, _AGAIN_SECONDS = 1.0, 0.0005


class VoterMemory:
    """The voter of this process's host. One thread uses it.

    Args:
        fd: of the file; stays the caller's.
        host: name of the host in views.

    Attributes:
        id: of the voter.
        page: what else is in the memory.

    Raises:
        ConfigError: ``fd`` is not a file that this process may write to.
        SharedMemoryError: there is no memory for it.
        DeadlineError: see `handle`.
    """

    def __init__(self, fd: int, host: str) -> None:
        self._host = host
        try:
            # another open file description than that which was inherited: all who have inherited it share its locks
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"descriptor {fd} (REIGEN_VOTER_FD) is no memory of this host's voter ({error.strerror}): elastic jobs "
                "are started by `reigen run --min-np`"
            ) from error
        self._process = LocalProcess.current()
        self.page = HostPage(self._fd)
        try:
            with self._lock():
                self._allocate()
                self.id = self._begin_voting().id
        except BaseException:
            self.close()
            raise
        close_in_children(self)

    def handle(self, message: VoterRequest) -> VoterReply | None:
        """Take a message for the voter; returns the answer, if there is one. The promise in it is written then.

        Raises:
            DeadlineError: another process has kept the memory to itself for a second; it was killed.
            WireError: the memory is damaged: nothing was answered.
        """
        with self._lock():
            stored = decode_slots(self._read())
            before = stored.acceptor
            if before is None:
                raise WireError(f"the memory of the voter of host {self._host} was emptied")
            after, reply = before.handle(message)
            if after is not before:
                self._write(stored.sequence + 1, after)
            return reply

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    close_descriptors = close

    def _allocate(self) -> None:
        if os.fstat(self._fd).st_size < VOTER_MEMORY_BYTES:
            try:
                os.posix_fallocate(self._fd, 0, VOTER_MEMORY_BYTES)
            except OSError as error:
                what = "the voter of an elastic job"
                raise SharedMemoryError.refused(VOTER_MEMORY_BYTES, what, str(explain_limit(error))) from error

    def _begin_voting(self) -> Acceptor:
        """Return the stored state; the first process of a host begins a new incarnation of its voter."""
        stored = decode_slots(self._read())
        if stored.acceptor is None:
            acceptor = Acceptor(VoterId(self._host, time.time_ns() // 1000))
            self._write(1, acceptor)
            return acceptor
        if stored.acceptor.id.name != self._host:
            raise ConfigError(f"the voter's memory is that of host {stored.acceptor.id.name!r}, not of {self._host!r}")
        return stored.acceptor

    def _read(self) -> list[bytes]:
        return [os.pread(self._fd, SLOT_BYTES, _FIRST_SLOT + slot * SLOT_BYTES) for slot in range(NUM_SLOTS)]

    def _write(self, sequence: int, acceptor: Acceptor) -> None:
        data = encode_slot(sequence, acceptor)
        if len(data) > SLOT_BYTES:
            raise WireError(f"a voter keeps at most {SLOT_BYTES} bytes, not {len(data)}")
        os.pwrite(self._fd, data, _FIRST_SLOT + sequence % NUM_SLOTS * SLOT_BYTES)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        until = time.monotonic() + _LOCK_SECONDS
        while not self._set_lock(fcntl.F_WRLCK):
            if time.monotonic() >= until:
                raise DeadlineError(f"{self._end_holder()} has kept the voter of host {self._host} to itself")
            time.sleep(_AGAIN_SECONDS)
        try:
            os.pwrite(self._fd, _HOLDER.pack(self._process.pid, self._process.started), 0)
            yield
        finally:
            self._set_lock(fcntl.F_UNLCK)

    def _set_lock(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _end_holder(self) -> str:
        """Kill the process that has the lock, so that the next try gets it: it is stopped."""
        pid, started = _HOLDER.unpack(os.pread(self._fd, _HOLDER.size, 0).ljust(_HOLDER.size, b"\0"))
        if (pidfd := LocalProcess(pid, started).open()) is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        return f"process {pid}"
