"""Tensors on "GPUs" between real processes, that also die and stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reigen.errors import DeadlineError, MismatchError, PeerLostError
from reigen.testing import RankError, RankPool, run_ranks
from tests.devices import process_ranks
from tests.patience import patiently

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective(rank_pool: Callable[[int], RankPool], size: int) -> None:
    rank_pool(size).run(process_ranks.every_collective, check_leaks=True)


def test_process_sets_side_by_side(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(4).run(process_ranks.process_sets_side_by_side, check_leaks=True)


def test_ranks_that_have_joined_stand_in(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(process_ranks.uneven_work) == [[2.0, 2.0], [2.0, 2.0, 1.0, 1.0]]


def test_training(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(process_ranks.trains_alike)


def test_tensors_that_differ_are_refused_and_the_job_carries_on(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(process_ranks.tensors_that_differ) == [MismatchError.__name__] * 2


@pytest.mark.parametrize("when", ["connecting", "enqueued"])
def test_a_rank_that_dies_is_named_at_once(when: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(process_ranks.lost_rank, 2, "kill", when)
    kind, ranks, seconds, again = caught.value.results[0]
    assert (kind, ranks, again) == (PeerLostError.__name__, (1,), PeerLostError.__name__)
    assert seconds < 10


@pytest.mark.parametrize("when", ["connecting", "enqueued"])
def test_a_rank_that_stops_is_ended_by_the_deadline(when: str) -> None:
    def attempt(deadline: float) -> None:
        with pytest.raises(RankError) as caught:
            run_ranks(
                process_ranks.lost_rank, 2, "stop", when, timeout=30 + deadline, env={"REIGEN_DEADLINE": str(deadline)}
            )
        kind, _, seconds, again = caught.value.results[0]
        assert (kind, again) == (DeadlineError.__name__, DeadlineError.__name__)
        assert deadline <= seconds + 0.5 < deadline + 10

    patiently(attempt, 2.0)
