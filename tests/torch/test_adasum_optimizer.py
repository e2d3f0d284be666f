"""DistributedOptimizer(op=Adasum) does what the definition says, worked out in one process for all ranks."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen.testing.reference import expected_adasum
from tests.torch.training import assert_identical_everywhere, assert_same, batches, make_net, mean_loss, mine

pytestmark = pytest.mark.slow  # many real processes

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "foreach": True}),
    "Adam": ("Adam", {"lr": 0.01, "foreach": True}),
    "fused": ("AdamW", {"lr": 0.01, "fused": True}),
}
Losses = Callable[[nn.Module, int, int], list[torch.Tensor]]


def losses(model: nn.Module, rank: int, step: int, passes: int = 1) -> list[torch.Tensor]:
    """What rank ``rank`` runs backward on before a step: on odd ranks the model skips a layer now and then."""
    x, y = list(batches(4))[step]
    own = [tensor.tensor_split(hvd.size())[rank].tensor_split(passes) for tensor in (x, y)]
    return [(model(a, use_extra=step % 2 == 0 or rank % 2 == 0) - b).square().mean() for a, b in zip(*own, strict=True)]


def simulated(make: Callable[[nn.Module], torch.optim.Optimizer], passes: int = 1) -> nn.Module:
    """All ranks in this process: each with a copy of the model and an optimizer of its own."""
    models = [make_net() for _ in range(hvd.size())]
    optimizers = [make(model) for model in models]
    for step in range(4):
        start = [p.detach().clone() for p in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for loss in losses(model, rank, step, passes):
                loss.backward()
            optimizer.step()
        for number, columns in enumerate(zip(*[model.parameters() for model in models], strict=True)):
            deltas = [(p.detach() - start[number]).flatten().numpy() for p in columns]
            combined = torch.from_numpy(expected_adasum(deltas)).view(start[number].shape)
            for parameter in columns:
                parameter.data.copy_(start[number] + combined)
    return models[0]


def trains_as_defined(name: str, passes: int, channels_last: bool) -> None:
    cls, options = getattr(torch.optim, OPTIMIZERS[name][0]), OPTIMIZERS[name][1]
    truth = simulated(lambda net: cls(net.parameters(), **options), passes)
    model = make_net()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(
        cls(model.parameters(), **options), model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
    )
    assert isinstance(optimizer, cls)
    assert type(optimizer).__name__ == cls.__name__
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in range(4):
        optimizer.zero_grad()
        for loss in losses(model, hvd.rank(), step, passes):
            loss.backward()
        optimizer.synchronize()  # does nothing
        optimizer.step()
        scheduler.step()
    assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks(rank_pool, name):
    rank_pool(2).run(trains_as_defined, name, 2 if name == "momentum" else 1, name == "Adam", init=True)


def trains_with_several() -> None:
    for name in ("SGD", "momentum", "Adam"):
        trains_as_defined(name, 1, channels_last=False)


@pytest.mark.slow
def test_four_ranks(rank_pool):
    rank_pool(4).run(trains_with_several, init=True)


def the_same_everywhere() -> None:
    """Where all ranks have the same data, they train as one: the mean of equal deltas."""
    truth, model = make_net(), make_net()
    plain = torch.optim.Adam(truth.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), op=hvd.Adasum)
    for x, y in batches(3):
        for net, each in ((truth, plain), (model, optimizer)):
            each.zero_grad()
            mean_loss(net, x, y).backward()
            each.step()
    assert_same(model, truth)


def closures() -> None:
    """step(closure): the loss is the rank's own, and LBFGS may call it as often as it likes."""
    for make in (
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        lambda net: torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3),
    ):
        model = make_net()
        optimizer = hvd.DistributedOptimizer(make(model), op=hvd.Adasum)
        for x, y in batches(2):
            called = []

            def closure(x=x, y=y, model=model, optimizer=optimizer, called=called) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mean_loss(model, mine(x), mine(y))
                loss.backward()
                called.append(loss.item())
                return loss

            assert optimizer.step(closure).item() == called[0]
        assert_identical_everywhere(model)


def wrong_order() -> None:
    model = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    x, y = next(batches(1))
    with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass
    mean_loss(model, x, y).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="between backward"):
        optimizer.set_backward_passes_per_step(2)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        mean_loss(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    for _ in range(2):
        mean_loss(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters())
    assert_identical_everywhere(model)


def refusals() -> None:
    net = make_net()
    some = torch.optim.SGD(net.parameters(), lr=0.1)

    def wrap(**options: object) -> None:
        hvd.DistributedOptimizer(some, op=hvd.Adasum, **options)

    with pytest.raises(ValueError, match="predivide"):
        wrap(gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="backward_passes"):
        wrap(backward_passes_per_step=0)
    with pytest.raises(ValueError, match="compression"):
        wrap(compression="fp16")
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(some, op=hvd.Adasum), op=hvd.Adasum)
    complex_ = torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=torch.complex64))], lr=0.1)
    with pytest.raises(ValueError, match="complex64"):
        hvd.DistributedOptimizer(complex_, op=hvd.Adasum)
    hvd.barrier()


def in_a_set() -> None:
    some = torch.optim.SGD(make_net().parameters(), lr=0.1)
    pair = hvd.add_process_set([0, 1])
    with pytest.raises(NotImplementedError, match="all ranks"):
        hvd.DistributedOptimizer(some, op=hvd.Adasum, process_set=pair)
    with pytest.raises(NotImplementedError, match="not 3"):
        hvd.DistributedOptimizer(some, op=hvd.Adasum)


def sparse() -> None:
    """A sparse gradient is the optimizer's affair: a delta is dense."""
    for options, sparse_as_dense in (({"lr": 0.1}, False), ({"lr": 0.1, "momentum": 0.5}, True)):
        tables = [nn.Embedding(7, 3, sparse=True).double() for _ in range(3)]
        for table in tables:
            nn.init.constant_(table.weight, 0.5)
        rows = [torch.tensor([1, 2, 2]), torch.tensor([2, 5])]
        start = tables[0].weight.detach().clone()
        for rank in range(2):
            plain = torch.optim.SGD(tables[rank].parameters(), lr=options["lr"])
            (tables[rank](rows[rank]) ** 2).sum().backward()
            plain.step()
        deltas = [(table.weight.detach() - start).flatten().numpy() for table in tables[:2]]
        truth = start + torch.from_numpy(expected_adasum(deltas)).view(7, 3)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(tables[2].parameters(), **options), op=hvd.Adasum, sparse_as_dense=sparse_as_dense
        )
        (tables[2](rows[hvd.rank()]) ** 2).sum().backward()
        optimizer.step()
        torch.testing.assert_close(tables[2].weight.detach(), truth)


def compressed() -> None:
    weight = nn.Parameter(torch.full((5,), 100.0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum, compression=hvd.Compression.bf16
    )
    weight.grad = torch.full((5,), -1.0 - 2**-10)  # bfloat16 makes 1 of it
    optimizer.step()
    assert weight.dtype is torch.float32
    assert weight.tolist() == [101.0] * 5


def new_parameters() -> None:
    """Added groups, and parameters that become trainable, take part from then on; frozen ones do no harm."""
    torch.manual_seed(0)
    first, second, third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
    second.requires_grad_(False)
    model = nn.Sequential(first, second, third)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1), op=hvd.Adasum
    )
    for step in range(4):
        if step == 1:
            second.requires_grad_(True)
        if step == 2:
            optimizer.add_param_group({"params": list(third.parameters()), "lr": 0.01})
            first.requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(hvd.rank()))).sum().backward()
        optimizer.step()
        third.zero_grad() if step < 2 else None
        optimizer.zero_grad()
        assert_identical_everywhere(model)
        moved = [not torch.equal(before[f"{n}.weight"], model.state_dict()[f"{n}.weight"]) for n in range(3)]
        assert moved == [step < 2, step >= 1, step >= 2]


def copies_and_ends() -> None:
    model = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), op=hvd.Adasum)
    for x, y in batches(2):
        optimizer.zero_grad()
        mean_loss(model, mine(x), mine(y)).backward()
        optimizer.step()
    optimizer.zero_grad()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.SGD
        assert copied.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.shutdown()
    hvd.init()
    x, y = next(batches(1))
    mean_loss(model, mine(x), mine(y)).backward()
    optimizer.step()  # in the new job
    assert_identical_everywhere(model)
    del optimizer, copied
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def overflow() -> None:
    """GradScaler: one rank's infinity skips the step everywhere, and all scales stay the same."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for bad, scale, value in ((False, 4.0, 0.5), (True, 2.0, 0.5), (False, 2.0, 0.0)):
        optimizer.zero_grad()
        factor = torch.inf if bad and hvd.rank() == 1 else 1.0
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert weight.tolist() == [value] * 3


def diverged() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("the weight", weight)], op=hvd.Adasum)
    optimizer.step()
    weight.data += hvd.rank()
    with pytest.raises(RuntimeError, match="the weight"):
        optimizer.step()


def mismatch() -> None:
    """The ranks wrap different models: all are told, nothing is changed, and the job goes on."""
    weight = nn.Parameter(torch.ones(3 + hvd.rank()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    weight.sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="shapes"):
        optimizer.step()
    assert weight.tolist() == [1.0] * (3 + hvd.rank())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


def everything_else() -> None:
    the_same_everywhere()
    closures()
    wrong_order()
    refusals()
    sparse()
    compressed()
    new_parameters()
    overflow()
    mismatch()
    copies_and_ends()


def test_everything_else(rank_pool):
    rank_pool(2).run(everything_else, init=True)


def test_replicas_are_checked(rank_pool):
    rank_pool(2).run(diverged, init=True, env={"REIGEN_CHECK_REPLICAS": "2"})


@pytest.mark.slow
def test_what_it_is_not_for(rank_pool):
    rank_pool(3).run(in_a_set, init=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def alone() -> None:
    """With one rank it is the plain optimizer, with all methods of the usual one."""
    model, truth = make_net(), make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1)
    for x, y in batches(2):
        for net, each in ((model, optimizer), (truth, plain)):
            each.zero_grad()
            mean_loss(net, x, y).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
    assert_same(model, truth)


def test_alone(rank_pool):
    rank_pool(1).run(alone, init=True)
