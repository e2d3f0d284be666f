"""Somebody in between the ranks of a job, who reads what they say and may change what is not authenticated."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

_INTRODUCTION = struct.Struct(">4sBI32s32s")
_PROOF_BYTES, _HEADER_BYTES = 32, 25
#: ``change(sender, receiver, body)``
Change = Callable[[int, int, bytes], bytes]


class Middle:
    """Stands on the way of real connections without TLS between ranks, whoever is led to `in_front_of` an address.

    It keeps the bodies of bulk messages and may put others of the same length in their place; their headers are sealed,
    as are control messages, which it passes on as they are.

    Attributes:
        change: what becomes of a body.
        seen: all bodies, as they were sent: sender, receiver, bytes.
    """

    def __init__(self) -> None:
        self.change: Change = lambda sender, receiver, body: body
        self.seen: list[tuple[int, int, bytes]] = []
        self._doors: dict[tuple[str, int], socket.socket] = {}
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def in_front_of(self, address: tuple[str, int]) -> tuple[str, int]:
        """Where to connect in order to come to ``address`` by way of this one."""
        with self._lock:
            if address not in self._doors:
                self._doors[address] = door = socket.create_server(("127.0.0.1", 0))
                self._start(self._serve, door, address)
            return "127.0.0.1", self._doors[address].getsockname()[1]

    def guide(self) -> tuple[str, int]:
        """Where other processes ask for `in_front_of`; see `led`."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._doors["guide", 0] = listener
        self._start(self._guide, listener)
        address: tuple[str, int] = listener.getsockname()
        return address

    def with_marker(self, marker: bytes) -> list[bytes]:
        """The bodies in which something is."""
        return [body for _, _, body in self.seen if marker in body]

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            for each in (*self._doors.values(), *self._connections):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # nobody starts one any more but _serve, which comes before what it starts
            thread.join(30)
        for each in (*self._doors.values(), *self._connections):
            each.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _guide(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as asking, asking.makefile("rw") as line:
                    host, port = line.readline().split()
                    line.write(f"{self.in_front_of((host, int(port)))[1]}\n")

    def _serve(self, door: socket.socket, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = door.accept()[0]
                self._connections.append(near)
                self._start(self._introduce, near, address)

    def _introduce(self, near: socket.socket, address: tuple[str, int]) -> None:
        """Pass the handshake on; it says, in clear, who talks to whom, and what for."""
        with contextlib.suppress(OSError, EOFError):
            far = socket.create_connection(address)
            self._connections.append(far)
            hello = _pass_on(near, far, _INTRODUCTION.size)
            challenge = _pass_on(far, near, _INTRODUCTION.size + _PROOF_BYTES)
            _pass_on(near, far, _PROOF_BYTES)
            (_, _, client, purpose, _), (_, _, server, _, _) = map(_INTRODUCTION.unpack_from, (hello, challenge))
            is_bulk = purpose.startswith((b"data", b"back"))
            self._start(self._forward, far, near, (server, client), is_bulk)
            self._forward(near, far, (client, server), is_bulk)

    def _forward(self, source: socket.socket, target: socket.socket, ranks: tuple[int, int], is_bulk: bool) -> None:
        """One direction, until it ends."""
        with contextlib.suppress(OSError, EOFError):
            while is_bulk:
                header = _exactly(source, _HEADER_BYTES)
                body = _exactly(source, int.from_bytes(header[-8:], "big"))
                self.seen.append((*ranks, body))
                changed = self.change(*ranks, body)
                assert len(changed) == len(body)
                target.sendall(header + changed)
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def led(guide: tuple[str, int], address: tuple[str, int]) -> tuple[str, int]:
    """`Middle.in_front_of` of the one who is in another process."""
    with socket.create_connection(guide, 30) as asking, asking.makefile("rw") as line:
        line.write(f"{address[0]} {address[1]}\n")
        line.flush()
        return "127.0.0.1", int(line.readline())


def _exactly(source: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = source.recv(num_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _pass_on(source: socket.socket, target: socket.socket, num_bytes: int) -> bytes:
    data = _exactly(source, num_bytes)
    target.sendall(data)
    return data
