"""Control messages between the ranks of one host, through their segments.

Every rank has one outbox: a ring of bytes in its own segment that it alone writes, and that every other rank may read.
Each reader keeps its own place in its own segment, so every word of shared memory has one writer, except the doorbell.

A. A message is written to the ring as 4 bytes of length and the bytes; then the write cursor is moved; then the
   doorbells of its readers are rung. A ring that is full keeps messages back, in order, until its readers have moved
   on.
B. Ringing stores a value into the doorbell that it never had and wakes whoever sleeps on it. The value differs with
   every ring and ringer, so a sleeper who read the doorbell, looked at the rings and found nothing sleeps only while
   nobody has rung since.
C. A rank says which kind of thread may sleep on its doorbell (`Sleeper`), so that a ring does not wake a thread of
   which another one has taken over the work.

The memory-ordering argument stands in `reigen.wire.futex`.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Sequence
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from reigen.errors import CollectiveError
from reigen.wire.futex import Word, fences

RING_BYTES = 1 << 18
#: The largest message. Longer ones are the sender's bug: it splits what it has to say.
MAX_MESSAGE_BYTES = RING_BYTES // 4

_LINE = 64
_DOORBELL, _SLEEPER, _WRITTEN = 0, _LINE, 2 * _LINE
_READ = 3 * _LINE  # one line per writer
_LENGTH = struct.Struct("=I")


class Sleeper(IntFlag):
    """Who sleeps on a rank's doorbell; the bits of its futex."""

    NOBODY = 0
    ENGINE = 1
    CALLER = 2


def mailbox_bytes(num_ranks: int) -> int:
    """Size of one rank's part of the segment: words, then the ring."""
    return _READ + num_ranks * _LINE + RING_BYTES


class Outbox:
    """The ring of one rank, as its writer or as one of its readers sees it. Cursors count bytes modulo 2**32."""

    def __init__(self, memory: NDArray[np.uint8], num_ranks: int) -> None:
        self.written = Word(memory, _WRITTEN)
        start = _READ + num_ranks * _LINE
        self.ring = memory[start : start + RING_BYTES].data

    def put(self, cursor: int, data: bytes) -> None:
        """Copy ``data`` into the ring from ``cursor`` on, around its end if need be."""
        begin = cursor % RING_BYTES
        first = min(len(data), RING_BYTES - begin)
        self.ring[begin : begin + first] = data[:first]
        if first < len(data):
            self.ring[: len(data) - first] = data[first:]

    def get(self, cursor: int, nbytes: int) -> bytes:
        """``nbytes`` from ``cursor`` on."""
        begin = cursor % RING_BYTES
        first = min(nbytes, RING_BYTES - begin)
        data = bytes(self.ring[begin : begin + first])
        return data if first == nbytes else data + bytes(self.ring[: nbytes - first])


class Mailbox:
    """One rank's end of the control channel. For one thread at a time, but for `wake`, `pending`, `token` and `sleep`.

    Args:
        memories: for every rank of the host, in order, its mailbox part (`mailbox_bytes` long, zeroed at first).
        rank: whose end this is.
        readers: the ranks that this rank's messages go to.
        writers: the ranks that it hears.
    """

    def __init__(
        self, memories: Sequence[NDArray[np.uint8]], rank: int, readers: Sequence[int], writers: Sequence[int]
    ) -> None:
        n = len(memories)
        self._publish, self._fence = fences()
        self._rank = rank
        self._own = Outbox(memories[rank], n)
        self._cursor = self._own.written.load()
        self._backlog: deque[bytes] = deque()
        #: how far each reader has come in our ring: the reader writes it
        self._progress = [Word(memories[r], _READ + rank * _LINE) for r in readers]
        self._doorbells = [(Word(memories[r], _DOORBELL), Word(memories[r], _SLEEPER)) for r in readers]
        self._inboxes = [(w, Outbox(memories[w], n), Word(memories[rank], _READ + w * _LINE)) for w in writers]
        self._doorbell, self._sleeper = Word(memories[rank], _DOORBELL), Word(memories[rank], _SLEEPER)
        self._num_ranks = n
        #: numbers of this rank's rings; next() is atomic, since any of its threads may ring
        self._rings = itertools.count(1)

    #: a doorbell in shared memory is no descriptor
    descriptor = -1

    @property
    def backlog(self) -> int:
        """Messages that did not fit into the ring so far."""
        return len(self._backlog)

    def send(self, message: bytes) -> None:
        """Put a message into the outbox and ring its readers. Never blocks."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise AssertionError(f"a control message of {len(message)} bytes; the most is {MAX_MESSAGE_BYTES}")
        self._backlog.append(_LENGTH.pack(len(message)) + message)
        self.flush()

    def flush(self) -> None:
        """Move what was kept back into the ring, as far as there is room."""
        moved = False
        while self._backlog and len(self._backlog[0]) <= self._room():
            frame = self._backlog.popleft()
            self._own.put(self._cursor, frame)
            self._cursor = (self._cursor + len(frame)) & 0xFFFFFFFF
            moved = True
        if moved:
            self._publish()
            self._own.written.store(self._cursor)
            for doorbell, sleeper in self._doorbells:
                self._ring(doorbell, sleeper)

    def _room(self) -> int:
        used = max(((self._cursor - word.load()) & 0xFFFFFFFF for word in self._progress), default=0)
        return RING_BYTES - used

    def receive(self) -> list[tuple[int, bytes]]:
        """Every message that has come, with its sender, in each sender's order."""
        found: list[tuple[int, bytes]] = []
        for writer, outbox, place in self._inboxes:
            cursor, end = place.load(), outbox.written.load()
            if cursor == end:
                continue
            while cursor != end:
                (length,) = _LENGTH.unpack(outbox.get(cursor, _LENGTH.size))
                if length > min(MAX_MESSAGE_BYTES, ((end - cursor) & 0xFFFFFFFF) - _LENGTH.size):
                    raise CollectiveError(f"rank {writer} sent a control message of {length} bytes", ranks=(writer,))
                found.append((writer, outbox.get(cursor + _LENGTH.size, length)))
                cursor = (cursor + _LENGTH.size + length) & 0xFFFFFFFF
            self._publish()
            place.store(cursor)
        return found

    def token(self) -> int:
        """The doorbell as it stands: read it *before* looking whether there is work."""
        return self._doorbell.load()

    def pending(self) -> bool:
        """Whether a message waits to be received."""
        return any(place.load() != outbox.written.load() for _, outbox, place in self._inboxes)

    def sleep(self, token: int, who: Sleeper, timeout_seconds: float) -> None:
        """Sleep until somebody has rung since ``token`` was read, or for the time given. `take_over` comes first."""
        self._doorbell.wait(token, timeout_seconds, who)

    def take_over(self, who: Sleeper) -> None:
        """From now on rings wake ``who``."""
        self._sleeper.store(who)

    def hand_back(self) -> bool:
        """No: who rings a doorbell knows no moments."""
        return False

    def wake(self, who: Sleeper) -> None:
        """Wake a thread of this rank that sleeps as ``who``. Any thread may call this."""
        self._store_new(self._doorbell)
        self._doorbell.wake(who)

    def calm(self) -> None:
        """Nothing to do: there is no descriptor."""

    def _ring(self, doorbell: Word, sleeper: Word) -> None:
        self._store_new(doorbell)
        self._fence()
        who = sleeper.load()
        if who:
            doorbell.wake(who)

    def _store_new(self, doorbell: Word) -> None:
        doorbell.store(next(self._rings) * self._num_ranks + self._rank + 1)
