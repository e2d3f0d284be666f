"""What plain connections reach, for `benchmarks/kv_wire.py`: the bytes of a synchronous pushpull, not added up.

Each worker sends a part of its data to every server, in cells. A server sends a cell back to all as soon as it has it
from all of them: earlier no server can. One connection between a worker and a server, with a thread for each direction.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.servers import Seat
from benchmarks.harness.sizes import element_counts
from benchmarks.harness.work import Case
from benchmarks.plain_tcp import Exchange, connect, receive

CELL_BYTES = 1 << 20
_SERVERS_VARIABLE = "PLAIN_STAR_SERVERS"  # addresses by number
_FIRST_PORT = 29700
_LENGTH = struct.Struct("<Q")


def variables(common: Mapping[str, str], servers: Sequence[Seat]) -> dict[str, str]:
    """What workers are told: where servers are."""
    return {**common, _SERVERS_VARIABLE: ",".join(seat.address for seat in servers)}


def role(name: str) -> list[str]:
    """The command of a server; there is no scheduler."""
    return [sys.executable, str(Path(__file__)) if name == "server" else "-V"]


class Pushpull(Exchange):
    """A `Work`: everything to the servers, and as much back."""

    def __init__(self, connections: list[socket.socket], pool: ThreadPoolExecutor, part_bytes: int) -> None:
        super().__init__(connections, pool, part_bytes)
        self._sent = _LENGTH.pack(part_bytes) + self._sent

    def operate(self) -> None:
        self.swap()


class Worker:
    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        addresses = os.environ[_SERVERS_VARIABLE].split(",")
        self._pool = ThreadPoolExecutor(2 * len(addresses))
        self._connections = [connect(address, _FIRST_PORT + number) for number, address in enumerate(addresses)]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def open(self, case: Case) -> Pushpull:
        return Pushpull(self._connections, self._pool, 4 * sum(element_counts(case)) // len(self._connections))

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()


def start(rank: int, size: int) -> Worker:
    return Worker()


def serve() -> None:
    """A server, until a worker has gone."""
    number, num_workers = int(os.environ["DMLC_TASK_ID"]), int(os.environ["DMLC_NUM_WORKER"])
    with socket.create_server((os.environ["DMLC_NODE_HOST"], _FIRST_PORT + number)) as listener:
        connections = [listener.accept()[0] for _ in range(num_workers)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _serve_once(connections)


def _serve_once(connections: list[socket.socket]) -> None:
    length = bytearray(_LENGTH.size)
    for connection in connections:
        receive(connection, length)
    (left,) = _LENGTH.unpack(length)
    cells = [min(CELL_BYTES, left - begin) for begin in range(0, left, CELL_BYTES)]
    cell, have, came = bytes(CELL_BYTES), [0] * len(connections), threading.Condition()

    def take(number: int) -> None:
        place = bytearray(CELL_BYTES)
        for nbytes in cells:
            receive(connections[number], memoryview(place)[:nbytes])
            with came:
                have[number] += 1
                came.notify_all()

    def give(number: int) -> None:
        for index, nbytes in enumerate(cells):
            with came:
                came.wait_for(lambda index=index: min(have) > index)
            connections[number].sendall(memoryview(cell)[:nbytes])

    numbers = range(len(connections))
    threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in numbers for act in (take, give)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    serve()
