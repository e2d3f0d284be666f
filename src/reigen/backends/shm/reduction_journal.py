"""Journal of reductions in registered memory, from which survivors finish the part of a dead rank.

Each rank of a host has mapped the copies of all others, and a copy outlives the process that filled it. So a gradient
bucket that all ranks had filled can still be reduced when one of them dies, if it is known which blocks were written
already, and if no block is lost that was being written at that moment. Elastic jobs keep such a journal behind the
buckets of every copy: a word for each bucket, and scratch for one block. Rank r's word of a bucket has the number of
the pass, and how far r has come with its own slice; r alone writes it, and after r's death, one survivor.

a. Rank r fills its copy of the bucket. Then it writes ``(pass, 0)``: only now are its gradients those of this pass.
b. All ranks have submitted the bucket. For each block i of its slice, rank r adds up the copies, in rank order, to its
   scratch: all copies are as they were.
c. It writes ``(pass, 2 i + 1)``: from now on the sum in the scratch counts, whatever is in the copies.
d. It copies the sum from the scratch to all copies.
e. It writes ``(pass, 2 i + 2)``: this block is done in all copies.

Whoever finishes r's slice, when r is dead or has stopped and will not go on, looks at the word and does what is left:
behind (a) and (e) it goes on with (b), behind (c) with (d), which may be done twice. It writes the same words, so that
it may die in its turn. Sums are taken from the same copies in the same order: bits are those of an undisturbed job.

A bucket can be finished if the words of all ranks have the same pass. Of a rank that has begun a pass and not filled
the bucket, the word has the pass before. Ranks count passes alike as long as each reduces every bucket in place; where
one sees that this was not so (some rank had joined), it makes its words void for good, and nothing is finished.

The words are aligned and written with one store each, behind the data that they speak of (*Publish* in
`reigen.net.futex`); the last stores of a killed process become visible like all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reigen.backends.base import Array
from reigen.backends.buffer_list import rank_slice
from reigen.backends.shm.cross_memory import BLOCK_BYTES
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.net.futex import memory_fences

_WORD_BYTES, _LINE = 8, 64
_PASS_SHIFT = 32
_STATE_MASK = (1 << _PASS_SHIFT) - 1
#: Word of a rank that does not know any more what its copy holds. No pass has such a number.
_VOID = (1 << 64) - 1
_VOID_PASS = _VOID >> _PASS_SHIFT


@dataclass(frozen=True, slots=True)
class BucketExtent:
    """A bucket that is reduced in place.

    Attributes:
        offset: where it begins in every copy, in bytes.
        nbytes: its length.
        reduction: what is made of the copies.
    """

    offset: int
    nbytes: int
    reduction: Reduction

    def slices(self, size: int) -> list[tuple[int, int]]:
        """Return the elements that each rank adds up."""
        itemsize = self.reduction.dtype.itemsize
        count = self.nbytes // itemsize
        return [rank_slice(count, rank, size, itemsize) for rank in range(size)]


def journal_bytes(num_buckets: int) -> int:
    """Return how much longer than its buckets a copy is that has a journal."""
    return -(-num_buckets * _WORD_BYTES // _LINE) * _LINE + BLOCK_BYTES


def _store(word: memoryview, value: int) -> None:
    word[0] = value


def _copy_block(target: Array, total: Array) -> None:
    target[:] = total


class BucketJournal:
    """Journal of one bucket; reduces it (`BlockJournal`).

    Args:
        extent: the bucket.
        copies: of every rank.
        words: of every rank.
        scratch: of every rank, `BLOCK_BYTES` long.
        rank: this one.
    """

    def __init__(
        self,
        extent: BucketExtent,
        copies: Sequence[NDArray[np.uint8]],
        words: Sequence[memoryview],
        scratch: Sequence[NDArray[np.uint8]],
        rank: int,
    ) -> None:
        storage = extent.reduction.dtype.storage
        self.extent, self._rank, self._words = extent, rank, words
        self._copies = [copy[extent.offset : extent.offset + extent.nbytes].view(storage) for copy in copies]
        self._scratch = [each.view(storage) for each in scratch]
        self._slices = extent.slices(len(copies))
        self._block = BLOCK_BYTES // storage.itemsize
        self._publish, _ = memory_fences()

    def fill(self) -> None:
        """Take step a: this rank's gradients of the next pass are in its copy."""
        word = self._words[self._rank]
        if word[0] != _VOID:
            self._publish()
            _store(word, (self.pass_number + 1) << _PASS_SHIFT)

    def make_void(self) -> None:
        """Say that the contents of this rank's copy are unknown."""
        _store(self._words[self._rank], _VOID)

    def reduce(self, reducer: BlockReducer) -> None:
        """Take steps b to e, for this rank's slice."""
        self.finish_slice(self._rank, reducer)

    @property
    def pass_number(self) -> int:
        """Number of the last pass for which this rank has filled its copy."""
        return int(self._words[self._rank][0] >> _PASS_SHIFT)

    @property
    def is_reduced(self) -> bool:
        """Return whether this rank's slice is done."""
        return self._is_done(self._rank)

    def is_whole(self, pass_number: int) -> bool:
        """Return whether all slices of a pass are done, and this rank's copy has not been filled for the next one.

        Others may have filled theirs: they do so when the pass is over at them, and then all slices are done.
        """
        passes = [word[0] >> _PASS_SHIFT for word in self._words]
        return passes[self._rank] == pass_number and all(
            pass_number < number < _VOID_PASS or (number == pass_number and self._is_done(rank))
            for rank, number in enumerate(passes)
        )

    def ranks_without(self, pass_number: int) -> list[int]:
        """Return the ranks that have not filled their copies for a pass."""
        return [rank for rank, word in enumerate(self._words) if word[0] >> _PASS_SHIFT != pass_number]

    def can_finish(self, pass_number: int) -> bool:
        """Return whether all that the sums of a pass are made of is there."""
        return not self.ranks_without(pass_number)

    def is_copying(self, rank: int) -> bool:
        """Return whether a rank has stopped between steps c and e: its scratch is in use."""
        return self._words[rank][0] != _VOID and bool(self._words[rank][0] & 1)

    def finish_slice(self, rank: int, reducer: BlockReducer) -> None:
        """Finish a rank's slice; one rank at a time may."""
        word, (low, high), block = self._words[rank], self._slices[rank], self._block
        value, publish = word[0], self._publish
        copies, scratch = self._copies, self._scratch[rank]
        begin = low + (value & _STATE_MASK) // 2 * block
        is_summed = bool(value & 1)
        while begin < high:
            end = min(high, begin + block)
            total = scratch[: end - begin]
            if not is_summed:
                reducer.reduce([copy[begin:end] for copy in copies], total)
                publish()
                value += 1
                _store(word, value)
            for target in copies:
                _copy_block(target[begin:end], total)
            publish()
            value += 1
            _store(word, value)
            begin, is_summed = end, False

    def _is_done(self, rank: int) -> bool:
        low, high = self._slices[rank]
        num_blocks = -(-(high - low) // self._block)
        return bool(self._words[rank][0] & _STATE_MASK == 2 * num_blocks)


class ReductionJournal:
    """Journals of the buckets of a plan, which lie in registered memory with `journal_bytes` behind them.

    Args:
        copies: every rank's copy of the memory; it stays mapped as long as this is there.
        rank: this one.
        extents: the buckets; the same on all ranks.

    Attributes:
        buckets: their journals.
    """

    def __init__(self, copies: Sequence[NDArray[np.uint8]], rank: int, extents: Sequence[BucketExtent]) -> None:
        end = copies[rank].size
        begin = end - journal_bytes(len(extents))
        words = [copy[begin:].data for copy in copies]
        scratch = [copy[end - BLOCK_BYTES : end] for copy in copies]
        copies[rank][begin:end] = 0  # the memory may have been used before; also brings the pages in
        self.rank, self.size = rank, len(copies)
        self.buckets = [
            BucketJournal(
                extent,
                copies,
                [memory[number * _WORD_BYTES : (number + 1) * _WORD_BYTES].cast("Q") for memory in words],
                scratch,
                rank,
            )
            for number, extent in enumerate(extents)
        ]

    def check_reduced(self) -> None:
        """The pass is over at this rank: if a bucket was not reduced in place, nothing is ever finished again."""
        if not all(bucket.is_reduced for bucket in self.buckets):
            for bucket in self.buckets:
                bucket.make_void()

    def finish(self, ranks: Iterable[int], buckets: Iterable[int]) -> None:
        """Finish the slices of these ranks, which have stopped; one rank at a time may.

        Args:
            ranks: by their numbers in the journal.
            buckets: those that can be finished.
        """
        wanted = [self.buckets[number] for number in buckets]
        for rank in ranks:
            # A sum that waits in the scratch comes first: the other buckets need that.
            for bucket in sorted(wanted, key=lambda each: not each.is_copying(rank)):
                bucket.finish_slice(rank, BlockReducer(bucket.extent.reduction))
