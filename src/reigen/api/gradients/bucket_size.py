"""Agreement of the ranks on the size of gradient buckets, in a job that is tuned.

Rank 0 chooses; but all ranks have to cut their gradients anew for the same pass, and they do not come to the end of one
at the same time. So they ask at passes of the same number, by a small sum in which rank 0 has put its choice and every
rank a 1:

a. after every `PASSES_PER_POLL` passes, submitted with the pass's buckets, for which the ranks wait anyway;
b. when buckets are laid out, for the size itself.

While some rank has joined it cannot take part, so the choice does not count; when all go on, they count their passes
from 0 again, for they have not had equally many. Once rank 0 has chosen for good, nobody asks any more.
"""

from __future__ import annotations

import numpy as np

from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.context import Handle
from reigen.errors import CollectiveError
from reigen.types import DTYPES, ReduceOp

#: Passes from one question to the next: fewer than half of all steps bear its cost, so that medians do not.
PASSES_PER_POLL = 3


class BucketSizeAgreement:
    """Agreement of all ranks of a job on the size of the buckets of one reducer.

    Args:
        reduce_group: of all ranks.

    Attributes:
        bucket_bytes: size of the buckets that were laid out last; 0: as in a job that is not tuned.
    """

    def __init__(self, reduce_group: ReduceGroup) -> None:
        self._reduce_group, self._context = reduce_group, reduce_group.context
        self.bucket_bytes = 0
        self._is_final = False
        self._num_passes = 0
        self._num_joins = self._context.num_joins
        self._poll: tuple[Handle, np.ndarray[tuple[int], np.dtype[np.int64]]] | None = None

    def pass_starts(self) -> None:
        """Ask, if it is time: the buckets of a pass have been submitted. Once a pass."""
        if self._is_final:
            return
        if self._num_joins != self._context.num_joins:
            self._num_joins, self._num_passes = self._context.num_joins, 0
        self._num_passes += 1
        if self._num_passes % PASSES_PER_POLL == 0 and self._poll is None:
            choice = self._choice()
            name = f"{self._reduce_group.name}.tuned"
            handle = self._context.allreduce(choice, choice, DTYPES["int64"], op=ReduceOp.SUM, name=name)
            self._poll = handle, choice

    def pass_ended(self) -> bool:
        """Return whether buckets of another size are to be laid out, on all ranks, before the next pass."""
        if self._poll is None:
            return False
        (handle, choice), self._poll = self._poll, None
        try:
            handle.wait()
        except CollectiveError:  # a sum of the pass has failed, too, or the next one will
            return False
        return self._take(choice) != self.bucket_bytes

    def settle(self) -> int:
        """Collective: the size of the buckets that are to be laid out; 0: as in a job that is not tuned."""
        choice = self._choice()
        self._reduce_group.combine(choice, ReduceOp.SUM, "bucket_size")
        self.bucket_bytes = self._take(choice)
        tuning = self._context.tuning
        if tuning is not None:
            tuning.settled(self, self.bucket_bytes)
        return self.bucket_bytes

    def abandon(self) -> None:
        """Forget the question that is under way."""
        self._poll = None

    def _choice(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        tuning = self._context.tuning
        if tuning is None:
            return np.array([0, 0, 1], np.int64)
        return np.array([tuning.point.bucket_bytes, tuning.is_final, 1], np.int64)

    def _take(self, choice: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
        """Return the size that rank 0 has chosen; the one that there is where not all ranks have taken part."""
        bucket_bytes, is_final, num_ranks = (int(number) for number in choice)
        if num_ranks < self._reduce_group.size:
            return self.bucket_bytes
        self._is_final = bool(is_final)
        return bucket_bytes
