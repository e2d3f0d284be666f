"""Jobs that negotiate through a tree by hosts, forced on: results, ends, and who is named when a rank dies or stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import reigen
from reigen import context
from reigen.engine.relay_transport import RelayTransport
from reigen.errors import CollectiveError, MismatchError, PeerLostError
from reigen.testing import RankError, RankPool, run_ranks
from tests.multiprocess.test_posing_hosts import join, wait_for_who_stops
from tests.patience import patiently

pytestmark = pytest.mark.slow  # many real processes

Pools = Callable[[int], RankPool]
#: Rank 1 is a relay for 2 and 3, rank 4 for 5.
HOSTS = (0, 1, 1, 1, 2, 2)
TREE = {"REIGEN_CONTROL_TREE_RANKS": "2"}


def all_kinds(hosts: Sequence[int]) -> None:
    """Operations of all kinds, compared with what they must give."""
    join(hosts)
    rank, size = reigen.rank(), reigen.size()
    assert isinstance(context.current()._engine._relay, RelayTransport) is (rank in {1, 4})
    ranks = np.arange(size)
    for step in range(6):  # more names than the cache holds
        handles = [
            reigen.allreduce_async(np.full(4, rank + k, np.float32), name=f"t{k}", op=reigen.Sum) for k in range(9)
        ]
        for k, handle in enumerate(handles):
            assert reigen.synchronize(handle).tolist() == [float((ranks + k).sum())] * 4
        rows = 1 + (rank + step) % 3 if step % 2 else 2
        gathered = reigen.allgather(np.full(rows, rank), name="rows")
        assert gathered.tolist() == [r for r in ranks for _ in range(1 + (r + step) % 3 if step % 2 else 2)]
        group = reigen.grouped_allreduce([np.ones(3), np.full(2, float(rank))], name="group", op=reigen.Sum)
        assert [each.tolist() for each in group] == [[size] * 3, [float(ranks.sum())] * 2]
        assert reigen.broadcast(np.full(2, rank), root_rank=4, name="root").tolist() == [4, 4]
    process_sets(rank)
    with pytest.raises(MismatchError) as caught:
        reigen.allreduce(np.ones(3 + (rank == 5)), name="differ")
    assert set(caught.value.ranks) == set(range(size))
    large = reigen.grouped_allreduce([np.ones(1, np.float32)] * 3000, name="long " + "x" * 50, op=reigen.Sum)
    assert all(each.tolist() == [size] for each in large)
    for _ in range(2 * rank):  # ranks that have joined are stood in for
        reigen.allreduce(np.ones(2, np.float32), name="uneven", op=reigen.Sum)
    assert reigen.join() == size - 1
    reigen.shutdown()


def process_sets(rank: int) -> None:
    for _ in range(2):
        odd, last = reigen.add_process_set([1, 3, 5]), reigen.add_process_set([2, 3])
        for _ in range(3):
            if rank % 2:
                assert float(reigen.allreduce(np.ones(1), name="s", op=reigen.Sum, process_set=odd)[0]) == 3
            if rank in {2, 3}:
                assert float(reigen.allreduce(np.ones(1), name="s", op=reigen.Sum, process_set=last)[0]) == 2
        for each in (odd, last):
            assert reigen.remove_process_set(each)


def test_operations_of_all_kinds(rank_pool: Pools) -> None:
    env = {**TREE, "REIGEN_CACHE_CAPACITY": "8", "REIGEN_DYNAMIC_PROCESS_SETS": "1"}
    rank_pool(len(HOSTS)).run(all_kinds, HOSTS, env=env)


def reduce_until_it_fails(hosts: Sequence[int], victim: int) -> tuple[int, ...]:
    join(hosts)
    try:
        for count in range(100_000):
            if reigen.rank() == victim and count == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            reigen.allreduce(np.ones(10, np.float32), name="x")
    except CollectiveError as error:
        assert isinstance(error, PeerLostError)
        return error.ranks
    finally:
        reigen.shutdown()
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_on_all_others(victim: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(reduce_until_it_fails, len(HOSTS), HOSTS, victim, env=TREE)
    told = caught.value.results
    assert sorted(told) == [rank for rank in range(len(HOSTS)) if rank != victim]
    assert set(told.values()) == {(victim,)}, told


def leave_early(hosts: Sequence[int], leaver: int) -> str:
    """A rank ends in good order while others wait for it."""
    join(hosts)
    reigen.allreduce(np.ones(3), name="x")
    if reigen.rank() == leaver:
        reigen.shutdown()
        return "left"
    with pytest.raises(PeerLostError) as caught:
        reduce_forever()
    reigen.shutdown()
    assert caught.value.ranks == (leaver,)
    return "told"


def reduce_forever() -> None:
    for _ in range(100_000):
        reigen.allreduce(np.ones(3), name="x")


@pytest.mark.parametrize("leaver", [1, 5])
def test_a_relay_that_leaves_passes_on_that_it_does(rank_pool: Pools, leaver: int) -> None:
    found = rank_pool(len(HOSTS)).run(leave_early, HOSTS, leaver, env=TREE)
    assert found == ["left" if rank == leaver else "told" for rank in range(len(HOSTS))]


@pytest.mark.parametrize("victim", [1, 3])
def test_a_stopped_rank_is_named_at_the_deadline(victim: int, tmp_path: Path) -> None:
    """Of a relay nothing is known but that it and those below it have not been heard; the error says so."""

    def attempt(seconds: float) -> None:
        directory = tmp_path / f"{seconds:g}"
        directory.mkdir()
        env = {**TREE, "REIGEN_DEADLINE": f"{seconds:g}"}
        with pytest.raises(RankError) as caught:
            run_ranks(wait_for_who_stops, len(HOSTS), HOSTS, victim, directory, env=env)
        assert [(f.rank, f.kind) for f in caught.value.failures] == [(victim, "died")], str(caught.value)
        ranks, text = caught.value.results[0]
        if victim == 3:
            assert ranks == (3,)
        else:
            assert ranks == (1, 2, 3)
            assert "ranks 2, 3 report through rank 1" in text

    patiently(attempt, 2.0)
