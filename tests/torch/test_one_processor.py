"""Ranks that have one processor: nothing goes on while they compute, so gradients are reduced when backward is over."""

from __future__ import annotations

import os

import pytest
import torch

import reigen.torch as hvd
from reigen import context
from tests.torch.training import assert_identical_everywhere, assert_same, batches, make_net, mean_loss, mine, whole

#: Several buckets of the model.
SMALL = {"REIGEN_BUCKET_BYTES": "1000"}


def made(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(num_processors: list[int], share_parameters: bool, groups: int | None) -> tuple[bool, list[int], int]:
    """Train as one process does; by step, the buckets that were submitted in backward, and how many there are.

    Args:
        num_processors: that each rank may use.
        share_parameters: as for DistributedOptimizer.
        groups: as for DistributedOptimizer.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[: num_processors[int(os.environ["REIGEN_RANK"])]])
    try:
        hvd.init()
        truth, model = make_net(), make_net()
        alone = made(truth)
        optimizer = hvd.DistributedOptimizer(
            made(model), model.named_parameters(), share_parameters=share_parameters, groups=groups
        )
        submitted = []
        for x, y in batches(4):
            alone.zero_grad()
            mean_loss(truth, whole(x), whole(y)).backward()
            alone.step()
            optimizer.zero_grad()
            mean_loss(model, mine(x), mine(y)).backward()
            (reducer,) = optimizer._reducer.reducers
            submitted.append(len(reducer._handles))
            optimizer.step()
        assert_same(model, truth)
        assert_identical_everywhere(model)
        found = context.current().overlaps, submitted, len(reducer.tracker.plan.buckets)
        hvd.shutdown()
    finally:
        os.sched_setaffinity(0, allowed)
    return found


@pytest.mark.parametrize("share_parameters", [False, True], ids=["buckets", "shared"])
def test_nothing_is_submitted_in_backward_where_nothing_would_go_on(rank_pool, share_parameters):
    for found in rank_pool(2).run(train, [1, 1], share_parameters, None):
        assert found == (False, [0, 0, 0, 0], 1)


@pytest.mark.parametrize("share_parameters", [False, True], ids=["buckets", "shared"])
@pytest.mark.parametrize("groups", [None, 3])
def test_several_buckets_are_kept_back(rank_pool, share_parameters, groups):
    for overlaps, submitted, num_buckets in rank_pool(2).run(train, [1, 1], share_parameters, groups, env=SMALL):
        assert not overlaps
        assert submitted == [0, 0, 0, 0]
        assert num_buckets > 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.parametrize("share_parameters", [False, True], ids=["buckets", "shared"])
def test_one_rank_with_more_processors_decides_for_all(rank_pool, share_parameters):
    results = rank_pool(2).run(train, [1, 2], share_parameters, None, env=SMALL)
    assert [overlaps for overlaps, _, _ in results] == [False, True]
    for _, (first, *others), num_buckets in results:
        assert first == 0  # there is no plan in the first step
        assert others == [num_buckets - share_parameters] * 3  # the last one is kept back where parameters are shared


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_processor_of_its_own_for_the_engine_is_one_more(rank_pool):
    env = SMALL | {"REIGEN_THREAD_AFFINITY": str(max(os.sched_getaffinity(0)))}
    for overlaps, submitted, _ in rank_pool(2).run(train, [1, 1], True, None, env=env):
        assert overlaps
        assert submitted[-1] > 0
