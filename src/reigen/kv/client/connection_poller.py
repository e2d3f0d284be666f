"""What a worker's poll waits for: its connections, whose descriptors come and go, and others that stay."""

from __future__ import annotations

import select
from collections.abc import Iterable, Iterator
from typing import Protocol

from reigen.kv.client.server_connection import ServerConnection


class SupportsFileno(Protocol):
    """What has a descriptor."""

    def fileno(self) -> int:
        """Which; -1: none now."""
        ...


class ConnectionPoller:
    """A poll.

    Args:
        others: to be read from whenever they are readable, for as long as this is used.
    """

    def __init__(self, others: Iterable[SupportsFileno]) -> None:
        self._poll = select.poll()
        self._others = {other.fileno(): other for other in others}
        for fd in self._others:
            self._poll.register(fd, select.POLLIN)
        #: descriptor and events of each connection, and whose a descriptor is
        self._watched: dict[ServerConnection, tuple[int, int]] = {}
        self._by_descriptor: dict[int, ServerConnection] = {}

    def update(self, upstream: ServerConnection) -> None:
        """Wait for what the connection needs now."""
        now = upstream.fileno(), select.POLLIN | (select.POLLOUT if upstream.wants_to_send else 0)
        before = self._watched.get(upstream, (-1, 0))
        if now == before:
            return
        if before[0] >= 0 and before[0] != now[0] and self._by_descriptor.get(before[0]) is upstream:
            del self._by_descriptor[before[0]]
            self._poll.unregister(before[0])
        if now[0] >= 0:
            self._by_descriptor[now[0]] = upstream
            self._poll.register(*now)
        self._watched[upstream] = now

    def wait(self, timeout_seconds: float) -> Iterator[ServerConnection | SupportsFileno]:
        """Wait until something is ready, and say what; not of a connection that has gone since."""
        for fd, _ in self._poll.poll(timeout_seconds * 1000):
            ready = self._by_descriptor.get(fd) or self._others.get(fd)
            if ready is not None:
                yield ready

    def clear(self) -> None:
        """The connections are closed."""
        self._watched.clear()
        self._by_descriptor.clear()
