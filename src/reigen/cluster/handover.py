"""How rank 0 hands the address of its service, and the job's secret, to the other ranks of its host.

Through a Unix socket with an abstract name, which the kernel forgets with the process. Both ends ask the kernel who the
other one is (SO_PEERCRED): nothing is given to, nor taken from, a process of another user. What another user can do is
to take the name first, which is an error on all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec

from reigen.cluster.forks import not_in_children
from reigen.errors import AuthenticationError, WireError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_BYTES = 1024
_AGAIN_SECONDS = 0.05
#: How long the other end may take once it is connected.
_TALK_SECONDS = 5.0


class Pointer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where the job's control service is, and the job's secret."""

    address: str
    secret: bytes

    def __repr__(self) -> str:  # a secret is shown nowhere
        return f"Pointer({self.address!r})"


def socket_name(launcher: str, job_id: str, size: int) -> bytes:
    """The abstract name at which the ranks of a job on this host meet.

    A launcher that does not tell its jobs apart is told apart itself: by the process that started the ranks.
    """
    job = job_id or ancestor()
    digest = hashlib.sha256(f"{launcher}\0{job}\0{size}".encode()).hexdigest()
    return f"\0reigen/{os.geteuid()}/{digest[:32]}".encode()


def ancestor() -> str:
    """The closest process above that was not given this rank: whoever started it, told apart from all others."""
    pid, own = os.getpid(), _variables(os.getpid())
    while True:
        parent = int(_stat(pid)[1])
        if parent < 1:
            return f"process {pid}"
        if _variables(parent) != own:
            started = _stat(parent)[19:20]
            return f"process {parent} {started}"
        pid = parent


def _stat(pid: int) -> list[str]:
    """What /proc tells of a process behind its name; nothing if it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _variables(pid: int) -> frozenset[bytes] | None:
    """What a process was given that says RANK, in any launcher's words; None where that is a secret."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return frozenset(entry for entry in entries if b"RANK" in entry.partition(b"=")[0])


class Handover:
    """Rank 0's end: gives the pointer to every process of this user that asks, until it is closed.

    Raises:
        OSError: the name is taken.
    """

    def __init__(self, name: bytes, pointer: Pointer) -> None:
        self._data = msgspec.msgpack.encode(pointer)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(name)
            self._listener.listen(512)
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="reigen-handover", daemon=True)
        self._thread.start()
        not_in_children(self)

    def close(self) -> None:
        """Stop. May be called twice."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def close_descriptors(self) -> None:
        """See `reigen.cluster.forks`."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno == errno.EINVAL:
                    return
                time.sleep(_AGAIN_SECONDS)  # no descriptors left, for the moment
                continue
            with connection, contextlib.suppress(OSError):
                if _user_of(connection) == os.geteuid():
                    connection.settimeout(_TALK_SECONDS)
                    connection.sendall(self._data)


def fetch(name: bytes) -> list[Pointer]:
    """What rank 0 hands over; nothing while nobody does.

    Raises:
        AuthenticationError: another user has taken the name.
        WireError: it is no pointer.
    """
    data = b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TALK_SECONDS)
        try:
            connection.connect(name)
            user = _user_of(connection)
            if user != os.geteuid():
                raise AuthenticationError(
                    f"user {user} listens at the abstract socket of this job, {name[1:].decode()}; it is not rank 0"
                )
            while chunk := connection.recv(_MAX_BYTES):
                data += chunk
                if len(data) > _MAX_BYTES:
                    raise WireError("rank 0 hands over more than an address and a secret")
        except OSError:
            return []
    if not data:
        return []
    try:
        return [msgspec.msgpack.decode(data, type=Pointer)]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"rank 0 hands over what is no pointer to a service: {error}") from None


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
