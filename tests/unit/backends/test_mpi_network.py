"""Ranks wait for each other before they make a communicator, which MPI would do without a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from reigen.backends.mpi.network import wait_for_ranks
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.testing import run_threads


def nobody_died(needed: Sequence[int]) -> CollectiveError | None:
    return None


def rank_2_died(needed: Sequence[int]) -> CollectiveError | None:
    return PeerLostError("rank 2 died", ranks=(2,)) if 2 in needed else None


def test_all_come() -> None:
    ranks = (1, 4, 7)
    names = run_threads(
        lambda index, rendezvous: wait_for_ranks(
            rendezvous, ranks, ranks[index], "mpi/x", nobody_died, time.monotonic() + 60.0
        ),
        3,
    )
    assert len(set(names)) == 1
    assert len(names[0]) == 16


def test_the_lowest_knows_who_is_missing() -> None:
    rendezvous = LocalRendezvous()
    rendezvous.put("mpi/x/1", b"")
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank\(s\) 2, 3 did not come") as caught:
        wait_for_ranks(rendezvous, (0, 1, 2, 3), 0, "mpi/x", nobody_died, begun + 0.3)
    assert caught.value.ranks == (2, 3)
    assert time.monotonic() - begun >= 0.3


def test_the_others_miss_the_lowest() -> None:
    with pytest.raises(DeadlineError) as caught:
        wait_for_ranks(LocalRendezvous(), (0, 1), 1, "mpi/x", nobody_died, time.monotonic() + 0.05)
    assert caught.value.ranks == (0,)


def test_a_death_ends_the_waiting_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(PeerLostError):
        wait_for_ranks(LocalRendezvous(), (0, 1, 2), 0, "mpi/x", rank_2_died, begun + 60.0)
    assert time.monotonic() - begun < 40.0
