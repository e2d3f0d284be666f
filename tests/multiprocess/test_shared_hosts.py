"""Shared parameters on several hosts: the same weights and states as without sharing, bit for bit, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from reigen.testing import RankPool
from tests.multiprocess.test_posing_hosts import SPREADS, join

pytestmark = pytest.mark.slow  # many real processes

Pools = Callable[[int], RankPool]
SHAPES = {**SPREADS, "3+2": (0, 0, 0, 1, 1)}


def bits(values: Any) -> list[bytes]:
    return [value.detach().numpy().tobytes() for value in values]


def train(hosts: Sequence[int], share: bool, name: str = "Adam") -> tuple[list[bytes], list[bytes], int]:
    """Parameters and states as this rank sees them, and how many elements it updates."""
    import torch

    import reigen.torch as hvd

    torch.set_num_threads(1)
    join(hosts)
    try:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(50, 300), torch.nn.Tanh(), torch.nn.Linear(300, 100), torch.nn.Linear(100, 10)]
        model = torch.nn.Sequential(*layers)
        plain = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), share_parameters=share)
        data = torch.Generator().manual_seed(hvd.rank())
        for number in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 50, generator=data)).square().mean().backward()
            if number == 3:  # gradients come together, as without sharing
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize() if number == 3 else contextlib.nullcontext():
                optimizer.step()
        state = [value for held in optimizer.state_dict()["state"].values() for value in held.values()]
        result = bits(model.parameters()), bits(state)
        numel = sum(own.piece.numel for shared in optimizer._shared for own in shared.own) if share else 0
        optimizer.zero_grad()
        model(torch.randn(8, 50, generator=data)).square().mean().backward()
        norm = float(optimizer.clip_grad_norm_(0.01))
        assert norm > 0.01
        assert len(set(hvd.allgather_object(norm))) == 1
        optimizer.step()
        return *result, numel
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("hosts", SHAPES.values(), ids=SHAPES)
def test_the_same_bits_as_without(rank_pool: Pools, hosts: Sequence[int]) -> None:
    pool, env = rank_pool(len(hosts)), {"REIGEN_BUCKET_BYTES": "65536", "REIGEN_CHECK_REPLICAS": "2"}
    weights, states, _ = pool.run(train, hosts, False, env=env)[0]
    results = pool.run(train, hosts, True, env=env)
    assert all((mine, kept) == (weights, states) for mine, kept, _ in results)
    numel = sum(map(len, weights)) // 4
    num_owners = min(hosts.count(host) for host in set(hosts))
    for host in set(hosts):
        owned = sorted(result[2] for result, where in zip(results, hosts, strict=True) if where == host)
        assert sum(owned) == numel
        if hosts != (0, 1, 0, 1):  # there, only one cross group is in one order
            assert max(owned) < 1.5 * numel / num_owners


def test_the_same_bits_where_parameters_stay_whole(rank_pool: Pools) -> None:
    hosts = (0, 0, 1, 1)
    pool, env = rank_pool(len(hosts)), {"REIGEN_BUCKET_BYTES": "65536", "REIGEN_CHECK_REPLICAS": "2"}
    weights, states, _ = pool.run(train, hosts, False, "Adafactor", env=env)[0]
    results = pool.run(train, hosts, True, "Adafactor", env=env)
    assert all((mine, kept) == (weights, states) for mine, kept, _ in results)
    assert sum(numel for _, _, numel in results) == 2 * sum(map(len, weights)) // 4
    assert min(numel for _, _, numel in results) > 0
