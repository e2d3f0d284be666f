"""Eager slots: small messages that bring their data with them, between the ranks of one host.

MPI libraries send a small message's data along with its envelope (the *eager* protocol), instead of asking first. Here
a rank puts its contribution to a collective into its slot in shared memory and then says by one number which collective
that is. Rank 0 (the hub) sees when all ranks have said the same, and answers all of them at once; then every rank reads
every slot. The hub may also answer in another way, by messages: then what lies in the slots counts for nothing.

a. Every word has one writer. A rank submits by writing the number, and then a count that it never had; the hub answers
   by counting its answers, when every rank's count has gone on since the last one that it took.
b. A rank submits at most once between two answers of either kind, so the number is stable until the hub has taken it.
c. Slots are used in turn, by the parity of the answers so far, which is the same on all ranks. A slot that is written
   for answer k + 1 was last read for k - 1: every rank had read it before it submitted for k, and answer k came after
   all of them had submitted.

The memory-ordering argument stands in `reigen.net.futex`; whom a submission or an answer wakes, in
`reigen.net.shm_ring`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reigen.net.doorbells import PARKED, Doorbells
from reigen.net.futex import memory_fences

#: The largest contribution: twice as large between two ranks, each of which reads that of one other only.
_MOST_BYTES = 1 << 15

_MASK = 0xFFFFFFFF
_LINE = 64
_NUM_SLOTS = 2
#: Words of the header, by their index: what a rank has submitted, and how often; the hub's answers; and, a word for
#: each rank, how much of that it has taken.
_NUMBER, _SUBMITTED = 0, 1
_ANSWERED = _LINE // 4
_TAKEN = 2 * _LINE // 4


def eager_slots_bytes(num_ranks: int) -> int:
    """Size of one rank's part of the segment: words, then slots."""
    return _header_bytes(num_ranks) + _NUM_SLOTS * max_eager_bytes(num_ranks)


def max_eager_bytes(num_ranks: int) -> int:
    """Return the size of a slot: that of the largest contribution."""
    return _MOST_BYTES * 2 if num_ranks == 2 else _MOST_BYTES


def _header_bytes(num_ranks: int) -> int:
    return 2 * _LINE + -(-4 * num_ranks // _LINE) * _LINE


class EagerSlots:
    """Endpoint of one rank for eager messages in shared memory.

    For one thread at a time, but for `pending` and `is_unread`.

    Args:
        memories: for every rank of the host, in order, its part (`eager_slots_bytes` long, zeroed at first).
        rank: whose endpoint this is; 0 is the hub.
        doorbells: the hub's, or those of all others.
        rings: for everyone of these, how far his ring of messages is written, and how far it is read here.

    Attributes:
        slots: by parity and rank, the slots.
        max_bytes: of one.
        count: answers so far, modulo 2**32.
    """

    def __init__(
        self,
        memories: Sequence[NDArray[np.uint8]],
        rank: int,
        doorbells: Doorbells,
        rings: Sequence[tuple[memoryview, memoryview]],
    ) -> None:
        header = _header_bytes(len(memories))
        self.max_bytes = length = max_eager_bytes(len(memories))
        words = [memory[:header].data.cast("I") for memory in memories]
        self.slots = [
            [memory[header + parity * length :][:length] for memory in memories] for parity in range(_NUM_SLOTS)
        ]
        self.count = 0
        self._publish, self._fence = memory_fences()
        self._rank = rank
        self._own, self._hub = words[rank], words[0]
        self._doorbells, self._rings = doorbells, rings
        #: submitted so far, and how many of these were answered or taken, as far as this rank knows
        self._num_submitted = self._num_answered = 0
        #: on the hub: the other ranks' words, and how much of what they submitted is taken
        self._others = list(enumerate(words))[1:] if rank == 0 else []
        self._taken = [0] * len(memories)

    def submit(self, number: int, looks: int) -> bool:
        """Submit the slot in turn as this rank's part of ``number``, and look for the answer. Not on the hub.

        Args:
            number: which collective; below 2**31.
            looks: how often to look.

        Returns:
            whether the answer has come; if not, it comes later (`take_answer`), or a message in its place.
        """
        own, hub, count = self._own, self._hub, self.count
        own[_NUMBER] = number
        self._publish()
        self._num_submitted = own[_SUBMITTED] = (self._num_submitted + 1) & _MASK
        self._ring()
        written, read = self._rings[0]
        while hub[_ANSWERED] == count:
            if not looks or written[0] != read[0]:
                return False
            looks -= 1
        self.count = (count + 1) & _MASK
        self._num_answered = self._num_submitted
        return True

    def take_answer(self) -> bool:
        """Return whether the answer has come since the last one was taken. Not for the hub."""
        if self._hub[_ANSWERED] == self.count:
            return False
        self.count = (self.count + 1) & _MASK
        self._num_answered = self._num_submitted
        return True

    def answer(self, number: int, looks: int) -> bool:
        """Answer if all others submit ``number``; look for that so often. On the hub, whose slot is filled.

        Args:
            number: which collective.
            looks: how often to look, in all.

        Returns:
            whether it was answered; if not, one has not come, or with something else: see `take`.
        """
        taken = self._taken
        for (rank, words), (written, read) in zip(self._others, self._rings, strict=True):
            while words[_SUBMITTED] == taken[rank]:
                if not looks or written[0] != read[0]:
                    return False
                looks -= 1
            if words[_NUMBER] != number:
                return False
        for rank, words in self._others:
            taken[rank] = words[_SUBMITTED]
        self._publish()
        self.count = self._own[_ANSWERED] = (self.count + 1) & _MASK
        self._ring()
        return True

    def _ring(self) -> None:
        """Ring where a thread is not parked: it may sleep, or has looked before."""
        with self._fence:
            pass
        for waiter in self._doorbells.waiters:
            if not waiter[0] & PARKED:
                self._doorbells.ring(PARKED)
                break

    def take(self) -> list[tuple[int, Sequence[int]]]:
        """Return submissions that are to be answered by messages. On the hub."""
        found: list[tuple[int, Sequence[int]]] = []
        for rank, words in self._others:
            count = words[_SUBMITTED]
            if count != self._taken[rank]:
                found.append((rank, (words[_NUMBER],)))
                self._publish()
                self._taken[rank] = self._own[_TAKEN + rank] = count
        return found

    @property
    def pending(self) -> bool:
        """Return whether `take`, or `take_answer`, would give something."""
        for rank, words in self._others:
            if words[_SUBMITTED] != self._taken[rank]:
                return True
        return self._hub[_ANSWERED] != self.count

    @property
    def is_unread(self) -> bool:
        """Return whether the hub has neither taken nor answered this rank's last submission."""
        submitted = self._num_submitted
        return submitted != self._num_answered and submitted != self._hub[_TAKEN + self._rank]
