"""Control messages between hosts: a star of connections around rank 0. The twin of `reigen.wire.mailbox`.

Messages are payloads of authenticated conversations (`reigen.wire.stream`). A connection that ends is left out from
then on, and remembered in ``lost``: why it ended is for the control service to say, which knows more.

Whom a message wakes: every thread that may sleep has a bed, an epoll instance, with an eventfd in it by which other
threads of this rank wake it. The connections, an epoll instance of their own, lie in the caller's bed always, because a
caller sleeps only while it drives, and in the engine's bed only while nobody has taken over from it.

Rank 0 hears from the others before it submits what they have. Where one blocking call follows another, each would wake
the engine's thread there, only for it to find the caller back at work, and both would contend for the interpreter and a
core. So behind a caller the connections stay out of that bed for a moment (`hand_back`); a timer that lies in it ends
the moment, and is set anew by every call.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Mapping

from reigen.wire.mailbox import MAX_MESSAGE_BYTES, Sleeper
from reigen.wire.stream import Conversation, Stream
from reigen.wire.timer import Timer

#: For how long the engine's thread lets messages lie for a caller who may come back.
_MOMENT_SECONDS = 0.001


class _Ray:
    """The connection to one rank."""

    def __init__(self, rank: int, connection: socket.socket, conversation: Conversation) -> None:
        self.rank = rank
        self.connection = connection
        self._conversation = conversation
        #: messages that have not left
        self.num_outgoing = 0

    def send(self, message: bytes) -> None:
        """Put a message behind what waits, and send what the kernel takes."""
        self._conversation.send(message)
        self.num_outgoing += 1
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes; raises OSError when the other end has gone."""
        outgoing = self._conversation.outgoing
        try:
            while outgoing:
                del outgoing[: self.connection.send(outgoing)]
            self.num_outgoing = 0
        except BlockingIOError:
            pass

    def receive(self) -> tuple[list[bytes], str]:
        """The messages that have come, and why no more will come, if so."""
        end, messages, wanted = "", [], self._conversation.num_wanted_bytes
        try:
            while data := self.connection.recv(wanted):
                messages += self._conversation.receive(data)
                if len(data) < wanted:
                    return messages, end  # that was all; what comes later, the end too, makes it readable anew
            end = "the other end closed it"
        except BlockingIOError:
            pass
        except OSError as error:
            end = error.strerror or str(error)
        return messages, end


class Star:
    """One rank's end. For one thread at a time, but for `wake`, `pending`, `token` and `sleep`.

    Args:
        streams: by rank: on rank 0 to all others, on the others to rank 0. They are taken over, and closed by `close`.

    Attributes:
        lost: ranks whose connection has ended, and how.
    """

    def __init__(self, streams: Mapping[int, Stream]) -> None:
        self.lost: dict[int, str] = {}
        self._rays: dict[int, _Ray] = {}
        self._sky = select.epoll()
        self._received: list[tuple[int, bytes]] = []
        for rank, stream in streams.items():
            connection, conversation = stream.hand_over()
            self._rays[connection.fileno()] = _Ray(rank, connection, conversation)
            self._sky.register(connection.fileno(), select.EPOLLIN)
        self._alarms = {
            who: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for who in (Sleeper.ENGINE, Sleeper.CALLER)
        }
        self._beds = {who: select.epoll() for who in self._alarms}
        for who, alarm in self._alarms.items():
            self._beds[who].register(alarm, select.EPOLLIN)
            self._beds[who].register(self._sky.fileno(), select.EPOLLIN)
        self._taker = Sleeper.ENGINE
        #: whether messages wake the engine's thread, and whether they will in a moment
        self._engine_hears, self._is_moment = True, False
        self._moment = Timer(_MOMENT_SECONDS)
        self._beds[Sleeper.ENGINE].register(self._moment.fileno(), select.EPOLLIN)
        #: readable when a message has come, or a caller was woken
        self.descriptor = self._beds[Sleeper.CALLER].fileno()

    @property
    def backlog(self) -> int:
        """Messages that could not leave yet."""
        number = 0
        for ray in self._rays.values():
            number += ray.num_outgoing
        return number

    def send(self, message: bytes) -> None:
        """Send a message to every rank there is a connection to. Never blocks."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise AssertionError(f"a control message of {len(message)} bytes; the most is {MAX_MESSAGE_BYTES}")
        for ray in list(self._rays.values()):
            try:
                ray.send(message)
            except OSError as error:
                self._lose(ray, error.strerror or str(error))

    def flush(self) -> None:
        """Send what was kept back, as far as the kernel takes it."""
        for ray in list(self._rays.values()):
            try:
                ray.flush()
            except OSError as error:
                self._lose(ray, error.strerror or str(error))

    def receive(self) -> list[tuple[int, bytes]]:
        """Every message that has come, with its sender, in each sender's order.

        Raises:
            AuthenticationError, WireError: somebody has put bytes into a connection that are not its peer's.
        """
        received, self._received = self._received, []
        for fd, _ in self._sky.poll(0):
            ray = self._rays[fd]
            messages, end = ray.receive()
            received += [(ray.rank, message) for message in messages]
            if end:
                self._lose(ray, end)
        return received

    def _lose(self, ray: _Ray, why: str) -> None:
        messages, _ = ray.receive()  # it may have spoken before it went
        self._received += [(ray.rank, message) for message in messages]
        del self._rays[ray.connection.fileno()]
        self._sky.unregister(ray.connection.fileno())
        ray.connection.close()
        self.lost[ray.rank] = why

    def pending(self) -> bool:
        """Whether `receive` would give something."""
        return bool(self._received) or bool(self._sky.poll(0))

    def token(self) -> int:
        """Nothing to remember: an alarm that was rung before a sleep ends it at once."""
        return 0

    def sleep(self, token: int, who: Sleeper, timeout_seconds: float) -> None:
        """Sleep until a message has come or somebody has woken ``who``, or for the time given."""
        if any(fd == self._alarms[who] for fd, _ in self._beds[who].poll(timeout_seconds)):
            self._silence(who)

    def take_over(self, who: Sleeper) -> None:
        """From now on messages wake ``who``."""
        if self._is_moment:
            self._is_moment = False
            self._moment.stop()
        hears = who is Sleeper.ENGINE
        if hears != self._engine_hears:
            self._engine_hears = hears
            self._beds[Sleeper.ENGINE].modify(self._sky.fileno(), select.EPOLLIN if hears else 0)
        self._taker = who

    def hand_back(self) -> bool:
        """A caller goes: the engine's thread looks for work in a moment; until then messages leave it asleep."""
        self._is_moment = True
        self._moment.start()
        self._taker = Sleeper.ENGINE
        return True

    def wake(self, who: Sleeper) -> None:
        """Wake a thread of this rank that sleeps as ``who``. Any thread may call this."""
        awaited = who & self._taker or who  # of several, the one that has taken over looks after all there is to do
        for one, alarm in self._alarms.items():
            if one & awaited:
                os.eventfd_write(alarm, 1)

    def calm(self) -> None:
        """For who waits on `descriptor`: look for work after this, and it is readable when there is more."""
        self._silence(Sleeper.CALLER)

    def _silence(self, who: Sleeper) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._alarms[who])

    def close(self) -> None:
        """Close all connections. May be called twice."""
        for ray in self._rays.values():
            ray.connection.close()
        self._rays.clear()
        for bed in (self._sky, *self._beds.values()):
            bed.close()
        self._moment.close()
        for alarm in self._alarms.values():
            os.close(alarm)
        self._alarms = {}
