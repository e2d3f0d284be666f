"""hvd.elastic with PyTorch: members come and go, errors go back to the last commit; the truth is one process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import reigen.torch as hvd  # noqa: E402
from reigen import context  # noqa: E402
from reigen.elastic import membership  # noqa: E402
from reigen.errors import ArgumentError, CollectiveError  # noqa: E402
from reigen.torch.elastic import ElasticSampler, TorchState, run  # noqa: E402
from reigen.torch.elastic.state import get_handler_registry, set_handler_registry  # noqa: E402
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


# -- what an optimizer has besides ------------------------------------------------------------------------------------


def follows(views: list[list[int]], changes: list[int | None], options: dict[str, Any]) -> Any:
    """Train with these options for as many commits as the views have; the weights must be the same on all ranks."""
    torch.set_num_threads(1)
    WrittenViews(place(), views, changes).begin()
    model = make_net(1 + place())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    state = TorchState(model, optimizer, step=0)
    sizes: list[int] = []

    @run
    def train(state: Any) -> None:
        sizes.append(hvd.size())
        for x, y in list(batches(9, seed=3))[state.step :]:
            optimizer.zero_grad()
            mean_loss(model, mine(x), mine(y)).backward()
            optimizer.step()
            state.step += 1
            state.commit()

    try:
        train(state)
        for parameter in model.parameters():
            everywhere = hvd.allgather(parameter.data.reshape(1, -1))
            assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere))
        return sizes, [p.data for p in model.parameters()], optimizer.state_dict().get("reigen.unsent") is not None
    finally:
        membership.use(None)


def test_adasum_where_a_job_begins_with_one_member(rank_pool):
    first, second = rank_pool(2).run(follows, [[0], [0, 1]], [3, None], {"op": hvd.Adasum})
    assert (first[0], second[0]) == ([1, 2], [2])


def test_error_feedback_stays_with_those_that_stay(rank_pool):
    options = {"compression": {"type": "2bit", "threshold": 0.01}}
    first, second, third = rank_pool(3).run(follows, [[0, 1], [0, 1, 2]], [4, None], options)
    assert (first[0], third[0]) == ([2, 3], [3])
    assert [first[2], second[2], third[2]] == [True] * 3


def batch_norms() -> None:
    """Layers that communicate: a newcomer has as many, with numbers of their own in the job."""
    torch.manual_seed(place())
    member = WrittenViews(place(), [[0, 1], [0, 1, 2]], [2, None]).begin()
    model = nn.Sequential(nn.Linear(3, 4), hvd.SyncBatchNorm(4), nn.Linear(4, 4), hvd.SyncBatchNorm(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = TorchState(model, optimizer, step=0)

    @run
    def train(state: Any) -> None:
        while state.step < 4:
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    try:
        train(state)
        assert member.number == 1
        for value in model.state_dict().values():
            everywhere = hvd.allgather(value.double().reshape(1, -1))
            assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere))
    finally:
        membership.use(None)


def test_sync_batch_norm(rank_pool):
    rank_pool(3).run(batch_norms)


def another_model() -> str:
    """A newcomer with another model is told; the others go on without it when it has left."""
    member = WrittenViews(place(), [[0, 1], [0, 1, 2], [0, 1]], [2, None, None]).begin()
    model = nn.Linear(3, 2 if place() < 2 else 5)
    state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=0)

    @run
    def train(state: Any) -> str:
        while state.step < 4:
            hvd.allreduce(torch.ones(2))
            state.step += 1
            state.commit()
        return "done"

    try:
        return train(state)
    except ArgumentError as error:
        hvd.shutdown()
        return str(error)
    finally:
        assert member.number == (1 if place() == 2 else 2)
        membership.use(None)


def test_a_newcomer_with_another_model(rank_pool):
    first, second, third = rank_pool(3).run(another_model)
    assert first == second == "done"
    assert "state.model of this rank is not like that of rank 0" in third
    assert "weight: torch.float32 (5, 3) here, weight: torch.float32 (2, 3) there" in third


def sets_follow(views: list[list[int]], of_ranks: list[list[int]]) -> Any:
    """Process sets that are made in the first view; who comes later has none of the objects."""
    member = WrittenViews(place(), views, [2, None]).begin()
    sets = [hvd.add_process_set(ranks) for ranks in of_ranks] if member.number == 0 else []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if sets and sets[0].included():
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=sets[0])
    state = TorchState(step=0)

    @run
    def train(state: Any) -> list[Any]:
        while state.step < 4:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            for each in sets:
                if each.included():
                    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"{each.process_set_id}", process_set=each)
                    assert total.item() == each.size()
            state.step += 1
            state.commit()
        for each in sets:
            if each.process_set_id is None:
                with pytest.raises(ValueError, match="not registered in this job"):
                    hvd.allreduce(torch.ones(1), process_set=each)
        hvd.barrier()  # who ends takes the others with it
        return [None if each.process_set_id is None else each.ranks for each in sets]

    try:
        return train(state)
    except Left:
        return None
    finally:
        membership.use(None)


def test_process_sets_keep_the_ranks_that_stay(rank_pool):
    env = {"REIGEN_DYNAMIC_PROCESS_SETS": "1"}
    run_in = rank_pool(3).run
    left = run_in(sets_follow, [[0, 1, 2], [2, 0]], [[0, 1], [1], [0, 2]], env=env)
    assert left == [[[1], None, [0, 1]], None, [[1], None, [0, 1]]]
    came = run_in(sets_follow, [[0, 1], [1, 0, 2]], [[0], [1]], env=env)
    assert came == [[[1], [0]], [[1], [0]], []]


def leaks() -> None:
    views = 24
    changes = [None if number % 3 == 1 or number == views - 1 else 2 for number in range(views)]
    member = WrittenViews(place(), [[0, 1], [1, 0]] * (views // 2), changes).begin()
    model = nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    state = TorchState(model, optimizer, step=0)
    used: list[tuple[int, int, int]] = []

    @run
    def train(state: Any) -> None:
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line or "shm" in line]
        used.append((len([*Path("/proc/self/fd").iterdir()]), len(mapped), threading.active_count()))
        while member.number < views - 1 or member.steps < 4:
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            if changes[member.number] is None and member.steps == 2 and hvd.rank() == 1 and member.number < views - 1:
                context.current().give_up(OnPurpose())
                raise CollectiveError("on purpose")
            optimizer.step()
            state.step += 1
            state.commit()

    try:
        train(state)
    finally:
        membership.use(None)
    assert len(used) == views
    assert all(later <= earlier for later, earlier in zip(used[-1], used[3], strict=True)), used


def test_nothing_is_left_of_the_views_before(rank_pool):
    rank_pool(2).run(leaks)


# -- the state, in one process ----------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Any:
    hvd.init()
    yield
    hvd.shutdown()


def test_what_a_state_holds(alone: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    sampler = ElasticSampler(range(8), shuffle=False)
    state = TorchState(model, optimizer, rate=scheduler, sampler=sampler, epoch=3, seen=[])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        for _ in range(3):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
            sampler.record_batch(0, 2)
            state.seen.append(1)
        state.epoch = 5
        state.restore()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert (state.epoch, state.seen, sampler.processed_num, scheduler.last_epoch) == (3, [], 0, 0)
        assert not optimizer.state
        assert scheduler.optimizer is optimizer is state.optimizer  # no copies of them
        assert optimizer.param_groups[0]["lr"] == 0.001
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state.commit()
    moments = optimizer.state[model[0].weight]["exp_avg"].clone()
    for _ in range(2):
        optimizer.step()
        state.restore()
        assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments)


def test_an_attribute_that_is_replaced(alone: None) -> None:
    state = TorchState(nn.Linear(2, 2), None, batch=0)
    assert state.optimizer is None
    other = nn.Linear(3, 3)
    state.model = other
    weight = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    state.batch = 7
    state.sync()
    assert torch.equal(other.weight, torch.zeros(3, 3))
    state.model = other = nn.Linear(3, 3)
    weight = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    state.batch = 8
    state.restore()
    assert torch.equal(other.weight, weight)
    assert state.batch == 7


def test_handlers_of_the_users(alone: None) -> None:
    kept = list(get_handler_registry())

    class Plain(kept[0][1]):  # type: ignore[misc, valid-type]
        pass

    try:
        set_handler_registry([(nn.Linear, Plain), *kept])
        assert type(TorchState(nn.Linear(1, 1))._handlers["model"]) is Plain
        assert type(TorchState(nn.ReLU())._handlers["model"]) is kept[0][1]
    finally:
        set_handler_registry(kept)
