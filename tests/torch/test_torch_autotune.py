"""Training that is tuned has the bits of training that is not, whatever changes in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import reigen.torch as hvd
from reigen import context
from reigen.autotune.search_space import ParameterPoint
from reigen.testing import RankPool
from tests.tuning import POINTS, follow_schedule

pytestmark = pytest.mark.slow

_COUNTS = (400_000, 3, 70_001, 1, 65_536, 0, 12_345, 40_000, 7, 90_000)
_TUNED = {"REIGEN_AUTOTUNE": "1"}


def _gradient(step: int, index: int, count: int) -> torch.Tensor:
    """Magnitudes differ so much that another order of a sum is another sum."""
    rng = np.random.default_rng([step, index, hvd.rank()])
    return torch.from_numpy(rng.standard_normal(count, np.float32) * np.exp2(rng.integers(-8, 8, count, np.int32)))


def _train(
    points: Sequence[ParameterPoint], steps: int, passes: int = 1, uneven: bool = False
) -> tuple[list[Any], set[int], int]:
    """Weights, how many buckets there were, and the number of changes."""
    if points:
        follow_schedule(points)
    parameters = [torch.nn.Parameter(torch.ones(count)) for count in _COUNTS]
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9), backward_passes_per_step=passes
    )
    plans = set()

    def epoch(begin: int, end: int) -> None:
        for step in range(begin, end):
            optimizer.zero_grad()
            for part in range(passes):
                inputs = [_gradient(step * passes + part, index, count) for index, count in enumerate(_COUNTS)]
                sum((p * x).sum() for p, x in zip(parameters, inputs, strict=True)).backward()  # type: ignore[union-attr]
            optimizer.step()
            plan = optimizer._reducer.reducers[0].tracker.plan
            if plan is not None:
                plans.add(len(plan.buckets))

    if uneven:
        model = torch.nn.ParameterList(parameters)
        for turn in range(3):
            with hvd.uneven_data(optimizer, model):
                epoch(20 * turn, 20 * turn + (7, 12, 9)[(hvd.rank() + turn) % 3])
    else:
        epoch(0, steps)
    tuned = context.current().counters.tuned
    return [p.detach().numpy().copy() for p in parameters], plans, 0 if tuned is None else tuned.version


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(np.array_equal(one.view(np.uint32), other.view(np.uint32)) for one, other in pairs)


@pytest.mark.parametrize(("env", "passes"), [({}, 2), ({"REIGEN_PLANE": "tcp"}, 1)], ids=["shm", "tcp"])
def test_weights_are_the_same_bit_for_bit(
    env: dict[str, str], passes: int, rank_pool: Callable[[int], RankPool]
) -> None:
    plain, plans, _ = rank_pool(3).run(_train, [], 24, passes, init=True, env=env)[0]
    assert len(plans) == 1
    for weights, plans, version in rank_pool(3).run(_train, POINTS, 24, passes, init=True, env=env | _TUNED):
        assert version >= 24 // 3 - 1, "all ranks have heard of all choices"
        assert len(plans) >= 3, "buckets were laid out anew"
        assert _same(plain, weights)


def test_ranks_that_have_joined_do_not_keep_the_others_from_agreeing(rank_pool: Callable[[int], RankPool]) -> None:
    """Ranks have 7, 12 and 9 steps, then others: they count their passes anew when all go on."""
    plain, _, _ = rank_pool(3).run(_train, [], 0, 1, True, init=True)[0]
    points = [replace(point, tcp_algorithm="", tcp_sockets=0) for point in POINTS]
    for weights, plans, _ in rank_pool(3).run(_train, points, 0, 1, True, init=True, env=_TUNED, timeout=60.0):
        assert len(plans) >= 2
        assert _same(plain, weights)


def _two_optimizers_and_a_set() -> list[Any]:
    """One optimizer of all ranks, one of a process set, and a second one that takes a step every other time."""
    follow_schedule(POINTS)
    process_set = hvd.add_process_set([0, 2]) if hvd.size() > 2 else None
    sets = [torch.nn.Parameter(torch.ones(50_000)) for _ in range(6)]
    optimizers: list[Any] = [
        hvd.DistributedOptimizer(torch.optim.SGD(sets[:2], lr=0.1)),
        hvd.DistributedOptimizer(torch.optim.SGD(sets[2:4], lr=0.1)),
        hvd.DistributedOptimizer(torch.optim.SGD(sets[4:], lr=0.1), process_set=process_set),
    ]
    for step in range(30):
        for number, optimizer in enumerate(optimizers):
            if number == 1 and step % 2:
                continue
            optimizer.zero_grad()
            sum((p * _gradient(step, number, 50_000)).sum() for p in sets[2 * number : 2 * number + 2]).backward()  # type: ignore[union-attr]
            optimizer.step()
    hvd.barrier()  # who is not in the set would leave while the others take its last step
    return [p.detach().numpy().copy() for p in sets[:4]]


def test_several_optimizers_and_process_sets_are_tuned_beside_each_other(
    rank_pool: Callable[[int], RankPool],
) -> None:
    env = _TUNED | {"REIGEN_DYNAMIC_PROCESS_SETS": "1"}
    first, *others = rank_pool(3).run(_two_optimizers_and_a_set, init=True, env=env)
    assert all(_same(first, other) for other in others)
