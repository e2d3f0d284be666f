"""Control messages between hosts: a star of connections around rank 0. The twin of `reigen.net.shm_ring`.

Messages travel by `reigen.net.connection.Connection`. A connection that ends is left out from
then on, and remembered in ``lost``: why it ended is for the control service to say, which knows more.

Every thread that may sleep has an epoll instance of its own, with an eventfd in it by which other threads of this rank
wake it. The connections, which share another epoll instance, are always in the caller's, because a caller sleeps only
while it drives, and in the engine's only while no caller has taken over from it.

Rank 0 hears from the others before it submits its own operation. Where one blocking call follows another, each message
would wake the engine's thread, only for it to find the caller back at work, and both would contend for the interpreter
and a core. So behind a caller the connections stay out of the engine's instance for a moment (`release_to_engine`); a
timer in it ends the moment, and is set anew by every call.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
from collections.abc import Iterable, Mapping, Sequence

from reigen.net.connection import Connection
from reigen.net.doorbells import WaitingThread
from reigen.net.shm_ring import MAX_MESSAGE_BYTES
from reigen.net.timerfd import TimerFd

#: For how long the engine's thread lets messages lie for a caller who may come back.
_ENGINE_WAKE_SECONDS = 0.001


class TcpStarTransport:
    """Endpoint of one rank for control messages over TCP (`reigen.engine.transport.ControlTransport`).

    For one thread at a time, but for `wake`, `pending`, `token` and `sleep`.

    Args:
        connections: by rank: on rank 0 to all others, on the others to rank 0. They are closed by `close`.

    Attributes:
        lost: ranks whose connection has ended, and how.
    """

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self.lost: dict[int, str] = {}
        self._ranks: dict[Connection, int] = {}
        self._by_fd: dict[int, Connection] = {}
        self._epoll = select.epoll()
        self._received: list[tuple[int, bytes | Sequence[int]]] = []
        for rank, connection in connections.items():
            self._ranks[connection], self._by_fd[connection.fileno()] = rank, connection
            self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._wake_events = {
            thread: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            for thread in (WaitingThread.ENGINE, WaitingThread.CALLER)
        }
        self._wake_epolls = {thread: select.epoll() for thread in self._wake_events}
        for thread, wake_event in self._wake_events.items():
            self._wake_epolls[thread].register(wake_event, select.EPOLLIN)
            self._wake_epolls[thread].register(self._epoll.fileno(), select.EPOLLIN)
        self._waiter, self._tokens = WaitingThread.ENGINE, itertools.count()
        #: whether messages wake the engine's thread, and whether they will in a moment
        self._wakes_engine, self._wakes_engine_soon = True, False
        self._engine_timer = TimerFd(_ENGINE_WAKE_SECONDS)
        self._wake_epolls[WaitingThread.ENGINE].register(self._engine_timer.fileno(), select.EPOLLIN)
        #: readable when a message has come, or a caller was woken
        self.descriptor = self._wake_epolls[WaitingThread.CALLER].fileno()

    @property
    def backlog(self) -> int:
        """Messages that could not leave yet."""
        number = 0
        for connection in self._ranks:
            number += connection.num_posted
        return number

    def send(self, message: bytes) -> None:
        """Send a message to every rank there is a connection to. Never blocks."""
        self._post(message, list(self._ranks))

    def _post(self, message: bytes, connections: Iterable[Connection]) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            raise AssertionError(f"a control message of {len(message)} bytes; the most is {MAX_MESSAGE_BYTES}")
        for connection in connections:
            connection.post(message)
            self._flush(connection)

    #: every message is sealed on its own, so integers would gain nothing
    carries_integers = False

    def send_integers(self, integers: Sequence[int]) -> None:
        """Not carried."""
        raise AssertionError("integers go as messages here")

    def wake_readers(self) -> None:
        """Do nothing: every message wakes."""

    def flush(self) -> None:
        """Send waiting messages, as far as the kernel takes them."""
        for connection in list(self._ranks):
            self._flush(connection)

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        """Every message that has come, with its sender, in each sender's order.

        Raises:
            AuthenticationError, WireError: an attacker has put bytes into a connection that are not its peer's.
        """
        received, self._received = self._received, []
        for fd, _ in self._epoll.poll(0):
            connection = self._by_fd[fd]
            rank = self._ranks[connection]
            try:
                received += [(rank, message) for message in connection.read()]
            except OSError as error:
                self._lose(connection, error)
        return received

    def _flush(self, connection: Connection) -> None:
        try:
            connection.flush()
        except OSError as error:
            self._lose(connection, error)

    def _lose(self, connection: Connection, error: OSError) -> None:
        rank = self._ranks.pop(connection)
        with contextlib.suppress(OSError):
            while messages := connection.read():  # sent before it went
                self._received += [(rank, message) for message in messages]
        self._epoll.unregister(connection.fileno())
        del self._by_fd[connection.fileno()]
        connection.close()
        self.lost[rank] = error.strerror or str(error)

    def pending(self) -> bool:
        """Return whether `receive` would give something."""
        return bool(self._received) or bool(self._epoll.poll(0))

    def token(self) -> int:
        """A new number: a wake event from before a sleep ends it at once, and something may always have come."""
        return next(self._tokens)

    def look(self, token: int, times: int) -> bool:
        """Look so often whether a message has come; whether one has."""
        return any(self.pending() for _ in range(times))

    def sleep(self, token: int, thread: WaitingThread, timeout_seconds: float) -> None:
        """Sleep until a message has come or a thread has woken ``thread``, or for the time given."""
        if any(fd == self._wake_events[thread] for fd, _ in self._wake_epolls[thread].poll(timeout_seconds)):
            self._clear_wake_event(thread)

    def set_wake_target(self, thread: WaitingThread) -> None:
        """From now on messages wake ``thread``."""
        if self._wakes_engine_soon:
            self._wakes_engine_soon = False
            self._engine_timer.stop()
        wakes = thread in {WaitingThread.ENGINE, WaitingThread.PARKED}
        if wakes != self._wakes_engine:
            self._wakes_engine = wakes
            self._wake_epolls[WaitingThread.ENGINE].modify(self._epoll.fileno(), select.EPOLLIN if wakes else 0)
        self._waiter = thread

    def release_to_engine(self, urgent: bool) -> bool:
        """A caller goes: the engine's thread looks for work in a moment; until then messages leave it asleep."""
        self._wakes_engine_soon = True
        self._engine_timer.start()
        self._waiter = WaitingThread.ENGINE
        return True

    def wake(self, thread: WaitingThread) -> None:
        """Wake a thread of this rank that sleeps as ``thread``. Any thread may call this."""
        awaited = (
            thread & self._waiter or thread
        )  # of several, the one that has taken over looks after all there is to do
        for one, wake_event in self._wake_events.items():
            if one & awaited:
                os.eventfd_write(wake_event, 1)

    def clear_wakeup(self) -> None:
        """For who waits on `descriptor`: look for work after this, and it is readable when there is more."""
        self._clear_wake_event(WaitingThread.CALLER)

    def _clear_wake_event(self, thread: WaitingThread) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_events[thread])

    def close(self) -> None:
        """Close all connections. May be called twice."""
        for connection in self._ranks:
            connection.close()
        self._ranks.clear()
        self._by_fd.clear()
        for each in (self._epoll, *self._wake_epolls.values()):
            each.close()
        self._engine_timer.close()
        for wake_event in self._wake_events.values():
            os.close(wake_event)
        self._wake_events = {}
