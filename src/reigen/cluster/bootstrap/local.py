"""Handover of the service's address and the job's secret from rank 0 to the other ranks of its host.

Through a Unix socket with an abstract name, which the kernel forgets with the process: nothing lies on a disk, and
nothing is left behind. Such a name can be used, and taken first, by any process of the network namespace: by other
users, and by a container that has the host's network. So both ends prove to each other who they are:

a. Each end asks the kernel for the other one's user and process id (SO_PEERCRED). Another user is turned away.
b. Each end has a memfd with a random token in its name, and tells the other one the descriptor's number.
c. Each end reads that name, through /proc/PID/fd/FD. The kernel allows it to those who may also read the environment
   and open the shared memory of that process (PTRACE_MODE_READ), and see its id at all. A container with namespaces of
   its own cannot, whatever its user is called.
d. Both tokens together are the key by which the connection is authenticated, as all others are (`net.auth`), before
   the secret is sent. What a process received on another connection, from one whose id is used again, is no key.

So nothing is given to, nor taken from, a process that could not take the secret from this one's environment and memory
as well. (Namespaces could be compared instead; but that is a look at what has an id now, which may not be what is
connected. A directory of mode 0700 is private to a user, not to a container into which it was mounted.)

Where the ranks were given a secret, that is the key instead: so ranks in several containers of a host can meet, too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec

from reigen.cluster.bootstrap.job_credentials import SECRET_FILE_VARIABLE
from reigen.cluster.bootstrap.rank_lock import read_process_stat
from reigen.cluster.environ import SECRET_VARIABLE
from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import SECRET_BYTES, ClientHandshake, Handshake, Identity, ProcessRole, ServerHandshake
from reigen.net.connection import Connection, StreamProtocol
from reigen.net.fork_safety import close_in_children

_log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
#: The number of a descriptor; or what there is instead of one.
_NUMBER = struct.Struct("i")
_HAS_SECRET, _CANNOT_INSPECT = -1, -2
_TOKEN_NAME = re.compile(rf"/memfd:reigen-([0-9a-f]{{{2 * SECRET_BYTES}}}) \(deleted\)")
_IDENTITY = Identity(ProcessRole.RANK, 0, "handover")
_MAX_BYTES = 1024
_AGAIN_SECONDS = 0.05
#: How long the other end may take once it is connected.
_HANDSHAKE_SECONDS = 5.0


class ServiceEndpoint(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Address of the job's control service, and the job's secret."""

    address: str
    secret: bytes

    def __repr__(self) -> str:  # a secret is shown nowhere
        return f"ServiceEndpoint({self.address!r})"


def bootstrap_socket_name(launcher: str, job_id: str, size: int) -> bytes:
    """Return the abstract socket name at which the ranks of a job on this host meet.

    A launcher that does not tell its jobs apart is told apart itself: by the process that started the ranks.
    """
    job = job_id or identify_launcher_process()
    digest = hashlib.sha256(f"{launcher}\0{job}\0{size}".encode()).hexdigest()
    return f"\0reigen/{os.geteuid()}/{digest[:32]}".encode()


def identify_launcher_process() -> str:
    """Return the closest process above that was not given this rank, as a word that is unique for it."""
    pid, own = os.getpid(), _rank_variables(os.getpid())
    while True:
        parent = int(read_process_stat(pid)[1])
        if parent < 1:
            return f"process {pid}"
        if _rank_variables(parent) != own:
            started = read_process_stat(parent)[19:20]
            return f"process {parent} {started}"
        pid = parent


def _rank_variables(pid: int) -> frozenset[bytes] | None:
    """Return a process's variables that say RANK, in any launcher's words; None where they are secret."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return frozenset(entry for entry in entries if b"RANK" in entry.partition(b"=")[0])


class LocalBootstrapServer:
    """Rank 0's end: gives the pointer to every process that proves to belong here, until it is closed.

    Args:
        name: abstract name of the socket.
        pointer: what is handed over.
        given: the secret that all processes were given, None for none; see the module.

    Raises:
        OSError: the name is taken.
    """

    def __init__(self, name: bytes, pointer: ServiceEndpoint, given: bytes | None = None) -> None:
        self._data = msgspec.msgpack.encode(pointer)
        self._given = given
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(name)
            self._listener.listen(512)
            self._token = _MemfdToken()
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="reigen-handover", daemon=True)
        self._thread.start()
        close_in_children(self)

    def close(self) -> None:
        """Stop. May be called twice."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the socket in a child: `reigen.net.fork_safety`."""
        self._listener.close()
        self._token.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno == errno.EINVAL:
                    return
                time.sleep(_AGAIN_SECONDS)  # no descriptors left, for the moment
                continue
            with connection, contextlib.suppress(OSError, AuthenticationError, WireError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        connection.settimeout(_HANDSHAKE_SECONDS)
        pid, user = _peer_credentials(connection)
        if user != os.geteuid():
            return
        number = _receive_number(connection)
        if self._given is not None:
            key, answer = self._given, _HAS_SECRET
        else:
            try:
                key, answer = _derive_key(_read_token(pid, number), self._token.value), self._token.fd
            except OSError as error:
                _log.info("process %d asked for the job's secret, but cannot be looked at: %s", pid, error)
                key, answer = b"", _CANNOT_INSPECT
        connection.sendall(_NUMBER.pack(answer))
        if key:
            _shake_hands(connection, ServerHandshake(key, _IDENTITY), deadline).send(self._data, deadline)


def fetch_endpoints(name: bytes, given: bytes | None = None) -> list[ServiceEndpoint]:
    """Fetch what rank 0 hands over; nothing while there is no rank 0.

    Args:
        name: abstract name of the socket.
        given: as for `LocalBootstrapServer`.

    Raises:
        AuthenticationError: who listens there does not belong to this job, or is in another container.
        WireError: it is no pointer.
    """
    with socket.socket(socket.AF_UNIX) as connection, contextlib.closing(_MemfdToken()) as token:
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        connection.settimeout(_HANDSHAKE_SECONDS)
        try:
            connection.connect(name)
            key = _negotiate_key(connection, f"the abstract socket of this job, {name[1:].decode()}", token, given)
            data = _shake_hands(connection, ClientHandshake(key, _IDENTITY), deadline).receive(deadline)
        except AuthenticationError as error:
            if isinstance(error.__context__, ConnectionError):  # it has just ended
                return []
            raise
        except OSError:
            return []
    try:
        return [msgspec.msgpack.decode(data, type=ServiceEndpoint)]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"rank 0 hands over what is no pointer to a service: {error}") from None


def is_served(name: bytes) -> bool:
    """Return whether a process listens at an abstract name, whether or not it answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        return connection.connect_ex(name) != errno.ECONNREFUSED


def _negotiate_key(connection: socket.socket, where: str, token: _MemfdToken, given: bytes | None) -> bytes:
    """Negotiate the key of both ends; steps a to c of the module, of the connecting end.

    Raises:
        AuthenticationError: there can be none.
        OSError: the other end has gone.
    """
    pid, user = _peer_credentials(connection)
    if user != os.geteuid():
        raise AuthenticationError(f"user {user} listens at {where}; it is not rank 0")
    connection.sendall(_NUMBER.pack(token.fd if given is None else _HAS_SECRET))
    answer = _receive_number(connection)
    if given is not None and answer == _HAS_SECRET:
        return given
    if given is not None or answer == _HAS_SECRET:
        nots = ("", "not ") if given is not None else ("not ", "")
        raise AuthenticationError(
            f"this process was {nots[0]}given a secret ({SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}), and who listens "
            f"at {where} was {nots[1]}given one"
        )
    if answer == _CANNOT_INSPECT:
        problem = "this process cannot be looked at from there"
    elif pid == 0:
        problem = "it has no process id here"
    else:
        try:
            return _derive_key(token.value, _read_token(pid, answer))
        except PermissionError as error:
            problem = f"process {pid} cannot be looked at: {error.strerror}"
    raise AuthenticationError(
        f"who listens at {where}, is in another container than this process, or otherwise kept apart from it: "
        f"{problem}. If it belongs to this job, give all of the job's processes the same {SECRET_VARIABLE} (64 "
        f"hexadecimal digits: export {SECRET_VARIABLE}=$(openssl rand -hex 32)) or {SECRET_FILE_VARIABLE}"
    )


class _MemfdToken:
    """Secret number, readable only by processes that may look at this process's descriptors."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(SECRET_BYTES)
        self.fd = os.memfd_create(f"reigen-{self.value.hex()}")

    def close(self) -> None:
        """Forget it. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _read_token(pid: int, number: int) -> bytes:
    """Read the token of another process.

    Raises:
        OSError: it cannot be seen from here, or has no token there.
    """
    target = os.readlink(f"/proc/{pid}/fd/{number}")  # looked at, not opened: whatever it is, nothing happens to it
    if (match := _TOKEN_NAME.fullmatch(target)) is None:
        raise FileNotFoundError(errno.ENOENT, "no token")
    return bytes.fromhex(match[1])


def _derive_key(client: bytes, server: bytes) -> bytes:
    return hashlib.sha256(b"reigen handover\0" + client + server).digest()


def _shake_hands(connection: socket.socket, handshake: Handshake, deadline: float) -> Connection:
    authenticated = Connection(connection, StreamProtocol(handshake, _MAX_BYTES))
    authenticated.shake_hands(deadline)
    return authenticated


def _receive_number(connection: socket.socket) -> int:
    data = connection.recv(_NUMBER.size)  # a Unix socket does not divide what was sent as one
    if len(data) < _NUMBER.size:
        raise ConnectionResetError
    return int(_NUMBER.unpack(data)[0])


def _peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id, 0 if it has none in this process's namespace, and user of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user
