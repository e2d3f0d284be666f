"""Control messages between this rank and rank 0, or all others, of any length; and notes beside them.

A `reigen.engine.transport.ControlTransport` carries messages of bounded size. What is longer is sent in pieces, and
read when the last one has come. Notes go to listeners; a reader of the channel does not see them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from reigen.engine.messages import (
    MAX_FORWARDING_BYTES,
    Announcement,
    ForwardedMessage,
    MessageFragment,
    Note,
    Report,
    Topic,
    decode_announcements,
    decode_reports,
    encode,
    pack_batches,
    pack_cache_hits,
    unpack_batches,
)
from reigen.engine.transport import ControlTransport
from reigen.errors import CollectiveError, DeadlineError
from reigen.net.doorbells import WaitingThread
from reigen.net.shm_ring import MAX_MESSAGE_BYTES

#: A sleep while something is outstanding: deaths and deadlines are looked at this often.
CHECK_SECONDS = 0.1
#: A sleep while the transport is full.
BACKLOG_RETRY_SECONDS = 0.001

#: A message that is too long goes in pieces of this size, and may be so long as a whole.
_FRAGMENT_BYTES = MAX_MESSAGE_BYTES - MAX_FORWARDING_BYTES - 64
_MAX_REASSEMBLED_BYTES = 64 << 20

#: Takes a note: ``(sender's rank, data)``. Called on the driving thread; must be quick and raise nothing.
NoteListener = Callable[[int, bytes], None]


class ControlChannel:
    """Endpoint of one rank for control messages of any length. For the thread that drives the engine, except `post`.

    Args:
        transport: carries the messages.
        receives_reports: this is rank 0, to which the others report; else it receives rank 0's announcements.
    """

    def __init__(self, transport: ControlTransport, *, receives_reports: bool) -> None:
        self._transport = transport
        self._decode: Callable[[bytes], Sequence[Report | Announcement]] = (
            decode_reports if receives_reports else decode_announcements
        )
        #: to integers, for others to read, and from those of others; cache hits are integers
        self._pack = pack_batches if receives_reports else pack_cache_hits
        self._unpack: Callable[[Sequence[int]], Sequence[Report | Announcement]] | None = (
            None if receives_reports else unpack_batches
        )
        #: to be sent; any thread adds to it
        self.notes: deque[Note] = deque()
        self._listeners: dict[Topic, NoteListener] = {}
        #: the beginnings of messages that come in pieces, by sender
        self._pieces: dict[int, bytearray] = {}
        #: what `peek` has seen and `receive` has yet to give
        self.unread: list[tuple[int, bytes | Sequence[int]]] = []

    def post(self, note: Note) -> None:
        """Have a note sent. Any thread."""
        self.notes.append(note)

    def send_notes(self) -> None:
        """Send those that were posted."""
        while self.notes:
            self._transport.send(encode([self.notes.popleft()]))

    def listen(self, topic: Topic, listener: NoteListener) -> None:
        """From now on notes on ``topic`` go to ``listener``. Others are dropped."""
        self._listeners[topic] = listener

    def close(self) -> None:
        """Forget the listeners: they know the engine, which has this."""
        self._listeners.clear()

    def send(self, messages: Sequence[Report | Announcement]) -> None:
        """Send these, in order."""
        if self._transport.carries_integers and (integers := self._pack(messages)) is not None:
            self._transport.send_integers(integers)
            return
        data = encode(messages)
        if len(data) <= MAX_MESSAGE_BYTES - MAX_FORWARDING_BYTES:
            self._transport.send(data)
        elif len(messages) == 1:
            for begin in range(0, len(data), _FRAGMENT_BYTES):
                end = begin + _FRAGMENT_BYTES
                self._transport.send(encode([MessageFragment(data[begin:end], last=end >= len(data))]))
        else:
            middle = len(messages) // 2
            self.send(messages[:middle])
            self.send(messages[middle:])

    def empty(
        self,
        failure: Callable[[], CollectiveError | None],
        until: float,
        backlog: Callable[[], int] | None = None,
    ) -> None:
        """Wait until all has left: a rank that has not heard of a collective cannot take part in it.

        The others go on reading meanwhile, since every collective of which they know has had this rank's part.

        Args:
            failure: asked, now and then, why that may never be.
            until: on the clock of ``time.monotonic()``.
            backlog: of the messages to wait for, if not of all.

        Raises:
            DeadlineError: it has not left by then.
            CollectiveError: what ``failure`` gives.
        """
        look_next = 0.0
        while self._transport.backlog if backlog is None else backlog():
            now = time.monotonic()
            if now >= look_next:
                look_next = now + CHECK_SECONDS
                error = failure()
                if error is not None:
                    raise error
            if now >= until:
                raise DeadlineError("some rank reads no control messages any more")
            self._transport.sleep(self._transport.token(), WaitingThread.CALLER, BACKLOG_RETRY_SECONDS)
            self._transport.flush()

    def pending(self) -> bool:
        """Return whether `receive` would give something, or a note has come."""
        return bool(self.unread) or self._transport.pending()

    def receive(self) -> list[tuple[int, Sequence[Any]]]:
        """Return reports or announcements that have come, with their senders; notes are handed over at once.

        Raises:
            msgspec.DecodeError: something else than messages has come.
            CollectiveError: a message that is too long.
        """
        # Both: callers rely on it that nothing is left of what had come when they looked at the doorbell.
        received = self._transport.receive()
        if self.unread:
            received, self.unread = [*self.unread, *received], []
        found: list[tuple[int, Sequence[Any]]] = []
        for rank, data in received:
            if isinstance(data, bytes):
                self._read(rank, data, found)
            else:
                found.append((rank, data if self._unpack is None else self._unpack(data)))
        return found

    def peek(self, topic: Topic) -> list[Report | Announcement]:
        """Return what has come while it cannot be processed: `receive` will give it once more.

        Notes on ``topic`` are handed over at once, and later once more.
        """
        found: list[Report | Announcement] = []
        for rank, data in self._transport.receive():
            self.unread.append((rank, data))
            if not isinstance(data, bytes):
                found += data if self._unpack is None else self._unpack(data)
                continue
            for message in self._decode(data):
                if not isinstance(message, Note):
                    found.append(message)
                elif message.topic is topic:
                    self._hand_over(rank, message)
        return found

    def _read(self, rank: int, data: bytes, found: list[tuple[int, Sequence[Any]]]) -> None:
        """Put the messages in ``data`` behind ``found``, with their senders."""
        messages: list[Report | Announcement] = []
        for received in self._decode(data):
            sender, message = rank, received
            if isinstance(received, ForwardedMessage):
                sender, message = received.rank, received.message
            if isinstance(message, Note):
                self._hand_over(sender, message)
            elif isinstance(message, MessageFragment):
                whole = self._joined(sender, message)
                if whole:
                    found.append((rank, messages))
                    messages = []
                    self._read(sender, whole, found)
            else:
                messages.append(message)
        found.append((rank, messages))

    def _joined(self, rank: int, piece: MessageFragment) -> bytes:
        """The whole message, if this was the last piece of it."""
        whole = self._pieces.setdefault(rank, bytearray())
        whole += piece.data
        if len(whole) > _MAX_REASSEMBLED_BYTES:
            raise CollectiveError(f"rank {rank} sent a control message of more than {_MAX_REASSEMBLED_BYTES} bytes")
        if not piece.last:
            return b""
        del self._pieces[rank]
        return bytes(whole)

    def _hand_over(self, sender: int, note: Note) -> None:
        listener = self._listeners.get(note.topic)
        if listener is not None:
            listener(sender, note.data)
