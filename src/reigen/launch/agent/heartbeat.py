"""The agent's own connection to the control service, which says whether the other machine is alive.

The connection of ssh has the options that ssh gives it: where packets are lost, Linux waits twice as long after each
transmission in vain, so that what was said may come a minute late although both machines are there. On this connection
it is sent again at least every second (`reigen.net.sockets.set_keepalive`), which tells a loss from a silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from reigen.cluster.membership.control_service import MAX_MESSAGE_BYTES, REQUEST_CODEC, GetValue
from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import AuthenticationError, LaunchError, WireError
from reigen.launch.event_loop import LauncherLoop
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection

if TYPE_CHECKING:
    from reigen.net.tls import TlsContext

#: Nobody puts that: the service answers at once that there is no value.
_KEY = "heartbeat"


class AgentHeartbeat:
    """An agent's line to the control service: it asks, the service answers.

    Args:
        address: ``host:port`` of the service.
        secret: the job's.
        number: the agent's.
        loop: waits for answers.
        heard: is called with each answer.
        peer_timeout_seconds: see `reigen.net.sockets.set_keepalive`.
        timeout_seconds: how long to wait for the connection.
        tls: encrypt everything.

    Raises:
        LaunchError: there is no connection.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        number: int,
        loop: LauncherLoop,
        heard: Callable[[], None],
        *,
        peer_timeout_seconds: float,
        timeout_seconds: float,
        tls: TlsContext | None,
    ) -> None:
        self._loop, self._heard = loop, heard
        self._num_asked = 0
        until = time.monotonic() + timeout_seconds
        try:
            me = Identity(ProcessRole.AGENT, number, "heartbeat")
            self._connection = open_connection(split_address(address), secret, me, MAX_MESSAGE_BYTES, until, tls)
        except (OSError, AuthenticationError, WireError) as error:
            raise LaunchError(f"the launcher's service at {address} cannot be reached from there: {error}") from None
        self._connection.keep_alive(peer_timeout_seconds)
        loop.watch(self._connection, self._serve)

    def ask(self) -> None:
        """Ask whether the launcher is there; at the same time it hears that the agent is."""
        if self._connection.fileno() < 0:
            return
        if not self._connection.num_unsent_bytes:
            self._num_asked += 1
            self._connection.post(REQUEST_CODEC.encode(GetValue(self._num_asked, _KEY, wait=False)))
        self._flush()

    def close(self) -> None:
        """End the connection: the launcher's silence is told by ssh alone then. May be called twice."""
        if self._connection.fileno() >= 0:
            self._loop.unwatch(self._connection)
            self._connection.close()

    def _serve(self) -> None:
        try:
            for _ in self._connection.read():
                self._heard()
        except (OSError, AuthenticationError, WireError):
            self.close()
        else:
            self._flush()

    def _flush(self) -> None:
        """Send what the kernel takes; the rest goes with the next question, or answer."""
        try:
            self._connection.flush()
        except OSError:
            self.close()
