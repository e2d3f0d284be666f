"""Control messages between the ranks of one host, through their segments.

Every rank has one outbox: a ring of bytes in its own segment that it alone writes, and that every other rank may read.
Each reader keeps its own place in its own segment, so every word of shared memory has one writer, except the doorbell.

A. A message is written to the ring as 4 bytes of length and the bytes; then the write cursor is moved; then the
   doorbells of its readers are rung. A ring that is full keeps messages back, in order, until its readers have moved
   on.
B. Ringing stores a value into the doorbell that it never had and wakes the thread that sleeps on it. The value differs
   with every ring and ringer, so a waiter that read the doorbell, looked at the rings and found nothing sleeps only
   while no rank has rung since. Likewise who finds the doorbell as it was before it looked at the rings need not look
   again: the cursor is published before the ring that follows it.
C. A rank says which kind of thread may sleep on its doorbell (`WaitingThread`), so that a ring does not wake a thread
   of which another one has taken over the work.
D. Integers lie in the ring like messages, with a mark at their length. A rank whose caller has gone, and may soon be
   back, can say that integers need not wake its engine's thread: what they announce is of no use to it before its next
   submission, and where one blocking call follows another the thread would be woken each time, only to find the caller
   at work. But they must be read in time. So a thread that has written something, and sleeps or leaves, first wakes the
   engine's thread of every reader that has not come to the end of the ring. It does so whatever the waiter says: a
   reader that was just about to say "sleep on" has not read, and its thread, which has slept since before, is woken; a
   thread that is awake looks at the rings before it sleeps, by B.
E. What is submitted by eager slots (`reigen.net.shm_eager`), and the answer to it, ring the doorbell like messages, but
   not that of a parked thread: one that has nothing outstanding. On rank 0 it would learn nothing that it could use
   before its next submission, and a rank that waits for an answer is not parked, or looks at the slots. Who is parked
   no more, looks at them first (`set_wake_target`, with a fence as under *Sleep*). What rank 0 has not read when its
   writer sleeps or leaves counts as in D. Within `receive` submissions come first: what was in the rings before a rank
   submitted so is nothing that could change its meaning, since it had nothing outstanding then; what came later could.

The memory-ordering argument stands in `reigen.net.futex`.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reigen.errors import CollectiveError
from reigen.net.doorbells import ENGINE_SLEEPS_ON, SLEEPS_ON, Doorbells, WaitingThread
from reigen.net.futex import FutexWord, memory_fences
from reigen.net.shm_eager import EagerSlots, eager_slots_bytes

RING_BYTES = 1 << 18
#: The largest message. Longer ones are the sender's bug: it splits what it has to say.
MAX_MESSAGE_BYTES = RING_BYTES // 4

_LINE = 64
_DOORBELL, _WAITER, _WRITTEN = 0, _LINE, 2 * _LINE
_READ = 3 * _LINE  # one line per writer
_WORD = struct.Struct("=I")
#: Bit of the length that tells integers from a message.
_INTEGERS = 1 << 31


@functools.lru_cache(maxsize=64)
def _integers_format(num: int) -> struct.Struct:
    """The layout of so many integers behind their length."""
    return struct.Struct(f"={num + 1}I")


def shm_transport_bytes(num_ranks: int) -> int:
    """Size of one rank's part of the segment: words, then the ring, then eager slots."""
    return _READ + num_ranks * _LINE + RING_BYTES + eager_slots_bytes(num_ranks)


class ShmTransport:
    """Endpoint of one rank for control messages through shared memory (`reigen.engine.transport.ControlTransport`).

    For one thread at a time, but for `wake`, `pending`, `token` and `sleep`.

    Args:
        memories: for every rank of the host, in order, its mailbox part (`shm_transport_bytes` long, zeroed at first).
        rank: whose endpoint this is.
        readers: the ranks that this rank's messages go to.
        writers: the ranks that it hears.
    """

    def __init__(
        self, memories: Sequence[NDArray[np.uint8]], rank: int, readers: Sequence[int], writers: Sequence[int]
    ) -> None:
        n = len(memories)
        self._publish, self._fence = memory_fences()
        # Of a rank's ring: the bytes, and how far it is written. Cursors count bytes modulo 2**32.
        start = _READ + n * _LINE
        rings = [(memory[start : start + RING_BYTES].data, FutexWord(memory, _WRITTEN).cell) for memory in memories]
        self._ring, self._written = rings[rank]
        self._cursor = self._written[0]
        self._frames: deque[bytes] = deque()
        #: messages that did not fit into the ring so far
        self.backlog = 0
        #: how far each reader has come in our ring: the reader writes it
        self._progress = [FutexWord(memories[r], _READ + rank * _LINE).cell for r in readers]
        doorbells = [(FutexWord(memory, _DOORBELL), FutexWord(memory, _WAITER)) for memory in memories]
        self._doorbells = Doorbells(rank, doorbells, readers)
        self._inboxes = [(w, *rings[w], FutexWord(memories[rank], _READ + w * _LINE).cell) for w in writers]
        self._doorbell, self._waiter = doorbells[rank]
        #: how far each writer's ring is written, and read here
        self._unread = [(written, place) for _, _, written, place in self._inboxes]
        parts = [memory[start + RING_BYTES :] for memory in memories]
        #: for small collectives that bring their data with them
        self.eager = EagerSlots(parts, rank, self._doorbells, self._unread)
        self._is_hub = rank == 0

    #: a doorbell in shared memory is no descriptor
    descriptor = -1

    #: integers lie in the ring as they are
    carries_integers = True

    def send(self, message: bytes) -> None:
        """Put a message into the outbox and ring its readers. Never blocks."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise AssertionError(f"a control message of {len(message)} bytes; the most is {MAX_MESSAGE_BYTES}")
        self._frames.append(_WORD.pack(len(message)) + message)
        self.flush()

    def send_integers(self, integers: Sequence[int]) -> None:
        """Put integers below 2**32 into the outbox, at most as many as fit into a message; ring as step D tells."""
        num = len(integers)
        nbytes = 4 * num + 4
        if nbytes > MAX_MESSAGE_BYTES:
            raise AssertionError(f"{num} integers are more than a message of {MAX_MESSAGE_BYTES} bytes")
        cursor, words = self._cursor, _integers_format(num)
        begin = cursor % RING_BYTES
        if self._frames or begin + nbytes > RING_BYTES or self._used() + nbytes > RING_BYTES:
            self._frames.append(words.pack(_INTEGERS | 4 * num, *integers))
            self._fill_ring(SLEEPS_ON)
        else:
            words.pack_into(self._ring, begin, _INTEGERS | 4 * num, *integers)
            self._ring_readers(cursor + nbytes, SLEEPS_ON)

    def flush(self) -> None:
        """Move waiting messages into the ring, as far as there is room."""
        self._fill_ring(0)

    def _used(self) -> int:
        """Bytes of the ring that some reader has not read."""
        used, cursor = 0, self._cursor
        for place in self._progress:
            unread = (cursor - place[0]) & 0xFFFFFFFF
            used = max(used, unread)
        return used

    def _fill_ring(self, not_woken: int) -> None:
        cursor, frames, ring, used = self._cursor, self._frames, self._ring, self._used()
        while frames and used + len(frames[0]) <= RING_BYTES:
            frame = frames.popleft()
            begin = cursor % RING_BYTES
            first = min(len(frame), RING_BYTES - begin)
            ring[begin : begin + first] = frame[:first]
            if first < len(frame):  # around the end
                ring[: len(frame) - first] = frame[first:]
            used += len(frame)
            cursor += len(frame)
        self.backlog = len(frames)
        if cursor != self._cursor:
            self._ring_readers(cursor, not_woken)

    def _ring_readers(self, cursor: int, not_woken: int) -> None:
        """Publish what lies before ``cursor``; ring."""
        self._cursor = cursor = cursor & 0xFFFFFFFF
        self._publish()
        self._written[0] = cursor
        self._doorbells.ring(not_woken)

    def wake_readers(self) -> None:
        """Step D: wake the engine's threads of the readers that have not read everything."""
        submitted = not self._is_hub and self.eager.is_unread
        for reader, place in enumerate(self._progress):
            if submitted or place[0] != self._cursor:
                self._doorbells.ring_engine(reader)

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        """Return all messages that have come, with their senders, in each sender's order."""
        found: list[tuple[int, bytes | Sequence[int]]] = []
        for writer, ring, written, place in self._inboxes:
            cursor, end = place[0], written[0]
            if cursor == end:
                continue
            first, num_bytes = cursor % RING_BYTES, (end - cursor) & 0xFFFFFFFF
            data = bytes(ring[first : first + num_bytes])
            if len(data) < num_bytes:  # around the end
                data += bytes(ring[: num_bytes - len(data)])
            begin, end_of_data = 0, len(data)
            while begin < end_of_data:
                (length,) = _WORD.unpack_from(data, begin)
                holds_integers, length = length & _INTEGERS, length & ~_INTEGERS
                following = begin + 4 + length
                if length > MAX_MESSAGE_BYTES or following > end_of_data or (holds_integers and length % 4):
                    raise CollectiveError(f"rank {writer} sent a control message of {length} bytes", ranks=(writer,))
                if holds_integers:
                    found.append((writer, _integers_format(length // 4).unpack_from(data, begin)[1:]))
                else:
                    found.append((writer, data[begin + 4 : following]))
                begin = following
            self._publish()
            place[0] = end
        return self.eager.take() + found if self._is_hub else found

    def token(self) -> int:
        """The doorbell as it stands: read it *before* looking whether there is work."""
        return self._doorbell.cell[0]

    def pending(self) -> bool:
        """Return whether a message waits to be received."""
        for written, place in self._unread:
            if place[0] != written[0]:
                return True
        return self.eager.pending

    def look(self, token: int, times: int) -> bool:
        """Look so often at the doorbell; return whether it was rung since ``token`` was read."""
        cell = self._doorbell.cell
        while cell[0] == token:
            if not times:
                return False
            times -= 1
        return True

    def sleep(self, token: int, thread: WaitingThread, timeout_seconds: float) -> None:
        """Sleep until the doorbell was rung since ``token`` was read, or for the time given."""
        self.wake_readers()
        self._doorbell.wait(token, timeout_seconds, thread)

    def set_wake_target(self, thread: WaitingThread) -> None:
        """From now on rings wake ``thread``. Who stops driving calls this first, so it is time for step D."""
        self._waiter.cell[0] = thread  # as the int that it is: the operators of IntFlag take a microsecond
        with self._fence:  # before the thread that is parked no more looks at the eager slots
            pass
        for place in self._progress if thread else ():
            if place[0] != self._cursor or not self._is_hub:
                self.wake_readers()
                break

    def release_to_engine(self, urgent: bool) -> bool:
        """From now on messages wake the engine's thread, and integers do not (step D), unless it is ``urgent``."""
        if urgent:
            return False
        self._waiter.cell[0] = ENGINE_SLEEPS_ON
        for place in self._progress:
            if place[0] != self._cursor:
                self.wake_readers()
                break
        return True

    def wake(self, thread: WaitingThread) -> None:
        """Wake a thread of this rank that sleeps as ``thread``. Any thread may call this."""
        self._doorbells.ring_own(thread)

    def clear_wakeup(self) -> None:
        """Do nothing: there is no descriptor."""
