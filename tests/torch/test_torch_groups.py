"""``groups``: gradients that are reduced together, and what every rank learns where the groups differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from tests.torch.training import assert_identical_everywhere, assert_same, make_net, mine, train, whole


def names_by_unit(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[set[str]]:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    plan = optimizer._reducer.reducers[0].tracker.plan
    return [{names[place.parameter] for bucket in unit for place in plan.buckets[bucket].places} for unit in plan.units]


def trains_in_groups() -> None:
    """Small buckets (see the environment), so that what is together is so because of the groups."""
    truth = make_net()
    train(truth, torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9), whole)
    stranger = nn.Parameter(torch.ones(1))

    def with_groups(make_groups: object, sizes: list[int] | None = None, **options: object) -> list[set[str]]:
        model = make_net()
        groups = make_groups(model) if callable(make_groups) else make_groups
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), groups=groups, **options)
        train(model, optimizer, mine)
        assert_same(model, truth)
        assert_identical_everywhere(model)
        units = names_by_unit(optimizer, model)
        assert sizes is None or [len(unit) for unit in units] == sizes
        return units

    with_groups(None)
    with_groups(1, [8])
    with_groups(3, [3, 3, 2])
    with_groups(99, [1] * 8)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        with_groups(None, [4, 4], num_groups=2)
    units = with_groups(lambda m: [[m.shared.weight, m.head.weight, stranger], [], [m.nothing]])
    assert {"shared.weight", "head.weight"} in units
    assert len(units) == 7
    assert all(hvd.allgather_object(units)[r] == units for r in range(hvd.size()))


@pytest.mark.parametrize("size", [2, 3])
def test_groups_change_what_travels_together_and_nothing_else(rank_pool, size):
    rank_pool(size).run(trains_in_groups, init=True, env={"REIGEN_BUCKET_BYTES": "64"})


def several_types_in_a_group() -> None:
    """One group of float32, float64 and bfloat16; a member that gets no gradient; more gradients added later."""
    rank, n = hvd.rank(), hvd.size()
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float64]
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    late = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum, groups=[[*parameters[:3], late]], backward_passes_per_step=2
    )
    for step in range(1, 4):
        optimizer.zero_grad()
        used = [p for i, p in enumerate(parameters) if i or rank == 0]  # parameter 0 gets its gradient on rank 0 alone
        if step == 3:
            optimizer.add_param_group({"params": [late]})
            used.append(late)
        for _ in range(2):
            sum((p * (rank + 1)).float().sum() for p in used).backward()
        optimizer.step()
        assert parameters[0].tolist() == [-2.0 * step] * 3
        assert all(p.tolist() == [-step * n * (n + 1.0)] * 3 for p in parameters[1:])
    assert late.tolist() == [-n * (n + 1.0)] * 3


def test_a_group_of_several_types_with_members_missing(rank_pool):
    rank_pool(2).run(several_types_in_a_group, init=True)


def groups_differ() -> None:
    rank = hvd.rank()
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    cases = [
        (
            [[first, second]],
            [[first, third]],
            r"rank 0: .*parameter0.*r1[\s\S]*rank 1: .*parameter0.*r2",
        ),
        ([[first, second]], None, r"rank 0: a group of[\s\S]*rank 1: \(nothing\)"),
        (2, 3, r"rank 0: .*2 groups[\s\S]*rank 1: .*3 groups"),
    ]
    for on_first, on_others, message in cases:
        parameters = [first, second, third]
        groups = on_others if rank else on_first
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), groups=groups)
        sum(p.sum() for p in parameters).backward()
        with pytest.raises(hvd.HorovodInternalError, match=message):
            optimizer.step()
        del optimizer
        good = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), groups=2)
        before = first.detach().clone()
        good.zero_grad()
        (first * (rank + 1)).sum().backward()
        good.step()
        torch.testing.assert_close(first.detach(), before - 0.1 * (hvd.size() + 1) / 2)


def test_groups_that_differ_are_an_error_on_every_rank_and_the_next_step_works(rank_pool):
    rank_pool(2).run(groups_differ, init=True)
