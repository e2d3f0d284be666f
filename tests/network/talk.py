"""A program for stand-in machines, of the standard library alone, so that it starts at once.

``serve ADDRESS PORT``: accepts one connection after the other and sends back what comes.
``ask ADDRESS PORT NUM_BYTES TIMES``: has that many bytes sent back, so many times over one connection, and prints the
seconds that each took.
``sink ADDRESS PORT``: accepts connections and reads them to their end, printing how many bytes came.
``send ADDRESS PORT NUM_BYTES``: sends that many, waits until all were taken, prints the seconds.
``hold ADDRESS PORT``: connects, prints a line, and prints another when the connection ends, and how.
"""

from __future__ import annotations

import socket
import sys
import threading
import time


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes and (part := connection.recv(num_bytes - len(data))):
        data += part
    return bytes(data)


def listen(address: str, port: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, int(port)), family=family)


def echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def serve(address: str, port: str) -> None:
    with listen(address, port) as server:
        while True:
            threading.Thread(target=echo, args=[server.accept()[0]], daemon=True).start()


def ask(address: str, port: str, num_bytes: str, times: str) -> None:
    data = bytes(range(256)) * (int(num_bytes) // 256)
    with socket.create_connection((address, int(port)), timeout=60) as connection:
        for _ in range(int(times)):
            start = time.monotonic()
            connection.sendall(data)
            assert receive(connection, len(data)) == data
            print(time.monotonic() - start, flush=True)


def sink(address: str, port: str) -> None:
    with listen(address, port) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                total = 0
                while data := connection.recv(1 << 16):
                    total += len(data)
                print(total, flush=True)


def send(address: str, port: str, num_bytes: str) -> None:
    with socket.create_connection((address, int(port)), timeout=60) as connection:
        start = time.monotonic()
        connection.sendall(bytes(int(num_bytes)))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the other end closes when it has everything
        print(time.monotonic() - start, flush=True)


def hold(address: str, port: str) -> None:
    with socket.create_connection((address, int(port)), timeout=60) as connection:
        connection.settimeout(None)
        print("connected", flush=True)
        try:
            print("end" if not connection.recv(1) else "data", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)


if __name__ == "__main__":
    {"serve": serve, "ask": ask, "sink": sink, "send": send, "hold": hold}[sys.argv[1]](*sys.argv[2:])
