"""Parameters that exist once a host, and what scripts do with models and optimizers: everything means what it meant."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import shutil
from typing import Any

import pytest
import torch

import reigen.torch as hvd
from reigen.errors import ReplicaError
from tests.torch.test_shared_parameters import assert_same_bits, assert_same_state, both, step, wrapped
from tests.torch.training import Net, batches, make_net, mean_loss, mine


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


def looks_at_its_own_loss() -> None:
    """What is wrong with and without shared parameters, and then makes no difference between replicas."""
    model, optimizer = trained(3)
    optimizer.param_groups[0]["lr"] *= 1 + hvd.rank()
    before = copy.deepcopy(model)
    x, y = next(batches(1))
    with pytest.raises(ReplicaError, match="diverged") as caught:
        step(model, optimizer, x, y)
    assert caught.value.tensor == "the options of parameter group 0"
    assert optimizer.weights_are_whole
    assert_same_bits(model, before)
    optimizer.param_groups[0]["lr"] /= 1 + hvd.rank()
    step(model, optimizer, x, y)  # the job goes on
    assert not torch.equal(model.head.weight, before.head.weight)


def test_ranks_with_other_learning_rates_are_told_of_on_request(rank_pool):
    rank_pool(2).run(looks_at_its_own_loss, init=True, env={"REIGEN_CHECK_REPLICAS": "4"})


def accumulates_three() -> None:
    def take(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in range(3):
            (mean_loss(model, mine(x)[part::3], mine(y)[part::3]) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()

    both(take, backward_passes_per_step=3)


def test_three_backward_passes_a_step(rank_pool):
    rank_pool(2).run(accumulates_three, init=True)


def trains_compiled(backend: str) -> None:
    """Compiled before or after the optimizer is wrapped, or when the parameters are shared already."""
    torch.set_num_threads(1)
    for compile_at in (-1, 0, 2):
        models = []
        for share in (False, True):
            torch._dynamo.reset()
            model = make_net()
            forward = torch.compile(model, backend=backend) if compile_at < 0 else model
            optimizer = wrapped(model, share_parameters=share)
            for number, (x, y) in enumerate(batches(4)):
                if number == compile_at:
                    forward = torch.compile(model, backend=backend)
                optimizer.zero_grad()
                (forward(mine(x)) - mine(y)).square().mean().backward()
                optimizer.step()
            models.append(model)
        assert_same_bits(models[1], models[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model(rank_pool, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler (apt-get install g++)")
    rank_pool(2).run(trains_compiled, backend, init=True, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"})


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


# -- optimizers that look at whole parameters -------------------------------------------------------------------------


class Wide(torch.nn.Module):
    """Parameters of one dimension, two, four, one of which is larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.body = torch.nn.Linear(16, 300)
        self.head = torch.nn.Linear(300, 2)
        self.scale = torch.nn.Parameter(torch.tensor([[1.5]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.conv(x)).flatten(1)))) * self.scale


def optimizers_of(model: Wide, name: str, **options: Any) -> list[Any]:
    """Muon takes matrices alone; another optimizer has the rest."""
    if name == "Muon":
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        plain = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    else:
        groups = [
            {"params": [*model.conv.parameters(), model.scale]},
            {"params": [*model.body.parameters()], "lr": 0.1},
        ]
        plain = [torch.optim.Adafactor([*groups, {"params": [*model.head.parameters()]}], lr=0.05)]
    return [hvd.DistributedOptimizer(one, **options) for one in plain]


def take(model: Wide, optimizers: list[Any], x: torch.Tensor, y: torch.Tensor) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    (model(mine(x)) - mine(y)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def owns_whole_parameters(name: str) -> None:
    torch.set_num_threads(1)
    models, all_optimizers = [], []
    for share in (False, True):
        model = Wide().double()
        optimizers = optimizers_of(model, name, share_parameters=share)
        for x, y in batches(5):
            take(model, optimizers, x, y)
        again = Wide().double()
        again.load_state_dict(model.state_dict())
        resumed = optimizers_of(again, name, share_parameters=share)
        for one, other in zip(resumed, optimizers, strict=True):
            one.load_state_dict(copy.deepcopy(other.state_dict()))
        for x, y in batches(2, seed=4):
            take(again, resumed, x, y)
            take(model, optimizers, x, y)
        assert_same_bits(again, model)
        models.append(model)
        all_optimizers.append(optimizers)
    assert_same_bits(models[1], models[0])
    for mine_, other in zip(*all_optimizers, strict=True):
        assert_same_state(mine_, other)
    pieces = [own.piece for shared in all_optimizers[1][0]._shared for own in shared.own]
    parameters = all_optimizers[1][0]._shared[0].parameters
    assert all(piece.numel == parameters[piece.parameter].numel() for piece in pieces)
    assert sum(map(len, hvd.allgather_object(pieces))) == len(parameters)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_who_looks_at_whole_parameters_updates_them_whole(rank_pool, name, size):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    rank_pool(size).run(owns_whole_parameters, name, init=True, env={"REIGEN_BUCKET_BYTES": "4096"})


# -- "auto" -----------------------------------------------------------------------------------------------------------


def trains_automatically(name: str) -> bool:
    torch.set_num_threads(1)
    models = []
    for share in (False, "auto"):
        model = make_net()
        used = [parameter for parameter in model.parameters() if parameter.numel()]  # Adafactor divides by that
        optimizer = hvd.DistributedOptimizer(getattr(torch.optim, name)(used), share_parameters=share)
        for x, y in batches(2):
            optimizer.zero_grad()
            if name == "LBFGS":
                optimizer.step(lambda: closure(model, optimizer, x, y))  # noqa: B023 - called at once
            else:
                mean_loss(model, mine(x), mine(y)).backward()
                optimizer.step()
        models.append(model)
    assert_same_bits(models[1], models[0])
    return bool(getattr(optimizer, "_shared", []))


def closure(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = mean_loss(model, mine(x), mine(y))
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("name", "hosts", "shares", "why"),
    [
        ("Adam", None, True, "once a host: each rank of a host updates its part of them, divided by elements"),
        ("Adafactor", None, True, "divided by whole parameters"),
        ("LBFGS", None, False, "once a rank: the parameters of LBFGS cannot be updated in parts: its closure"),
        ("Adam", ("a", "b"), False, "once a rank: no host has several ranks"),
    ],
)
def test_auto_shares_where_that_is_exact_and_says_why(rank_pool, name, hosts, shares, why):
    pool = rank_pool(2)
    function, arguments = (trains_automatically, (name,)) if hosts is None else (on_hosts, (hosts, name))
    told = pool.run(function, *arguments, init=hosts is None, env={"REIGEN_LOG": "info"})
    assert told == [shares] * 2
    outputs = [pool.output(rank)[1] for rank in range(2)]
    assert outputs[0].count("share_parameters='auto'") == 1
    assert why in outputs[0]
    assert "share_parameters" not in outputs[1]


def on_hosts(hosts: tuple[str, ...], name: str) -> bool:
    """As if every rank were on a host of its own."""
    os.environ["REIGEN_HOST_ID"] = hosts[int(os.environ["REIGEN_RANK"])]
    hvd.init()
    try:
        return trains_automatically(name)
    finally:
        hvd.shutdown()
