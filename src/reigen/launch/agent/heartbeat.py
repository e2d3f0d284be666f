"""Connection of an agent to the control service, which shows whether the other host is alive.

The connection of ssh has the options that ssh gives it: where packets are lost, Linux waits twice as long after each
transmission in vain, so that data may come a minute late although both hosts are there. On this connection it is sent
again at least every second (`reigen.net.sockets.set_keepalive`), which tells a loss from a silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from reigen.cluster.membership.control_service import REQUEST_CODEC, GetValue
from reigen.cluster.membership.messages import MAX_MESSAGE_BYTES
from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import AuthenticationError, LaunchError, WireError
from reigen.launch.options import NetworkOptions
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection

#: A key that is never put: the service answers at once that there is no value.
_KEY = "heartbeat"


class AgentHeartbeat:
    """Heartbeat of an agent: it asks the control service, the service answers, and ``on_reply`` is called.

    Raises:
        LaunchError: there is no connection within ``timeout_seconds``.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        number: int,
        loop: LauncherLoop,
        on_reply: Callable[[], None],
        network: NetworkOptions,
        timeout_seconds: float,
    ) -> None:
        self._loop, self._on_reply = loop, on_reply
        self._num_requests = 0
        tls, until = network.make_tls(), time.monotonic() + timeout_seconds
        try:
            me = Identity(ProcessRole.AGENT, number, "heartbeat")
            self._connection = open_connection(split_address(address), secret, me, MAX_MESSAGE_BYTES, until, tls)
        except (OSError, AuthenticationError, WireError) as error:
            raise LaunchError(f"the launcher's service at {address} cannot be reached from there: {error}") from None
        self._connection.keep_alive(network.peer_timeout_seconds)
        loop.watch(self._connection, self._serve)

    def ask(self) -> None:
        """Ask whether the launcher is there, which shows it that the agent is."""
        if self._connection.fileno() < 0:
            return
        if not self._connection.num_unsent_bytes:
            self._num_requests += 1
            self._connection.post(REQUEST_CODEC.encode(GetValue(self._num_requests, _KEY, wait=False)))
        self._flush()

    def close(self) -> None:
        """End the connection; then only ssh's shows whether the launcher lives. May be called twice."""
        if self._connection.fileno() >= 0:
            self._loop.unwatch(self._connection)
            self._connection.close()

    def _serve(self) -> None:
        try:
            for _ in self._connection.read():
                self._on_reply()
        except (OSError, AuthenticationError, WireError):
            self.close()
        else:
            self._flush()

    def _flush(self) -> None:
        """Send as much as the kernel takes; the rest goes with the next question, or answer."""
        try:
            self._connection.flush()
        except OSError:
            self.close()
