"""Ranks as threads: results by rank, one rendezvous, every failure told."""

from __future__ import annotations

import threading

import pytest

from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.testing import RankError, run_threads
from tests.patience import patiently


def test_results_come_by_rank() -> None:
    assert run_threads(lambda rank, _: rank * rank, 4) == [0, 1, 4, 9]


def test_the_rendezvous_is_shared() -> None:
    def swap(rank: int, rendezvous: LocalRendezvous) -> bytes:
        rendezvous.put(f"from {rank}", b"%d" % rank)
        return rendezvous.get(f"from {1 - rank}", 60.0)

    assert run_threads(swap, 2) == [b"1", b"0"]


def test_every_failure_is_told() -> None:
    def refuse_odd(rank: int, _: LocalRendezvous) -> int:
        if rank % 2:
            raise ValueError(f"not {rank}")
        return rank

    with pytest.raises(RankError, match="2 of 4 ranks failed") as caught:
        run_threads(refuse_odd, 4)
    assert set(caught.value.errors) == {1, 3}
    assert caught.value.results == {0: 0, 2: 2}
    assert "not 3" in caught.value.of(3).text


def test_a_late_rank_tells_where_it_is() -> None:
    def attempt(seconds: float) -> None:
        release = threading.Event()

        def wait_here(rank: int, _: LocalRendezvous) -> None:
            if rank == 1:
                release.wait()

        with pytest.raises(RankError, match="wait_here") as caught:
            run_threads(wait_here, 2, timeout=seconds)
        release.set()
        assert [(failure.rank, failure.kind) for failure in caught.value.failures] == [(1, "late")]

    patiently(attempt, 0.2)
