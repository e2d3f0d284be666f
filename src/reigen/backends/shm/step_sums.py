"""Sums of the gradients of the step in flight, and how the ranks of a host that are left complete them.

The buckets of one set of gradients lie in memory that all ranks of the host have mapped, with a journal
(`reigen.backends.shm.reduction_journal`). A rank that dies leaves its gradients there.

a. A step begins: the pass that it makes is the one behind the last that this rank has filled.
b. A change of members begins, anywhere in the step. This rank says of which buckets the sums can be had: those that all
   who are known to be lost had filled. Of the others it is assumed that they will: they go on with their backward
   passes, although nothing is communicated any more.
c. When the next view is built, each rank comes from the end of its backward pass. All look whether what was assumed
   came true, and agree on it.
d. If so, each finishes its own slice of every bucket, and those of the lost, which are dealt out among all. A barrier:
   all have all sums, the lost ranks' samples in them, with the bits of an undisturbed step.

The memory must stay as it is until then: nobody fills a bucket for the next pass before the step is over at all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reigen.backends.shm.reduction_journal import ReductionJournal


class StepSums:
    """Sums of one set of gradients, in the step in flight.

    Args:
        journal: of their buckets; its ranks are all ranks of the view in which it was made.

    Attributes:
        wanted: the pass that the step makes; 0: the step began without it.
    """

    def __init__(self, journal: ReductionJournal) -> None:
        self._journal = journal
        self.wanted = 0

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self._journal.buckets)

    def begin_step(self) -> None:
        """Take step a."""
        passes = {bucket.pass_number for bucket in self._journal.buckets}
        self.wanted = passes.pop() + 1 if len(passes) == 1 else 0

    def held(self, lost: Collection[int]) -> list[int]:
        """Return the buckets whose sums can be had, without further gradients of these ranks."""
        if not self.wanted:
            return []
        missing = [set(bucket.ranks_without(self.wanted)) for bucket in self._journal.buckets]
        return [number for number, ranks in enumerate(missing) if ranks.isdisjoint(lost)]

    @property
    def can_finish(self) -> bool:
        """Return whether all gradients of the step are there."""
        return self.wanted > 0 and all(bucket.can_finish(self.wanted) for bucket in self._journal.buckets)

    @property
    def is_whole(self) -> bool:
        """Return whether this rank has all sums already."""
        return self.wanted > 0 and all(bucket.is_whole(self.wanted) for bucket in self._journal.buckets)

    def finish(self, survivors: Sequence[int]) -> None:
        """Finish this rank's share of the sums: step d, without the barrier.

        Args:
            survivors: ranks, in the view of the journal, that do this; the same on all of them.
        """
        lost = [rank for rank in range(self._journal.size) if rank not in survivors]
        own = survivors.index(self._journal.rank)
        ranks = [self._journal.rank, *lost[own :: len(survivors)]]
        self._journal.finish(ranks, range(self.num_buckets))
