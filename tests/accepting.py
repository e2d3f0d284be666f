"""The accepting end of a connection, for tests that hold the socket themselves."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from reigen.net.auth import Identity
from reigen.net.connection import Connection, ConnectionOptions

if TYPE_CHECKING:
    from reigen.net.tls import TlsContext


def accept_connection(
    accepted: socket.socket,
    secret: bytes,
    me: Identity,
    max_message_bytes: int,
    deadline: float,
    tls: TlsContext | None = None,
) -> Connection:
    """Authenticate both ends, by the deadline. Arguments and errors as of `open_connection`."""
    connection = ConnectionOptions(secret, me, max_message_bytes, tls).accept(accepted)
    try:
        connection.shake_hands(deadline)
    except BaseException:
        connection.close()
        raise
    return connection
