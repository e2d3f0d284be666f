"""Parameters that exist once a host: the weights and states of the same run without that, bit for bit.

Contents: exactness; state dicts; what the user may do with gradients; models; mistakes; memory.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reigen.torch as hvd
from reigen.errors import ArgumentError, CollectiveError, MismatchError, ReplicaError, StepOrderError
from tests.torch.training import Net, batches, make_net, mean_loss, mine

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "fused": True},
    "Adagrad": {"lr": 0.05, "foreach": True},
}

Step = Callable[[Net, Any, torch.Tensor, torch.Tensor], None]


def wrapped(model: torch.nn.Module, name: str = "Adam", **options: Any) -> Any:
    plain = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def step(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    mean_loss(model, mine(x), mine(y)).backward()
    optimizer.step()


def assert_same_bits(model: torch.nn.Module, truth: torch.nn.Module) -> None:
    for (name, value), other in zip(model.state_dict().items(), truth.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def assert_same_state(optimizer: Any, truth: Any) -> None:
    mine, other = optimizer.state_dict(), truth.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for number, held in mine["state"].items():
        expected = other["state"][number]
        assert held.keys() == expected.keys()
        for name, value in held.items():
            assert value is expected[name] is None or torch.equal(value, expected[name]), (number, name)


def both(take: Step = step, steps: int = 4, name: str = "Adam", **options: Any) -> tuple[Net, Any]:
    """Train with and without shared parameters; both must end with the same weights and states on every rank."""
    torch.set_num_threads(1)
    models, optimizers = [], []
    for share in (False, True):
        model = make_net()
        optimizer = wrapped(model, name, share_parameters=share, **options)
        for x, y in batches(steps):
            take(model, optimizer, x, y)
        models.append(model)
        optimizers.append(optimizer)
    assert_same_bits(models[1], models[0])
    assert_same_state(optimizers[1], optimizers[0])
    assert isinstance(optimizers[1], getattr(torch.optim, name))
    return models[1], optimizers[1]


# -- exactness --------------------------------------------------------------------------------------------------------


def shares(name: str) -> None:
    model, optimizer = both(name=name)
    everyone = hvd.allgather_object(float(model.head.weight.detach().sum()))
    assert len(set(everyone)) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    hvd.barrier()
    with torch.no_grad():  # what one rank writes, all see
        if hvd.rank() == 0:
            model.head.bias.fill_(7)
        hvd.barrier()
        assert (model.head.bias == 7).all()
    hvd.barrier()
    del optimizer


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_without(rank_pool, name, size):
    rank_pool(size).run(shares, name, init=True)


def test_one_rank_has_the_plain_optimizer(rank_pool):
    rank_pool(1).run(both, init=True)


# -- state dicts ------------------------------------------------------------------------------------------------------


def saves_on_one_rank(share_after: bool) -> dict[str, Any] | None:
    """Only rank 0 asks for the state: nobody else takes part in that."""
    model, optimizer = both(steps=3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())) if hvd.rank() == 0 else None
    for x, y in batches(2, seed=5):
        step(model, optimizer, x, y)
    weights, state = hvd.broadcast_object(saved)
    again = make_net(seed=9)
    again.load_state_dict(weights)
    resumed = wrapped(again, share_parameters=share_after)
    resumed.load_state_dict(copy.deepcopy(state))
    for x, y in batches(2, seed=5):
        step(again, resumed, x, y)
    assert_same_bits(again, model)
    assert_same_state(resumed, optimizer)
    # and into one that has its parameters shared already
    hvd.barrier()
    again.load_state_dict(weights)
    resumed.load_state_dict(copy.deepcopy(state))
    hvd.barrier()
    for x, y in batches(2, seed=5):
        step(again, resumed, x, y)
    assert_same_bits(again, model)
    assert_same_state(resumed, optimizer)
    return saved


@pytest.mark.parametrize("share_after", [True, False])
def test_a_state_dict_is_the_ordinary_one_and_is_not_collective(rank_pool, share_after):
    weights, state = rank_pool(2).run(saves_on_one_rank, share_after, init=True)[0]
    plain = make_net(seed=4)
    plain.load_state_dict(weights)
    optimizer = torch.optim.Adam(plain.parameters(), **OPTIMIZERS["Adam"])
    optimizer.load_state_dict(state)
    x, y = next(batches(1))
    mean_loss(plain, x, y).backward()
    optimizer.step()


def broadcasts_state() -> None:
    """Horovod's way to resume: rank 0 loads, all others get it."""
    torch.set_num_threads(1)
    model, optimizer = both(steps=2)
    for x, y in batches(1, seed=3):
        if hvd.rank():
            optimizer.param_groups[0]["lr"] = 1.0
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        assert optimizer.param_groups[0]["lr"] == OPTIMIZERS["Adam"]["lr"]
        before = [value.clone() for held in optimizer.state.values() for value in held.values()]
        step(model, optimizer, x, y)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(before, (v for held in optimizer.state.values() for v in held.values()), strict=True)
    )
    states = hvd.allgather_object([value.clone() for held in optimizer.state.values() for value in held.values()])
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[-1], strict=True))
    # the same once more in a run without shared parameters
    plain, without = make_net(), None
    without = wrapped(plain)
    for x, y in batches(2):
        step(plain, without, x, y)
    for x, y in batches(1, seed=3):
        step(plain, without, x, y)
    assert_same_bits(model, plain)


def test_broadcast_optimizer_state(rank_pool):
    rank_pool(2).run(broadcasts_state, init=True)


# -- what the user may do with gradients ------------------------------------------------------------------------------


def clips_as_horovod_does(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    mean_loss(model, mine(x), mine(y)).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()


def accumulates(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    for part in (0, 1):
        mean_loss(model, mine(x)[part::2], mine(y)[part::2]).backward()
    optimizer.step()


def uses_a_part(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """The extra layer runs on rank 0 alone, at every other step; a frozen one takes no part in some."""
    number = uses_a_part.number = getattr(uses_a_part, "number", 0) + 1  # type: ignore[attr-defined]
    model.conv.requires_grad_(number % 4 != 3)
    optimizer.zero_grad()
    used = hvd.rank() == 0 and number % 2 == 0
    (model(mine(x), use_extra=used) - mine(y)).square().mean().backward()
    optimizer.step()


def looks_on(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """A step hook sees reduced gradients; those after it see nothing twice."""
    seen: list[str] = []

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        assert all(p.grad is not None for p in model.parameters())
        everyone = hvd.allgather_object(float(model.head.weight.grad.sum()))
        assert len(set(everyone)) == 1
        model.head.weight.grad.mul_(0.5)
        seen.append("before")

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        seen.append("after")

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    step(model, optimizer, x, y)
    for handle in handles:
        handle.remove()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("take", [clips_as_horovod_does, uses_a_part, looks_on])
def test_idioms_have_the_same_bits(rank_pool, take):
    rank_pool(2).run(both, take, init=True)


@pytest.mark.parametrize(
    "options", [{"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"compression": hvd.Compression.fp16}]
)
def test_options_have_the_same_bits(rank_pool, options):
    rank_pool(2).run(trains_with, options, init=True)


def trains_with(options: dict[str, Any]) -> None:
    both(**options)


def accumulates_locally() -> None:
    both(accumulates, backward_passes_per_step=2)


def test_backward_passes_per_step(rank_pool):
    rank_pool(2).run(accumulates_locally, init=True)


class Scaled:
    """GradScaler's loop; rank 1 overflows in the second step, so nobody takes it."""

    def __init__(self, clips: bool) -> None:
        self.clips = clips
        self.held: dict[int, list[Any]] = {}

    def __call__(self, model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        held = self.held.setdefault(id(optimizer), [torch.amp.GradScaler("cpu", init_scale=64.0), 0])
        scaler, held[1] = held[0], held[1] + 1
        optimizer.zero_grad()
        loss = mean_loss(model, mine(x), mine(y))
        if held[1] == 2 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if self.clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = model.head.bias.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        hvd.barrier()
        assert torch.equal(before, model.head.bias) is (held[1] == 2)
        assert scaler.get_scale() == (32.0 if held[1] >= 2 else 64.0)


def scales(name: str, clips: bool) -> None:
    both(Scaled(clips), name=name)


@pytest.mark.parametrize(("name", "clips"), [("SGD", False), ("Adam", True), ("AdamW", False)])
def test_grad_scaler(rank_pool, name, clips):
    rank_pool(2).run(scales, name, clips, init=True)


def clips_parts(norm_type: float) -> None:
    torch.set_num_threads(1)
    norms, models = [], []
    for share in (False, True):
        model = make_net()
        optimizer = wrapped(model, "SGD", share_parameters=share)
        for x, y in batches(4):
            optimizer.zero_grad()
            mean_loss(model, mine(x), mine(y)).backward()
            norms.append(optimizer.clip_grad_norm_(0.1, norm_type))
            optimizer.step()
        models.append(model)
    torch.testing.assert_close(norms[4:], norms[:4])
    assert all(norm > 0.1 for norm in norms)
    for value, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-12)
    assert len(set(hvd.allgather_object([float(norm) for norm in norms][-1]))) == 1


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_of_parts(rank_pool, norm_type):
    rank_pool(2).run(clips_parts, norm_type, init=True)


def clips_what_is_nowhere(where: tuple[int, ...]) -> None:
    model, optimizer = both(steps=2)
    x, y = next(batches(1))
    optimizer.zero_grad()
    mean_loss(model, mine(x), mine(y)).backward()
    optimizer.clip_grad_norm_(1.0)
    if hvd.rank() in where:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    ranks = ", ".join(map(str, where))
    with pytest.raises(StepOrderError, match=rf"on rank\(s\) {ranks} .* optimizer.clip_grad_norm_\(\)"):
        optimizer.step()
    assert optimizer.weights_are_whole
    hvd.barrier()
    step(model, optimizer, x, y)
    infinite = float("inf")
    optimizer.zero_grad()
    (mean_loss(model, mine(x), mine(y)) * (infinite if hvd.rank() == 1 else 1)).backward()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    hvd.barrier()


@pytest.mark.parametrize("where", [(0, 1), (1,)])
def test_clipping_with_torch_where_gradients_are_in_parts_is_an_error_on_all_ranks(rank_pool, where):
    rank_pool(2).run(clips_what_is_nowhere, where, init=True)


# -- models -----------------------------------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """Parameters of several dtypes, one in another memory format, one of no dimension, one used in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = torch.nn.Conv2d(2, 8, 3).to(memory_format=torch.channels_last)
        self.low = torch.nn.Linear(32, 40).bfloat16()
        self.high = torch.nn.Linear(40, 41).double()
        self.out = torch.nn.Linear(41, 40)
        self.tied = torch.nn.Linear(40, 41, bias=False)
        self.tied.weight = torch.nn.Parameter(self.out.weight.detach().t().contiguous())
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.conv(x.float())).flatten(1)
        hidden = torch.tanh(self.high(torch.tanh(self.low(hidden.bfloat16())).double())).float()
        return self.tied(self.out(hidden)) * self.scale


def trains_groups() -> None:
    """Groups with options of their own, a schedule, a group and parameters that come later."""
    torch.set_num_threads(1)
    models, optimizers = [], []
    for share in (False, True):
        model = Mixed()
        for parameter in model.tied.parameters():
            parameter.requires_grad_(False)
        groups = [
            {"params": [*model.conv.parameters(), *model.low.parameters()], "lr": 0.01},
            {"params": [*model.high.parameters(), *model.out.parameters()], "weight_decay": 0.1, "betas": (0.8, 0.9)},
        ]
        plain = torch.optim.AdamW(groups, lr=0.02, foreach=False)
        optimizer = hvd.DistributedOptimizer(plain, share_parameters=share)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for number, (x, _) in enumerate(batches(7)):
            if number == 3:
                model.tied.requires_grad_(True)
                optimizer.add_param_group({"params": [*model.tied.parameters(), model.scale], "lr": 0.03})
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            optimizer.zero_grad()
            model(mine(x)).square().mean().backward()
            optimizer.step()
            schedule.step()
        models.append(model)
        optimizers.append(optimizer)
    assert_same_bits(models[1], models[0])
    assert_same_state(optimizers[1], optimizers[0])
    assert models[1].conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_groups_dtypes_schedules_and_parameters_that_come_later(rank_pool):
    rank_pool(2).run(trains_groups, init=True)


def loads_weights_and_evaluates() -> None:
    """Everybody loads the same weights in the middle; then rank 0 alone evaluates while the others go on."""
    saved = make_net(seed=5).state_dict()
    models = []
    for share in (False, True):
        model = make_net()
        optimizer = wrapped(model, share_parameters=share)
        for number, (x, y) in enumerate(batches(6)):
            if number == 3:
                hvd.barrier()
                model.load_state_dict(saved)
                hvd.barrier()
            if hvd.rank() == 0 and number > 3:
                with torch.no_grad():
                    first = model(x)
                    for _ in range(50):  # whatever the others do meanwhile, the weights are those of now
                        assert torch.equal(model(x), first)
            step(model, optimizer, x, y)
        models.append(model)
    assert_same_bits(models[1], models[0])


def test_load_state_dict_of_the_model_and_evaluation_on_one_rank(rank_pool):
    rank_pool(2).run(loads_weights_and_evaluates, init=True)


# -- mistakes ---------------------------------------------------------------------------------------------------------


class OwnSGD(torch.optim.Optimizer):
    """Somebody's own, element by element; it counts steps in its group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])


def vouches() -> None:
    torch.set_num_threads(1)
    models, counts = [], []
    for share in (False, True):
        model = make_net()
        optimizer = hvd.DistributedOptimizer(OwnSGD(model.parameters()), share_parameters=share, elementwise=share)
        for x, y in batches(3):
            step(model, optimizer, x, y)
        models.append(model)
        counts.append(optimizer.param_groups[0]["count"])
    assert counts == [3, 3]
    assert_same_bits(models[1], models[0])
    with pytest.raises(ArgumentError, match="elementwise=True"):
        hvd.DistributedOptimizer(OwnSGD(model.parameters()), share_parameters=True)


def test_a_class_that_the_user_vouches_for(rank_pool):
    rank_pool(2).run(vouches, init=True)


def refuses() -> None:
    model = make_net()
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(ArgumentError, match=f"share_parameters: .*{cls.__name__}"):
            hvd.DistributedOptimizer(cls(model.parameters()), share_parameters=True)
    plain = torch.optim.LBFGS(model.parameters())
    assert not hasattr(hvd.DistributedOptimizer(plain, share_parameters="auto"), "_shared")
    with pytest.raises(ArgumentError, match="True, False or 'auto'"):
        wrapped(model, share_parameters="yes")
    with pytest.raises(ArgumentError, match="op=Adasum"):
        wrapped(model, share_parameters=True, op=hvd.Adasum)
    with pytest.raises(ArgumentError, match="codes"):
        wrapped(model, share_parameters=True, compression={"type": "2bit"})
    optimizer = wrapped(model, share_parameters="auto")
    assert optimizer._shared == []
    with pytest.raises(ArgumentError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ArgumentError, match="uneven_data"), hvd.uneven_data(optimizer):
        pass
    hvd.barrier()


def test_what_cannot_be_shared_is_refused(rank_pool):
    rank_pool(2).run(refuses, init=True)


def disagrees(how: str) -> None:
    """Every rank gets an error that tells what differs, and the job goes on."""
    rank = hvd.rank()
    model = make_net(seed=rank if how == "weights" else 0)
    if how == "models" and rank:
        model.extra = torch.nn.Linear(12, 13, bias=False).double()
        model.forward = lambda x, use_extra=True: Net.forward(model, x, use_extra=False)  # type: ignore[method-assign]
    optimizer = wrapped(model, share_parameters=how != "modes" or rank == 0)
    x, y = next(batches(1))
    optimizer.zero_grad()
    mean_loss(model, mine(x), mine(y)).backward()
    error, words = {
        "models": (MismatchError, r"extra.weight.*13, 12"),
        "modes": (MismatchError, "with shared parameters"),
        "weights": (ReplicaError, "broadcast_parameters"),
    }[how]
    with pytest.raises(error) as caught:
        optimizer.step()
    assert re.search(words, str(caught.value)), str(caught.value)
    assert len(hvd.allgather_object(rank)) == hvd.size()


@pytest.mark.parametrize("how", ["models", "modes", "weights"])
def test_ranks_that_differ(rank_pool, how):
    rank_pool(2).run(disagrees, how, init=True)


def moves(how: str) -> None:
    model, optimizer = both(steps=2)
    x, y = next(batches(1))
    optimizer.zero_grad()
    loss = mean_loss(model, mine(x), mine(y))
    if how == "data":
        model.head.weight.data = model.head.weight.data.clone()
    elif how == "float":
        model.float()
        loss = mean_loss(model, mine(x).float(), mine(y).float())
    if how != "after backward":
        with pytest.raises(StepOrderError, match="no longer lies in the memory"):
            loss.backward()
    else:
        loss.backward()
        model.head.weight.data = model.head.weight.data.clone()
        with pytest.raises(StepOrderError, match=r"head.weight no longer lies in the memory"):
            optimizer.step()
    with pytest.raises(CollectiveError, match="no longer lies in the memory"):  # who moved alone cannot go on
        hvd.barrier()


@pytest.mark.parametrize("how", ["data", "float", "after backward"])
def test_a_module_that_is_moved_afterwards(rank_pool, how):
    rank_pool(2).run(moves, how, init=True)


def overlaps() -> None:
    for where in ((0, 1), (1,)):
        one = torch.nn.Linear(4, 4)
        other = torch.nn.Linear(4, 4)
        if hvd.rank() in where:
            other.weight.data = one.weight.data
        model = torch.nn.Sequential(one, other)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), share_parameters=True)
        model(torch.ones(2, 4)).sum().backward()
        words = "same memory" if hvd.rank() in where else r"of rank\(s\) \[1\] cannot be shared"
        with pytest.raises(ArgumentError, match=words):
            optimizer.step()
        hvd.barrier()
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters()), share_parameters=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ArgumentError, match="sparse_as_dense"):
        optimizer.step()
    hvd.barrier()


def test_parameters_in_the_same_memory_and_sparse_gradients(rank_pool):
    rank_pool(2).run(overlaps, init=True)


def writes_outside() -> None:
    model, optimizer = both(steps=2)
    x, y = next(batches(1))
    step(model, optimizer, x, y)
    hvd.barrier()
    if hvd.rank() == 0:
        with torch.no_grad():
            model.head.bias.mul_(2)
    hvd.barrier()
    step(model, optimizer, x, y)


def test_weights_that_are_changed_outside_the_optimizer_are_told_of_on_request(rank_pool):
    pool = rank_pool(2)
    words = "changed outside the optimizer between updates 3 and 4: head.bias"
    pool.run(writes_outside, init=True, env={"REIGEN_CHECK_REPLICAS": "1"})
    told = [pool.output(rank)[1].count(words) for rank in range(2)]
    assert sum(told) == 1, [pool.output(rank)[1] for rank in range(2)]  # by its owner
    pool.run(writes_outside, init=True)
    assert not any(words in pool.output(rank)[1] for rank in range(2))


def trains_in_a_set() -> None:
    """Two of three ranks share; the third has a plain optimizer of its own."""
    torch.set_num_threads(1)
    two = hvd.add_process_set([0, 2])
    models = []
    for share in (False, True):
        model = make_net()
        optimizer = wrapped(model, process_set=two, share_parameters=share)
        for x, y in batches(3):
            step(model, optimizer, x, y)
        models.append(model)
    assert_same_bits(models[1], models[0])
    assert bool(getattr(optimizer, "_shared", [])) is (hvd.rank() != 1)
    hvd.barrier()
    del optimizer
    gc.collect()
    hvd.remove_process_set(two)


def test_a_process_set(rank_pool):
    rank_pool(3).run(trains_in_a_set, init=True, env={"REIGEN_DYNAMIC_PROCESS_SETS": "1"})


# -- memory -----------------------------------------------------------------------------------------------------------


def gives_back() -> None:
    """When the optimizer is gone, every rank has weights of its own, and the memory is used again."""
    model, optimizer = both(steps=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    del optimizer
    gc.collect()
    hvd.barrier()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    with torch.no_grad():
        model.head.bias.fill_(hvd.rank())
    hvd.barrier()
    assert (model.head.bias == hvd.rank()).all()
    hvd.barrier()


def test_without_the_optimizer_weights_are_everybodys_own(rank_pool):
    rank_pool(2).run(gives_back, init=True)


def goes_on_in_another_job() -> None:
    torch.set_num_threads(1)
    model, optimizer = both(steps=2)
    for x, y in batches(2, seed=8):
        step(model, optimizer, x, y)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = both(steps=2)
    hvd.shutdown()
    hvd.init()
    for x, y in batches(2, seed=8):
        step(model, optimizer, x, y)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_shutdown_and_init(rank_pool):
    rank_pool(2).run(goes_on_in_another_job, init=True)
