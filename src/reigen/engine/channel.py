"""Control messages between this rank and rank 0, or all others, of any length; and notes beside them.

A `reigen.engine.transport.Transport` carries messages of bounded size. What is longer is sent in pieces, and read when
the last one has come. Notes go to listeners; whoever reads the channel does not see them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from reigen.engine.messages import (
    Announcement,
    Note,
    Piece,
    Report,
    Topic,
    decode_announcements,
    decode_reports,
    encode,
)
from reigen.engine.transport import Transport
from reigen.errors import CollectiveError, DeadlineError
from reigen.wire.mailbox import MAX_MESSAGE_BYTES, Sleeper

#: A sleep while something is outstanding: deaths and deadlines are looked at this often.
SLICE_SECONDS = 0.1
#: A sleep while the transport is full.
BACKLOG_SECONDS = 0.001

#: A message that is too long goes in pieces of this size, and may be so long as a whole.
_PIECE_BYTES = MAX_MESSAGE_BYTES - 64
_MOST_WHOLE_BYTES = 64 << 20

#: Takes a note: ``(sender's rank, data)``. Called on the driving thread; must be quick and raise nothing.
Listener = Callable[[int, bytes], None]


class Channel:
    """One rank's end. For the thread that drives the engine, except `post`.

    Args:
        transport: carries the messages.
        hears_reports: this is rank 0, to which the others report; else it hears rank 0's announcements.
    """

    def __init__(self, transport: Transport, *, hears_reports: bool) -> None:
        self._transport = transport
        self._decode: Callable[[bytes], Sequence[Report | Announcement]] = (
            decode_reports if hears_reports else decode_announcements
        )
        #: to be sent; any thread adds to it
        self.notes: deque[Note] = deque()
        self._listeners: dict[Topic, Listener] = {}
        #: the beginnings of messages that come in pieces, by sender
        self._pieces: dict[int, bytearray] = {}
        #: what `read_ahead` has seen and `receive` has yet to give
        self._unread: list[tuple[int, bytes]] = []

    def post(self, note: Note) -> None:
        """Have a note sent. Any thread."""
        self.notes.append(note)

    def send_notes(self) -> None:
        """Send those that were posted."""
        while self.notes:
            self._transport.send(encode([self.notes.popleft()]))

    def listen(self, topic: Topic, listener: Listener) -> None:
        """From now on notes on ``topic`` go to ``listener``. Others are dropped."""
        self._listeners[topic] = listener

    def send(self, messages: Sequence[Report | Announcement]) -> None:
        """Send these, in order."""
        data = encode(messages)
        if len(data) <= MAX_MESSAGE_BYTES:
            self._transport.send(data)
        elif len(messages) == 1:
            for begin in range(0, len(data), _PIECE_BYTES):
                end = begin + _PIECE_BYTES
                self._transport.send(encode([Piece(data[begin:end], last=end >= len(data))]))
        else:
            middle = len(messages) // 2
            self.send(messages[:middle])
            self.send(messages[middle:])

    def empty(self, failure: Callable[[], CollectiveError | None], until: float) -> None:
        """Wait until all has left: a rank that has not heard of a collective cannot take part in it.

        The others go on reading meanwhile, since every collective of which they know has had this rank's part.

        Args:
            failure: asked, now and then, why that may never be.
            until: on the clock of ``time.monotonic()``.

        Raises:
            DeadlineError: it has not left by then.
            CollectiveError: what ``failure`` gives.
        """
        look_next = 0.0
        while self._transport.backlog:
            now = time.monotonic()
            if now >= look_next:
                look_next = now + SLICE_SECONDS
                error = failure()
                if error is not None:
                    raise error
            if now >= until:
                raise DeadlineError("some rank reads no control messages any more")
            self._transport.sleep(self._transport.token(), Sleeper.CALLER, BACKLOG_SECONDS)
            self._transport.flush()

    def pending(self) -> bool:
        """Whether `receive` would give something, or a note has come."""
        return bool(self._unread) or self._transport.pending()

    def receive(self) -> Iterator[tuple[int, Report | Announcement]]:
        """What has come, with its senders; notes are handed over in their turn.

        Raises:
            msgspec.DecodeError: something else than messages has come.
            CollectiveError: a message that is too long.
        """
        unread, self._unread = self._unread, []
        for rank, data in unread or self._transport.receive():
            yield from self._read(rank, data)

    def read_ahead(self, topic: Topic) -> Iterator[Report | Announcement]:
        """What has come, while it cannot be dealt with: `receive` will give it once more.

        Notes on ``topic`` are handed over at once, and later once more.
        """
        for rank, data in self._transport.receive():
            self._unread.append((rank, data))
            for message in self._decode(data):
                if not isinstance(message, Note):
                    yield message
                elif message.topic is topic:
                    self._hand_over(rank, message)

    def _read(self, rank: int, data: bytes) -> Iterator[tuple[int, Report | Announcement]]:
        for message in self._decode(data):
            if isinstance(message, Note):
                self._hand_over(rank, message)
            elif isinstance(message, Piece):
                whole = self._joined(rank, message)
                if whole:
                    yield from self._read(rank, whole)
            else:
                yield rank, message

    def _joined(self, rank: int, piece: Piece) -> bytes:
        """The whole message, if this was the last piece of it."""
        whole = self._pieces.setdefault(rank, bytearray())
        whole += piece.data
        if len(whole) > _MOST_WHOLE_BYTES:
            raise CollectiveError(f"rank {rank} sent a control message of more than {_MOST_WHOLE_BYTES} bytes")
        if not piece.last:
            return b""
        del self._pieces[rank]
        return bytes(whole)

    def _hand_over(self, sender: int, note: Note) -> None:
        listener = self._listeners.get(note.topic)
        if listener is not None:
            listener(sender, note.data)
