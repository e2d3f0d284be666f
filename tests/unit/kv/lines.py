"""Connected pairs for the tests of the parameter server."""

import socket
import threading
import time
from contextlib import ExitStack

from reigen.wire.auth import Identity, Role
from reigen.wire.stream import accept, connect

SECRET = b"s" * 32
ZERO, ONE = Identity(Role.RANK, 0, "kv 0"), Identity(Role.RANK, 1, "kv 0")


def connected_streams(tls=None):
    """Two authenticated streams to each other, of rank 1 and rank 0."""
    until = time.monotonic() + 10
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        accepted = []
        thread = threading.Thread(
            target=lambda: accepted.append(accept(listener.accept()[0], SECRET, ZERO, 1 << 16, until, tls))
        )
        thread.start()
        stack.callback(thread.join)
        client = connect(listener.getsockname(), SECRET, ONE, 1 << 16, until, tls)
    return client, accepted[0]
