"""Connected pairs for the tests of the parameter server."""

import socket
import threading
import time
from contextlib import ExitStack

from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection
from tests.accepting import accept_connection

SECRET = b"s" * 32
ZERO, ONE = Identity(ProcessRole.RANK, 0, "kv 0"), Identity(ProcessRole.RANK, 1, "kv 0")


def connected_streams(tls=None):
    """Two authenticated streams to each other, of rank 1 and rank 0."""
    until = time.monotonic() + 10
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        accepted = []
        thread = threading.Thread(
            target=lambda: accepted.append(accept_connection(listener.accept()[0], SECRET, ZERO, 1 << 16, until, tls))
        )
        thread.start()
        stack.callback(thread.join)
        client = open_connection(listener.getsockname(), SECRET, ONE, 1 << 16, until, tls)
    return client, accepted[0]
