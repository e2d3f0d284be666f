"""What plain connections reach, for `benchmarks/network.py`: the bytes of a sum over hosts, exchanged and not summed.

Each rank sends its part of the data to every other, twice, as reducing and handing out the result would: 2 (n-1) / n
bytes for each byte of data. One connection between any two ranks, both directions at once. There are two ways:

ordinary   all parts first; when all of them have come, all parts once more
pipelined  what a sum over hosts has to wait for, and nothing else: a piece of the result can leave when that piece of
           all contributions has come. Nobody agrees with anybody on anything: the limit of what a wire and its TCP give
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.harness.work import Case

PEERS_VARIABLE = "PLAIN_TCP_PEERS"  # addresses by rank
_FIRST_PORT = 29600
_CONNECT_SECONDS = 60.0
_PIECE_BYTES = 1 << 17


class Exchange:
    """A `Work`: two rounds in which everybody sends to and receives from everybody."""

    def __init__(self, connections: list[socket.socket], pool: ThreadPoolExecutor, part_bytes: int) -> None:
        self._connections, self._pool = connections, pool
        self._sent, self._received = bytearray(part_bytes), [bytearray(part_bytes) for _ in connections]

    def prepare(self) -> None:
        pass

    def operate(self) -> None:
        for _ in range(2):
            self.swap()

    def swap(self) -> None:
        """Send to everybody and receive from everybody, all at once."""
        started: list[Future[None]] = []
        for connection, into in zip(self._connections, self._received, strict=True):
            started.append(self._pool.submit(connection.sendall, self._sent))
            started.append(self._pool.submit(receive, connection, into))
        for future in started:
            future.result()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Pipeline(Exchange):
    """A `Work`: contributions leave at once, and pieces of the result behind them as soon as they can be there."""

    def operate(self) -> None:
        num_pieces = -(-len(self._sent) // _PIECE_BYTES)
        arrived = [threading.Semaphore(0) for _ in range(num_pieces)]
        started: list[Future[None]] = []
        for connection, into in zip(self._connections, self._received, strict=True):
            started.append(self._pool.submit(self._send, connection, arrived))
            started.append(self._pool.submit(self._receive, connection, into, arrived))
        for future in started:
            future.result()

    def _send(self, connection: socket.socket, arrived: list[threading.Semaphore]) -> None:
        connection.sendall(self._sent)
        for number, pieces in enumerate(arrived):
            for _ in self._connections:
                pieces.acquire()
            begin = number * _PIECE_BYTES
            connection.sendall(memoryview(self._sent)[begin : begin + _PIECE_BYTES])

    def _receive(self, connection: socket.socket, into: bytearray, arrived: list[threading.Semaphore]) -> None:
        for number, pieces in enumerate(arrived):
            begin = number * _PIECE_BYTES
            receive(connection, memoryview(into)[begin : begin + _PIECE_BYTES])
            pieces.release(len(self._connections))
        receive(connection, into)


class Plain:
    def __init__(self, rank: int, size: int) -> None:
        self.versions: dict[str, str] = {}
        self._size = size
        self._pool = ThreadPoolExecutor(2 * size)
        self._connections = meet(rank, os.environ[PEERS_VARIABLE].split(","))

    def open(self, case: Case) -> Exchange:
        kind = Pipeline if case.name == "pipelined" else Exchange
        return kind(self._connections, self._pool, case.nbytes // self._size)

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()


def meet(rank: int, addresses: list[str]) -> list[socket.socket]:
    """A connection to each other rank: the higher one connects."""
    with socket.create_server((addresses[rank], _FIRST_PORT + rank)) as server:
        connections = [connect(addresses[lower], _FIRST_PORT + lower) for lower in range(rank)]
        connections += [server.accept()[0] for _ in range(rank + 1, len(addresses))]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


def connect(address: str, port: int) -> socket.socket:
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def receive(connection: socket.socket, into: bytearray | memoryview) -> None:
    view = memoryview(into)
    while view:
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise EOFError("the other rank has ended")
        view = view[num_bytes:]


def start(rank: int, size: int) -> Plain:
    return Plain(rank, size)
