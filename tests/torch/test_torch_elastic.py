"""hvd.elastic with PyTorch: members come and go, errors go back to the last commit; the truth is one process."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import reigen.torch as hvd  # noqa: E402
from reigen import context  # noqa: E402
from reigen.elastic import membership  # noqa: E402
from reigen.errors import CollectiveError  # noqa: E402
from reigen.torch.elastic import TorchState, run  # noqa: E402
from tests.torch.elastic_membership import Left, WrittenViews  # noqa: E402
from tests.torch.training import TOLERANCE, batches, make_net, mean_loss, mine  # noqa: E402

STEPS = 14
#: Newcomers, an error that all survive, members that leave, and one that comes back.
VIEWS = [[0, 1], [0, 1, 2], [0, 1, 2], [0], [2, 0, 1]]
CHANGES = [3, None, 2, 3, None]
#: In which view, and at which step of it, one rank fails, and where.
FAILS = {1: 3}


class OnPurpose(Exception):
    pass


def place() -> int:
    return int(os.environ["REIGEN_RANK"])


def two_optimizers(options: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Two models with an optimizer each; a newcomer has other weights."""
    pairs = []
    for seed in (1, 2):
        model = make_net(seed + 10 * place())
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        pairs.append((model, optimizer if options is None else hvd.DistributedOptimizer(optimizer, **options)))
    return pairs


def take_step(pairs: list[tuple[Any, Any]], x: torch.Tensor, y: torch.Tensor, error: Any = None) -> None:
    for model, optimizer in reversed(pairs):  # not in the order in which they were made
        mean_loss(model, x, y).backward()
        if error is not None:
            context.current().give_up(error)
            raise CollectiveError("on purpose")
        optimizer.step()
        optimizer.zero_grad()


def truth() -> list[nn.Module]:
    models = [make_net(1), make_net(2)]
    pairs = [(model, torch.optim.Adam(model.parameters(), lr=0.01)) for model in models]
    for x, y in batches(STEPS):
        take_step(pairs, x, y)
    return models


def trains(views: list[list[int]], changes: list[int | None], options: dict[str, Any]) -> list[Any]:
    torch.set_num_threads(1)
    member = WrittenViews(place(), views, changes).begin()
    pairs = two_optimizers(options)
    (generator, first), (critic, second) = pairs
    seen: list[Any] = []
    state = TorchState(generator, first, critic=critic, second=second, step=0, log=[])
    state.register_reset_callbacks([lambda: seen.append((hvd.rank(), hvd.size(), state.step))])
    data = list(batches(STEPS))

    @run
    def train(state: Any, more: int) -> int:
        assert all(p.grad is None for p in [*generator.parameters(), *critic.parameters()])
        while state.step < STEPS:
            x, y = data[state.step]
            fails = FAILS.get(member.number) == member.steps and hvd.rank() == 1
            take_step(pairs, mine(x), mine(y), OnPurpose() if fails else None)
            state.log.append(state.step)
            state.step += 1
            if state.step % 2 == 0 or member.steps < 3:
                state.commit()
        return state.step + more

    try:
        assert train(state, 1) == STEPS + 1
        assert state.log == [*range(STEPS)]  # deep copies: what came after the commit is not there
        for model, right in zip((generator, critic), truth(), strict=True):
            for one, other in zip(model.parameters(), right.parameters(), strict=True):
                torch.testing.assert_close(one.data, other.data, **TOLERANCE)
    except Left:
        seen.append("left")
    finally:
        membership.use(None)
    return seen


@pytest.mark.parametrize("options", [{}, {"share_parameters": True}, {"synchronize_in_backward": True}])
def test_members_come_and_go(rank_pool, options):
    seen = rank_pool(3).run(trains, VIEWS, CHANGES, options)
    sizes = [[entry[:2] for entry in one] for one in seen]
    assert sizes[0] == [(0, 3), (0, 3), (0, 1), (1, 3)]
    assert sizes[2][-1] == (0, 3)
    assert seen[0][0][2] == 4  # the step of the commit at which the newcomer came


def test_a_job_that_begins_with_one_member(rank_pool):
    for options in ({}, {"share_parameters": True}, {"synchronize_in_backward": True}):
        seen = rank_pool(2).run(trains, [[0], [0, 1], [1, 0]], [3, 2, None], options)
        assert seen == [[(0, 2, 4), (1, 2, 6)], [(0, 2, 6)]]
