"""Model and optimizer live on after an error in the middle of a step, shutdown() and init(): in jobs of other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import reigen.torch as hvd  # noqa: E402
from reigen import context  # noqa: E402
from reigen.errors import CollectiveError  # noqa: E402
from tests.torch.training import TOLERANCE, Net, batches, make_net, mean_loss, mine  # noqa: E402

#: Who is together in a job with rank 0, 1 and 2: in one job after the other. In the first all are.
JOBS: list[list[list[int]]] = [[[0, 1], [0, 1], [2]], [[0, 1, 2]] * 3, [[0], [1, 2], [1, 2]], [[0, 1, 2]] * 3]
WHERE = ["no backward", "in backward", "after backward", "after synchronize"]


class OnPurpose(Exception):
    pass


def give_up() -> None:
    context.current().give_up(OnPurpose("this rank cannot go on"))


def fail_on(parameter: torch.Tensor) -> Callable[[], None]:
    """Have its gradient fail, once."""

    def fail(_: torch.Tensor) -> None:
        give_up()
        raise OnPurpose

    return parameter.register_hook(fail).remove


def break_off(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor, where: str) -> None:
    """A step that the last rank spoils, and that no rank comes to the end of."""
    spoils = hvd.rank() == hvd.size() - 1
    optimizer.zero_grad()
    remove = fail_on(model.shared.weight) if spoils and where == "in backward" else lambda: None
    try:
        if spoils and where == "no backward":
            give_up()
            raise OnPurpose
        mean_loss(model, x, y).backward()
        if where == "after synchronize":
            optimizer.synchronize()
        if where.startswith("after") and spoils:
            give_up()
            raise OnPurpose
        if where == "after backward":
            hvd.allreduce(torch.ones(3), name="metric")
        elif where == "after synchronize":
            hvd.barrier()
        optimizer.step()
    except (CollectiveError, OnPurpose):
        pass
    else:
        pytest.fail("the step should have failed")
    finally:
        remove()


def enter(ranks: list[int] | None) -> None:
    hvd.shutdown()
    hvd.init(ranks)


def saved(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    return torch.load(to_bytes(model.state_dict())), torch.load(to_bytes(optimizer.state_dict()))


def to_bytes(state: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def step(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor, zeroes_before: bool) -> None:
    if zeroes_before:
        optimizer.zero_grad()
    mean_loss(model, x, y).backward()
    optimizer.step()
    if not zeroes_before:
        optimizer.zero_grad()


def goes_on(options: dict[str, Any], where: str, zeroes_before: bool, restores_first: bool) -> None:
    torch.set_num_threads(1)
    truth, model = make_net(), make_net()
    reference = torch.optim.Adam(truth.parameters(), lr=0.01)
    rank = context.current().rank
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), **options)
    data: Iterator[Any] = batches(100)
    for job in [None, *JOBS]:
        if job is not None:
            weights, state = saved(model, optimizer)
            if hvd.size() > 1:
                x, y = next(batches(1, seed=77))
                break_off(model, optimizer, mine(x), mine(y), where)
            if restores_first:
                optimizer.abandon()
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            enter(job[rank])
            if not restores_first:
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            hvd.broadcast_parameters(model.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
        for x, y in itertools.islice(data, 3):
            step(model, optimizer, mine(x), mine(y), zeroes_before)
            reference.zero_grad()
            mean_loss(truth, x, y).backward()
            reference.step()
            for one, other in zip(model.parameters(), truth.parameters(), strict=True):
                torch.testing.assert_close(one.data, other.data, **TOLERANCE)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": 2},
    "sparse_as_dense": {"sparse_as_dense": True},
    "in backward": {"synchronize_in_backward": True},
    "shared": {"share_parameters": True},
}


#: all places with the plain one, and each option in some
CASES = [
    *(("plain", where) for where in WHERE),
    ("groups", "no backward"),
    ("sparse_as_dense", "in backward"),
    ("in backward", "after backward"),
    ("shared", "in backward"),
    ("shared", "after synchronize"),
]


@pytest.mark.parametrize(("name", "where"), CASES)
def test_an_optimizer_goes_on_in_a_job_of_another_size(rank_pool, name, where):
    after = where == "after synchronize"  # with sums in p.grad, which the next step must not find there
    rank_pool(3).run(goes_on, OPTIONS[name], where, not after, where != "in backward", init=True)
