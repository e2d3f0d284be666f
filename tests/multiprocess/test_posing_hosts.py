"""Jobs whose ranks are processes of one machine that poses as several hosts: training, ends, errors, tools.

Most of these ranks are new processes. PyTorch, which takes each of them a second and a half, is for those that need it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reigen
from reigen import context
from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.testing import RankError, RankPool, run_ranks
from tests.multiprocess.launcher import until
from tests.patience import patiently

pytestmark = pytest.mark.slow  # many real processes

Pools = Callable[[int], RankPool]
SPREADS = {"1+1": (0, 1), "2+1": (0, 0, 1), "2+2": (0, 0, 1, 1), "2+2 in turn": (0, 1, 0, 1)}


def join(hosts: Sequence[int], **kwargs: Any) -> None:
    """init() of a rank that says on which host it is."""
    os.environ["REIGEN_HOST_ID"] = f"host{hosts[int(os.environ['REIGEN_RANK'])]}"
    reigen.init(**kwargs)


def train(hosts: Sequence[int], num_steps: int = 4) -> list[bytes]:
    """The parameters after some steps, as bytes."""
    import torch

    import reigen.torch as hvd

    join(hosts)
    try:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        data = torch.Generator().manual_seed(hvd.rank())
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.randn(8, 50, generator=data)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("hosts", SPREADS.values(), ids=SPREADS)
def test_training_ends_with_the_same_bits_on_all_ranks(rank_pool: Pools, hosts: Sequence[int]) -> None:
    first, *others = rank_pool(len(hosts)).run(train, hosts, env={"REIGEN_BUCKET_BYTES": "16384"})
    assert all(other == first for other in others)


@pytest.mark.parametrize("env", [{}, {"REIGEN_TCP_SOCKETS": "3"}, {"REIGEN_TCP_ALGORITHM": "direct"}], ids=str)
def test_one_rank_a_host_gives_the_bits_of_one_host(rank_pool: Pools, env: dict[str, str]) -> None:
    together = rank_pool(3).run(train, (0, 0, 0))
    apart = rank_pool(3).run(train, (0, 1, 2), env=env)
    assert apart == together


def numbers(hosts: Sequence[int]) -> tuple[int, ...]:
    join(hosts)
    try:
        assert not (reigen.is_homogeneous() and hosts.count(0) != hosts.count(1))
        return reigen.rank(), reigen.local_rank(), reigen.local_size(), reigen.cross_rank(), reigen.cross_size()
    finally:
        reigen.shutdown()


def test_numbers_of_ranks(rank_pool: Pools) -> None:
    assert rank_pool(3).run(numbers, (0, 1, 0)) == [(0, 0, 2, 0, 2), (1, 0, 1, 1, 2), (2, 1, 2, 0, 1)]


def again_and_in_parts(hosts: Sequence[int]) -> None:
    for _ in range(2):
        join(hosts)
        assert reigen.allreduce(1.0, op=reigen.Sum) == len(hosts)
        reigen.shutdown()
    rank = int(os.environ["REIGEN_RANK"])
    part = [0, 2] if rank in {0, 2} else [3, 1]
    join(hosts, comm=part)
    assert (reigen.rank(), reigen.size()) == (part.index(rank), 2)
    assert reigen.allgather(np.array([rank])).tolist() == part
    reigen.shutdown()


def test_jobs_follow_each_other_and_run_side_by_side(rank_pool: Pools) -> None:
    rank_pool(4).run(again_and_in_parts, (0, 0, 1, 1))


def reduce_until_it_fails(hosts: Sequence[int], victim: int, num_elements: int) -> tuple[str, tuple[int, ...]]:
    join(hosts)
    x = np.ones(num_elements, np.float32)
    try:
        for count in range(100_000):
            if reigen.rank() == victim and count == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            reigen.allreduce(x, name="x")
    except CollectiveError as error:
        assert isinstance(error, PeerLostError)
        return str(error), error.ranks
    finally:
        reigen.shutdown()
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("num_elements", [10, 3_000_000])
@pytest.mark.parametrize(("spread", "victim"), [("1+1", 1), ("2+1", 0), ("2+2", 3), ("2+2 in turn", 1)])
def test_a_killed_rank_is_named_on_all_others(spread: str, victim: int, num_elements: int) -> None:
    hosts = SPREADS[spread]
    with pytest.raises(RankError) as caught:
        run_ranks(reduce_until_it_fails, len(hosts), hosts, victim, num_elements)
    told = caught.value.results
    assert sorted(told) == [rank for rank in range(len(hosts)) if rank != victim]
    assert {ranks for _, ranks in told.values()} == {(victim,)}, told


def wait_for_who_stops(hosts: Sequence[int], victim: int, directory: Path) -> tuple[tuple[int, ...], str]:
    """The victim ends once all others have seen that it stopped."""
    join(hosts)
    try:
        pids = reigen.allgather(np.array([os.getpid()]), name="all are there")
        if reigen.rank() == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(DeadlineError) as caught:
            reigen.allreduce(np.ones(3), name="one is not")
        (directory / str(reigen.rank())).touch()
        until(lambda: len(list(directory.iterdir())) == len(hosts) - 1)
        with contextlib.suppress(ProcessLookupError):  # another rank was earlier
            os.kill(int(pids[victim]), signal.SIGKILL)
        return caught.value.ranks, str(caught.value)
    finally:
        reigen.shutdown()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_at_the_deadline(victim: int, tmp_path: Path) -> None:
    hosts = (0, 0, 1)

    def attempt(seconds: float) -> None:
        directory = tmp_path / f"{seconds:g}"
        directory.mkdir()
        with pytest.raises(RankError) as caught:
            run_ranks(wait_for_who_stops, 3, hosts, victim, directory, env={"REIGEN_DEADLINE": f"{seconds:g}"})
        assert [(f.rank, f.kind) for f in caught.value.failures] == [(victim, "died")], str(caught.value)
        assert {rank: ranks for rank, (ranks, _) in caught.value.results.items() if rank != victim} == {
            rank: (victim,) for rank in range(3) if rank != victim
        }

    patiently(attempt, 1.0)


def with_tools(hosts: Sequence[int], path: str) -> None:
    join(hosts)
    reigen.start_timeline(path)
    for _ in range(5):
        reigen.allreduce(np.ones(100_000, np.float32), name="t")
    reigen.barrier()
    reigen.shutdown()


def test_a_timeline_holds_all_hosts(rank_pool: Pools, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    rank_pool(3).run(with_tools, (0, 0, 1), str(path))
    records = json.loads(path.read_bytes())
    assert {record["pid"] for record in records if record["name"] == "ALLREDUCE"} == {0, 1, 2}


def encrypted(hosts: Sequence[int]) -> float:
    join(hosts)
    try:
        x = np.full(500_000, float(reigen.rank()), np.float32)
        return float(reigen.allreduce(x, op=reigen.Sum).max())
    finally:
        reigen.shutdown()


def test_everything_encrypted_by_a_launcher_that_is_not(rank_pool: Pools) -> None:
    """The launcher of these ranks does not encrypt: the error says so."""
    with pytest.raises(RankError, match="REIGEN_TLS"):
        run_ranks(encrypted, 2, (0, 1), env={"REIGEN_TLS": "1"})


def where_data_goes(hosts: Sequence[int]) -> tuple[str, str]:
    join(hosts)
    try:
        job = context.current()
        return job.backend, job.backend_reason
    finally:
        reigen.shutdown()


def test_the_choice_of_backends_is_told(rank_pool: Pools) -> None:
    for hosts, backend in (((0, 0, 0), "shm"), ((0, 1, 2), "tcp"), ((0, 0, 1), "shm+tcp")):
        assert {told for told, _ in rank_pool(3).run(where_data_goes, hosts)} == {backend}
