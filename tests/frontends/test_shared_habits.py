"""Parameters that exist once a host, and what scripts do with models and optimizers: everything means what it meant."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import torch
from tests.frontends.test_shared_parameters import assert_same_bits, assert_same_state, both, step, wrapped
from tests.frontends.training import Net, batches, make_net, mean_loss, mine

import reigen.torch as hvd


def trained(steps: int, *, share: bool = True, seed: int = 1) -> tuple[Net, Any]:
    torch.set_num_threads(1)
    model = make_net()
    optimizer = wrapped(model, share_parameters=share)
    for x, y in batches(steps, seed=seed):
        step(model, optimizer, x, y)
    return model, optimizer


def state_dicts(steps: int, seed: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a model and an optimizer that are gone when this returns."""
    model, optimizer = trained(steps, seed=seed)
    return model.state_dict(), optimizer.state_dict()


def keeps_references() -> None:
    """One training after the other, as in cross-validation; then one that goes on with the state of the one before."""
    kept = [state_dicts(2), state_dicts(3, seed=2)]
    gc.collect()
    hvd.barrier()
    copies = copy.deepcopy(kept)
    state_dicts(4, seed=3)
    model, _ = trained(2, share=False)
    assert all(torch.equal(value, kept[0][0][name]) for name, value in model.state_dict().items())
    for (weights, state), (expected, truth) in zip(kept, copies, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        held = [(state["state"][n][name], v) for n, one in truth["state"].items() for name, v in one.items()]
        assert all(torch.equal(value, other) for value, other in held)
    models, optimizers = [], []
    for share in (False, True):
        model, optimizer = trained(2, share=share)
        state = optimizer.state_dict()
        del optimizer
        gc.collect()
        hvd.barrier()
        resumed = wrapped(model, share_parameters=share)
        resumed.load_state_dict(state)
        del state
        for x, y in batches(2, seed=5):
            step(model, resumed, x, y)
        models.append(model)
        optimizers.append(resumed)
    assert_same_bits(models[1], models[0])
    assert_same_state(optimizers[1], optimizers[0])


def test_what_was_taken_from_state_dicts_outlives_the_optimizer(rank_pool):
    rank_pool(2).run(keeps_references, init=True)


def removes_a_group() -> None:
    torch.set_num_threads(1)
    models = []
    for share in (False, True):
        model = make_net()
        groups = [
            {"params": [*model.conv.parameters(), *model.extra.parameters()], "lr": 0.1},
            {"params": [*model.shared.parameters(), *model.head.parameters()]},
        ]
        plain = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, share_parameters=share)
        for number, (x, y) in enumerate(batches(5)):
            if number == 3:
                del optimizer.param_groups[0]
            step(model, optimizer, x, y)
        models.append(model)
    assert_same_bits(models[1], models[0])


def test_a_group_that_is_removed(rank_pool):
    rank_pool(2).run(removes_a_group, init=True)


def follows_the_mean_loss(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """A schedule that looks at the loss: at its mean, so that all ranks have one learning rate."""
    if not hasattr(optimizer, "schedule"):
        optimizer.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.3, threshold=0.5
        )
    optimizer.zero_grad()
    loss = mean_loss(model, mine(x), mine(y))
    loss.backward()
    optimizer.step()
    optimizer.schedule.step(hvd.allreduce(loss.detach()))


def one_cycle(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """It changes learning rate and betas, and wraps step()."""
    if not hasattr(optimizer, "schedule"):
        optimizer.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7)
    step(model, optimizer, x, y)
    optimizer.schedule.step()


def schedules() -> None:
    _, optimizer = both(follows_the_mean_loss, steps=6)
    assert optimizer.param_groups[0]["lr"] < 0.01
    _, optimizer = both(one_cycle, steps=6)
    assert optimizer.param_groups[0]["betas"][0] > 0.94


def test_schedules(rank_pool):
    rank_pool(2).run(schedules, init=True)


def accumulates_three() -> None:
    def take(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in range(3):
            (mean_loss(model, mine(x)[part::3], mine(y)[part::3]) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()

    both(take, backward_passes_per_step=3)


def test_three_backward_passes_a_step(rank_pool):
    rank_pool(2).run(accumulates_three, init=True)


def num_bytes(thing: Any) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


def copies() -> None:
    """What is copied, averaged, pickled or saved is a rank's own, and no larger than its numbers."""
    (model, optimizer), (plain, without) = trained(2), trained(2, share=False)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    again = make_net(seed=9)
    again.load_state_dict(model.state_dict())
    alike = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), average.module, again]
    second = copy.deepcopy(optimizer)
    assert type(second) is torch.optim.Adam
    hvd.barrier()
    with torch.no_grad():
        for one in alike:
            assert_same_bits(one, model)
            one.head.bias.fill_(hvd.rank())
        for held in second.state.values():
            held["exp_avg"].fill_(hvd.rank())
    hvd.barrier()
    assert all((one.head.bias == hvd.rank()).all() for one in alike)
    assert all((held["exp_avg"] == hvd.rank()).all() for held in second.state.values())
    assert_same_bits(model, plain)
    assert_same_state(optimizer, without)
    for ours, theirs in ((model.state_dict(), plain.state_dict()), (optimizer.state_dict(), without.state_dict())):
        assert num_bytes(ours) <= 1.1 * num_bytes(theirs)
    assert len(pickle.dumps(model)) <= 1.1 * len(pickle.dumps(plain))
    hvd.barrier()


def test_copies_are_a_rank_s_own_and_small(rank_pool):
    rank_pool(2).run(copies, init=True)
