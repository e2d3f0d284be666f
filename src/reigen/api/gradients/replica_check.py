"""Do all ranks hold the same values? A fingerprint of each tensor, and who differs where.

A fingerprint has 64 bits and is made at the speed of memory: the tensor's bytes are laid out as rows of 4 KiB; the sums
(modulo 2**64) of the 64-bit words of every row and of every column are hashed with BLAKE2b, together with the size and
the bytes behind the last whole row. One changed word changes its row's sum and its column's. Two words that trade
places change the sums of their rows or of their columns. What is missed is a change of four words or more that cancels
in every row and in every column; beside that, chance: one in 2**64.

The comparison is one allreduce of 16 bytes. Only if it shows a difference are the fingerprints of all tensors compared.
Both are allreduces, because those work while some rank has joined.

Before the first step some bytes of each tensor are compared in any case: who forgets to broadcast the parameters trains
a model on every rank, and none of them sees it in its loss.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.errors import ReplicaError
from reigen.types import ReduceOp

_log = logging.getLogger(__name__)

_WORDS_PER_ROW = 512
_ROW_BYTES = 8 * _WORDS_PER_ROW
#: Their words come from the cache when columns are added up.
_ROWS_AT_ONCE = 64

Fingerprints = NDArray[np.int64]


def fingerprint(data: NDArray[np.uint8]) -> int:
    """Return a signed 64-bit number that differs if the bytes do (the module says which changes it can miss)."""
    whole = data.size - data.size % _ROW_BYTES
    words = data[:whole].view(np.uint64).reshape(-1, _WORDS_PER_ROW)
    digest = hashlib.blake2b(data.size.to_bytes(8, "little"), digest_size=8)
    digest.update(data[whole:].data)
    rows, columns = np.empty(len(words), np.uint64), np.zeros(_WORDS_PER_ROW, np.uint64)
    for begin in range(0, len(words), _ROWS_AT_ONCE):
        block = words[begin : begin + _ROWS_AT_ONCE]
        np.add.reduce(block, axis=1, out=rows[begin : begin + _ROWS_AT_ONCE])
        columns += np.add.reduce(block, axis=0)
    digest.update(rows.data)
    digest.update(columns.data)
    return int.from_bytes(digest.digest(), "little", signed=True)


class ReplicaCheckSchedule:
    """Counter of the steps to compare: every n-th since the ranks last began to count alike.

    Ranks that go on while others have joined take more steps, so all count anew after each join.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_joins = 0

    def due(self, every: int, num_joins: int) -> bool:
        """One more step was taken: whether it is to be compared, as one of ``every`` so many (0: never).

        ``num_joins`` says how often this rank has joined.
        """
        if num_joins != self._num_joins:
            self._num_joins, self._num_steps = num_joins, 0
        self._num_steps += 1
        return every > 0 and self._num_steps % every == 0


@dataclass(frozen=True)
class Divergence:
    """Difference between ranks.

    Attributes:
        tensor: number of the first tensor that is not the same everywhere.
        ranks: those that hold something else than most; than the lowest rank of the largest parties where that is even.
        num_tensors: how many tensors are not the same everywhere.
    """

    tensor: int
    ranks: tuple[int, ...]
    num_tensors: int


def find_divergence(ranks: Sequence[int], table: Fingerprints) -> Divergence | None:
    """The first tensor that differs, or None.

    ``table`` has a row for each of the ``ranks``, which ascend, and a column for each tensor.
    """
    differing = np.flatnonzero((table != table[:1]).any(axis=0))
    if not differing.size:
        return None
    tensor = int(differing[0])
    values = table[:, tensor].tolist()
    # Counter keeps the order of first sight, and max() the first of equals: the lowest rank decides a tie.
    votes = Counter(values)
    truth = max(votes, key=votes.__getitem__)
    differing_ranks = tuple(rank for rank, value in zip(ranks, values, strict=True) if value != truth)
    return Divergence(tensor, differing_ranks, differing.size)


def check_replicas(reduce_group: ReduceGroup, tensors: Sequence[NDArray[np.uint8]], names: Sequence[str]) -> None:
    """Collective: compare the bytes of all tensors, in the same order on every rank, between the ranks that take part.

    Raises:
        ReplicaError: they differ; raised on every rank, with the first tensor and the ranks whose values are strange.
    """
    fingerprints = np.array([fingerprint(tensor) for tensor in tensors], np.int64)
    combined = fingerprint(fingerprints.view(np.uint8))
    # The maximum of ~x is the complement of the minimum of x.
    extremes = np.array([combined, ~combined], np.int64)
    reduce_group.combine(extremes, ReduceOp.MAX, "replicas")
    if extremes[0] == ~extremes[1]:
        return
    # A row for every rank of the job: who has joined leaves his empty, and so does who is not in the set.
    table = np.zeros((reduce_group.context.size, 1 + len(tensors)), np.int64)
    table[reduce_group.context.rank] = [1, *fingerprints]
    reduce_group.combine(table, ReduceOp.SUM, "replicas.tensors")
    ranks = np.flatnonzero(table[:, 0]).tolist()
    fingerprints_by_rank = table[ranks, 1:]
    found = find_divergence(ranks, fingerprints_by_rank)
    assert found is not None, "equal tables have equal fingerprints"
    raise ReplicaError(
        f"the replicas have diverged: {_format_holders(found.ranks)} not what the others hold ({found.num_tensors} of "
        f"{len(tensors)} tensors differ). Look for what is done differently there; broadcast_parameters() makes all "
        "equal again",
        tensor=names[found.tensor],
        ranks=found.ranks,
        details={
            rank: f"fingerprint {value & (2**64 - 1):016x}"
            for rank, value in zip(ranks, fingerprints_by_rank[:, found.tensor].tolist(), strict=True)
        },
    )


def check_first_step(reduce_group: ReduceGroup, tensors: Sequence[NDArray[np.uint8]], names: Sequence[str]) -> None:
    """Collective: warn, on the lowest rank, if the ranks begin with different parameters; see `check_replicas`.

    Some bytes of each tensor may stand for it.

    Raises:
        ReplicaError: they differ, and REIGEN_CHECK_REPLICAS is set; raised on every rank.
    """
    try:
        check_replicas(reduce_group, tensors, names)
    except ReplicaError as error:
        if reduce_group.context.config.check_replicas:
            raise
        if reduce_group.context.rank == min(reduce_group.ranks):
            _log.warning(
                "the ranks begin to train with different parameters: %s not what the others hold in %s. Each rank "
                "trains its own model; call broadcast_parameters(model.state_dict(), root_rank=0) before",
                _format_holders(error.ranks),
                error.tensor,
            )


def _format_holders(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
