"""DistributedOptimizer trains as one process with the whole batch does."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen import context
from reigen.errors import ArgumentError
from tests.torch.training import (
    TOLERANCE,
    assert_identical_everywhere,
    assert_same,
    batches,
    make_net,
    mean_loss,
    mine,
    train,
    whole,
)

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "fused": True},
    "Adadelta": {"lr": 0.5, "foreach": True},
    "Adagrad": {"lr": 0.05},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"lr": 0.01, "centered": True},
    "Rprop": {},
    "LBFGS": {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"},
}


def trains_alike(name: str) -> None:
    cls, options = getattr(torch.optim, name), OPTIMIZERS[name]
    truth = make_net()
    train(truth, cls(truth.parameters(), **options), whole)
    model = make_net()
    optimizer = hvd.DistributedOptimizer(cls(model.parameters(), **options), model.named_parameters())
    assert isinstance(optimizer, cls)
    assert type(optimizer).__name__ == name
    train(model, optimizer, mine)
    assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(rank_pool, name):
    rank_pool(2).run(trains_alike, name, init=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_other_numbers_of_ranks(rank_pool, size, name):
    rank_pool(size).run(trains_alike, name, init=True)


def trains_with(set_to_none: bool, predivide: float, channels_last: bool) -> None:
    truth, model = make_net(), make_net()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        assert not model.conv.weight.is_contiguous()
    train(truth, torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9), whole)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), gradient_predivide_factor=predivide
    )
    train(model, optimizer, mine, set_to_none=set_to_none)
    assert_same(model, truth)
    assert_identical_everywhere(model)
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()
    model(torch.ones(1, 2, 4, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all((p.grad is None) if set_to_none else not p.grad.any() for p in model.parameters())
    hvd.barrier()  # whoever is first must not end the job: then gradients are dropped, and nothing is out of order


@pytest.mark.parametrize("bucket_bytes", ["64", "1000", "4194304"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_clearing_and_layouts_and_bucket_sizes(rank_pool, set_to_none, channels_last, bucket_bytes):
    env = {"REIGEN_BUCKET_BYTES": bucket_bytes}
    rank_pool(2).run(trains_with, set_to_none, 1.0 if set_to_none else 2.0, channels_last, init=True, env=env)


def bits_of_training(groups: int | None) -> list[bytes]:
    model = make_net().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=groups)
    for x, y in batches(3):
        optimizer.zero_grad()
        mean_loss(model, mine(x).float(), mine(y).float()).backward()
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_buckets(rank_pool):
    results = [
        rank_pool(3).run(bits_of_training, groups, init=True, env={"REIGEN_BUCKET_BYTES": size})
        for size, groups in (("64", None), ("777", None), ("9999999", None), ("777", 2))
    ]
    assert all(bits == results[0][0] for result in results for bits in result)


def gradients_are_views() -> None:
    model = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for x, y in batches(3):
        optimizer.zero_grad()
        mean_loss(model, mine(x), mine(y)).backward()
        optimizer.step()
        seen.append([p.grad.data_ptr() for p in model.parameters() if p.numel()])
    assert seen[0] == seen[1] == seen[2]  # always the same registered memory
    assert len(set(seen[0])) == len(seen[0])
    assert all(pointer % 64 == 0 for pointer in seen[0])
    assert all(p.grad.untyped_storage().nbytes() == p.numel() * 8 for p in model.parameters())  # copies stay small


def gives_gradients_other_memory() -> None:
    truth, model = make_net(), make_net()
    plain = torch.optim.SGD(truth.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    (reducer,) = optimizer._reducer.reducers
    for step, (x, y) in enumerate(batches(5)):
        for net, stepper, part in ((truth, plain, whole), (model, optimizer, mine)):
            stepper.zero_grad()
            mean_loss(net, part(x), part(y)).backward()
        if step > 0:
            for index, parameter in enumerate(reducer.parameters):
                assert parameter.grad.data_ptr() == reducer._places.tensors[index].data_ptr(), "it lies elsewhere"
        if step in (1, 2):
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data.clone()
        plain.step()
        optimizer.step()
    assert_same(model, truth)


def test_gradients_may_be_given_other_memory_before_the_step(rank_pool):
    """The sums are what counts; and the next pass's gradients lie in the buckets again."""
    rank_pool(2).run(gives_gradients_other_memory, init=True)


def test_gradients_stay_in_registered_memory(rank_pool):
    rank_pool(2).run(gradients_are_views, init=True)


def compressed() -> None:
    model = make_net()
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), compression=compression)
        for x, y in batches(3):
            optimizer.zero_grad()
            local = [g.to(dtype) for g in torch.autograd.grad(mean_loss(model, mine(x), mine(y)), model.parameters())]
            everyone = [torch.stack(hvd.allgather_object(g)).double() for g in local]
            mean_loss(model, mine(x), mine(y)).backward()
            optimizer.step()
            for parameter, gradients in zip(model.parameters(), everyone, strict=True):
                expected = (gradients.float().sum(0) / hvd.size()).to(dtype).double()
                assert parameter.grad.dtype == torch.float64
                assert torch.equal(parameter.grad, expected)


def test_compressed_gradients(rank_pool):
    rank_pool(2).run(compressed, init=True)


def mixed_types() -> None:
    rank, n = hvd.rank(), hvd.size()
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    parameters = [nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in dtypes * 2]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        sum((p * (rank + 1)).float().sum() for p in parameters).backward()
        optimizer.step()
    assert all(p.tolist() == [1.0 - n * (n + 1)] * 5 for p in parameters)


def test_mixed_element_types(rank_pool):
    rank_pool(2).run(mixed_types, init=True)


# -- gradients that do not come ---------------------------------------------------------------------------------------


def differs_by_rank() -> None:
    """Rank 0 alone uses `extra`, and only in odd steps; the truth averages with zeros."""
    n, rank = hvd.size(), hvd.rank()
    truth, model = make_net(), make_net()
    reference = torch.optim.SGD(truth.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step, (x, y) in enumerate(batches(5)):
        uses = [step % 2 == 1 and r == 0 for r in range(n)]
        reference.zero_grad()
        for r in range(n):
            xr, yr = x.tensor_split(n)[r], y.tensor_split(n)[r]
            ((truth(xr, uses[r]) - yr).square().mean() / n).backward()
        reference.step()
        optimizer.zero_grad()
        (model(mine(x), uses[rank]) - mine(y)).square().mean().backward()
        optimizer.step()
        assert model.extra.weight.grad is not None
        assert_same(model, truth)
    assert_identical_everywhere(model)


def test_models_that_run_differently_on_different_ranks(rank_pool):
    rank_pool(2).run(differs_by_rank, init=True)


def idle_rank() -> None:
    """Only rank 0 has a batch; the others take part with zeros."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for step in range(1, 4):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            (weight * hvd.size()).sum().backward()
        optimizer.step()
        assert weight.tolist() == [-float(step)] * 3


def test_a_rank_without_a_batch_takes_part_with_zeros(rank_pool):
    rank_pool(3).run(idle_rank, init=True)


def frozen_and_thawed() -> None:
    """`extra` is frozen at first, then trained, then frozen again; `late` is added after two steps."""
    truth, model = make_net(), make_net()
    late_truth, late = (nn.Parameter(torch.ones(12, dtype=torch.float64)) for _ in range(2))
    reference = torch.optim.SGD(truth.parameters(), lr=0.1, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    for step, (x, y) in enumerate(batches(8)):
        for net in (truth, model):
            net.extra.weight.requires_grad_(2 <= step < 5)
        if step == 3:
            reference.add_param_group({"params": [late_truth], "lr": 0.2})
            optimizer.add_param_group({"params": [late], "lr": 0.2})
        reference.zero_grad()
        (mean_loss(truth, x, y) + late_truth.square().sum()).backward()
        reference.step()
        optimizer.zero_grad()
        (mean_loss(model, mine(x), mine(y)) + late.square().sum()).backward()
        optimizer.step()
        assert_same(model, truth)
        torch.testing.assert_close(late, late_truth, **TOLERANCE)
    assert_identical_everywhere(model)


def test_parameters_frozen_thawed_and_added_later(rank_pool):
    rank_pool(2).run(frozen_and_thawed, init=True)


def groups_are_replaced(in_backward: bool, way: str) -> None:
    """The optimizer has one layer at first; then its groups are others, with layers that are thawed later."""
    truth, model = make_net(), make_net()
    optimizers: list[torch.optim.Optimizer] = []
    for net in (truth, model):
        net.requires_grad_(False)
        net.head.requires_grad_()
        optimizers.append(torch.optim.SGD(net.head.parameters(), lr=0.1))
    reference, optimizer = optimizers[0], hvd.DistributedOptimizer(optimizers[1], synchronize_in_backward=in_backward)
    for step, (x, y) in enumerate(batches(6)):
        if step == 2:
            for net, one in ((truth, reference), (model, optimizer)):
                groups = [*one.param_groups, {**one.param_groups[0], "params": [*net.shared.parameters()]}]
                if way == "setter":
                    one.param_groups = groups
                else:
                    one.__setstate__({"state": one.state, "param_groups": groups})
        if step == 3:
            truth.shared.requires_grad_()
            model.shared.requires_grad_()
        reference.zero_grad()
        mean_loss(truth, x, y).backward()
        reference.step()
        optimizer.zero_grad()
        mean_loss(model, mine(x), mine(y)).backward()
        optimizer.step()
        assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.parametrize("way", ["setter", "__setstate__"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_groups_that_are_replaced(rank_pool, in_backward, way):
    rank_pool(2).run(groups_are_replaced, in_backward, way, init=True)


def sparse(as_dense: bool) -> None:
    n = hvd.size()

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], scale: float) -> None:
        for step in range(4):
            optimizer.zero_grad()
            for rank in ranks:
                if step == 2 and rank == 0:
                    continue  # rank 0 has nothing to contribute this time
                words = torch.tensor([rank, 3, 3, step])
                (model[1](model[0](words)).square().sum() * scale).backward()
            optimizer.step()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)).double()

    truth, model = make(), make()
    run(truth, torch.optim.Adagrad(truth.parameters()), list(range(n)), 1 / n)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adagrad(model.parameters()), sparse_as_dense=as_dense)
    run(model, optimizer, [hvd.rank()], 1.0)
    assert model[0].weight.grad.is_sparse
    assert not model[1].weight.grad.is_sparse
    assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(rank_pool, as_dense):
    rank_pool(2).run(sparse, as_dense, init=True)


def sparse_adam(compression: str, as_dense: bool) -> None:
    """An optimizer that takes sparse gradients alone gets them also where they travelled as dense ones."""
    rank, n = hvd.rank(), hvd.size()

    def run(table: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], scale: float) -> None:
        for step in range(5):
            optimizer.zero_grad()
            for r in ranks:
                if step != 3 or r:  # rank 0 has nothing in step 3
                    (table(torch.tensor([r, 3, 3 + step])).sin().sum() * scale).backward()
            optimizer.step()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(9, 4, sparse=True)

    truth, table = make(), make()
    run(truth, torch.optim.SparseAdam(truth.parameters(), lr=0.1), list(range(n)), 1 / n)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, compression=getattr(hvd.Compression, compression), sparse_as_dense=as_dense
    )
    run(table, optimizer, [rank], 1.0)
    rounding = 1e-2 if compression == "fp16" else 1e-5
    torch.testing.assert_close(table.weight, truth.weight, rtol=rounding, atol=rounding)
    assert_identical_everywhere(table)


@pytest.mark.parametrize(("compression", "as_dense"), [("none", False), ("none", True), ("fp16", True)])
def test_sparse_adam(rank_pool, compression, as_dense):
    rank_pool(2).run(sparse_adam, compression, as_dense, init=True)


def private_names(op: int) -> None:
    """What programs that extend Horovod's optimizer use of it."""
    model = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=op)
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
    if op == hvd.Adasum:
        return
    weight = model.head.weight
    with pytest.raises(ArgumentError, match=r"head\.weight has no gradient"):
        optimizer._allreduce_grad_async(weight)
    weight.grad = torch.full_like(weight, hvd.rank() + 1.0)
    handle, context = optimizer._allreduce_grad_async(weight)
    output = hvd.Compression.none.decompress(hvd.synchronize(handle), context)
    expected = sum(range(1, hvd.size() + 1)) / (hvd.size() if op == hvd.Average else 1)
    assert torch.equal(output, torch.full_like(weight, expected))
    assert torch.equal(weight.grad, output)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Adasum])
def test_horovods_private_names(rank_pool, op):
    rank_pool(2).run(private_names, op, init=True)


def becomes_sparse() -> None:
    """Nobody saw a sparse gradient in the first step; in the second only rank 0 has one; in the third all have."""
    rank, n = hvd.rank(), hvd.size()
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(embedding.weight)
    other = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*embedding.parameters(), other], lr=1.0), op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        loss = other.sum()
        if step == 2 or (step == 1 and rank == 0):
            loss = loss + embedding(torch.tensor([1, 1])).sum()
        loss.backward()
        optimizer.step()
    assert embedding.weight.tolist() == [[0, 0], [-2 - 2 * n, -2 - 2 * n], [0, 0], [0, 0]]
    assert other.item() == 1 - 3 * n


def test_a_gradient_that_becomes_sparse_later_is_made_dense(rank_pool):
    rank_pool(2).run(becomes_sparse, init=True)


# -- accumulation, operators ------------------------------------------------------------------------------------------


def accumulates() -> None:
    """Two backward passes a step: gradients are added up locally, and reduced once."""
    truth, model = make_net(), make_net()
    reference = torch.optim.SGD(truth.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), backward_passes_per_step=2
    )
    stream = list(batches(9))
    for step in range(4):
        passes = 2 if step < 3 else 3
        if step == 3:
            optimizer.set_backward_passes_per_step(3)
            assert optimizer.backward_passes_per_step == 3
        parts = stream[2 * step : 2 * step + passes]
        reference.zero_grad()
        optimizer.zero_grad()
        for x, y in parts:
            mean_loss(truth, x, y).backward()
            mean_loss(model, mine(x), mine(y)).backward()
        reference.step()
        optimizer.step()
        assert_same(model, truth)
    optimizer.zero_grad()
    mean_loss(model, *map(mine, stream[0])).backward()  # a step after fewer passes than declared
    optimizer.step()
    reference.zero_grad()
    mean_loss(truth, *stream[0]).backward()
    reference.step()
    assert_same(model, truth)
    assert_identical_everywhere(model)


def test_gradients_accumulate_over_passes(rank_pool):
    rank_pool(2).run(accumulates, init=True)


def too_many_passes() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    for _ in range(2):  # in the first pass, which only learns, and in a later one
        loss = (weight * 2).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            loss.backward()
        with pytest.raises(AssertionError):
            optimizer.set_backward_passes_per_step(2)
        with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.synchronize()  # what was added while the sum was under way is undefined: no step with it
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    loss = weight.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * 4 * before)


def test_more_passes_than_declared_are_an_error_in_backward(rank_pool):
    rank_pool(2).run(too_many_passes, init=True)


def two_optimizers() -> None:
    """Two models with an optimizer each; the ranks' backward passes come in different order."""
    truths, models = [make_net(0), make_net(7)], [make_net(0), make_net(7)]
    references = [torch.optim.SGD(net.parameters(), lr=0.1) for net in truths]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in models]
    for x, y in batches(4):
        for optimizer in (*references, *optimizers):
            optimizer.zero_grad()
        for net in truths:
            mean_loss(net, x, y).backward()
        for net in models if hvd.rank() == 0 else reversed(models):
            mean_loss(net, mine(x), mine(y)).backward()
        for optimizer in (*references, *optimizers):
            optimizer.step()
        for model, truth in zip(models, truths, strict=True):
            assert_same(model, truth)


def test_two_optimizers_at_once(rank_pool):
    rank_pool(2).run(two_optimizers, init=True)


def twice_in_a_group() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate"):
        plain = torch.optim.SGD([weight, weight], lr=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * 2.0 * hvd.rank()).sum().backward()
        optimizer.step()
    assert weight.tolist() == [-1.0, -1.0]  # 1 - 2 steps * 2 updates each * 0.5 * mean gradient 1


def test_a_parameter_that_is_given_twice(rank_pool):
    rank_pool(2).run(twice_in_a_group, init=True)


def other_operators() -> None:
    rank, n = hvd.rank(), hvd.size()
    expected = {
        hvd.Sum: n * (n + 1) / 2,
        hvd.Min: 1,
        hvd.Max: n,
        hvd.Average: (n + 1) / 2,
        hvd.Product: 2 if n == 2 else 6,
    }
    for op, gradient in expected.items():
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
        for step in (1, 2):
            optimizer.zero_grad()
            (weight * (rank + 1)).sum().backward()
            optimizer.step()
            assert weight.tolist() == [-step * gradient] * 2


def test_operators(rank_pool):
    rank_pool(3).run(other_operators, init=True)


# -- life and death ---------------------------------------------------------------------------------------------------


def memory_is_given_back() -> None:
    model = make_net()
    offsets = set()
    for _ in range(4):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, mine, steps=2)
        region = optimizer._reducer.reducers[0]._memory._region
        offsets.add(region.offset)
        alive = weakref.ref(optimizer)
        gradients = [p.grad.clone() for p in model.parameters()]
        del optimizer, scheduler
        gc.collect()
        assert alive() is None
        start = region.array.ctypes.data
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)  # still there, in memory of its own
            assert not parameter.numel() or not start <= parameter.grad.data_ptr() < start + region.nbytes
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        hvd.barrier()
    assert len(offsets) < 4  # the same memory is used again


def test_buckets_are_freed_with_the_optimizer(rank_pool):
    rank_pool(2).run(memory_is_given_back, init=True, check_leaks=True)


def made_anew() -> None:
    """The optimizer of the first phase lives on in a reference cycle, on rank 0 alone, while the second one is used."""
    truth, model = make_net(), make_net()
    gc.disable()
    try:
        for phase in range(3):
            reference = torch.optim.SGD(truth.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            optimizer.cycle = optimizer if hvd.rank() == 0 else None
            if phase == 1:  # it was never used
                continue
            train(truth, reference, whole)
            train(model, optimizer, mine)
            assert_same(model, truth)
    finally:
        gc.enable()
    assert_identical_everywhere(model)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def freed_in_a_step() -> None:
    """The optimizer before is collected on rank 0 while the gradients of the second one are reduced."""
    truth, model = make_net(), make_net()
    gc.disable()
    try:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.cycle = optimizer
        reference = torch.optim.SGD(truth.parameters(), lr=0.1)
        train(truth, reference, whole)
        train(model, optimizer, mine)
        before = weakref.ref(optimizer)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x, y) in enumerate(batches(3)):
            for net, stepper, part in ((truth, reference, whole), (model, optimizer, mine)):
                stepper.zero_grad()
                mean_loss(net, part(x), part(y)).backward()
            if number == 1 and hvd.rank() == 0:
                assert before() is not None
                gc.collect()
                assert before() is None
            reference.step()
            optimizer.step()
        assert_same(model, truth)
    finally:
        gc.enable()


def test_an_optimizer_that_is_freed_leaves_the_gradients_of_the_next_one_alone(rank_pool):
    rank_pool(2).run(freed_in_a_step, init=True)


def test_an_optimizer_made_anew_takes_over_from_the_one_before(rank_pool):
    rank_pool(2).run(made_anew, init=True)


def lives_on_after_init() -> None:
    truth, model = make_net(), make_net()
    reference = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for x, y in batches(3):
        if not hvd.is_initialized():
            assert all(p.grad.isfinite().all() for p in model.parameters())  # gradients outlive the job
            with pytest.raises(ValueError, match="init"):
                optimizer.step()
            hvd.init()
        train_step(model, optimizer, mine(x), mine(y))
        train_step(truth, reference, x, y)
        assert_same(model, truth)
        hvd.shutdown()
    if optimizer._reducer.reducers:
        with pytest.raises(ValueError, match="init"):
            mean_loss(model, *next(batches(1))).backward()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        mean_loss(model, x, y).backward()
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_goes_on_after_shutdown_and_init(rank_pool, size):
    rank_pool(size).run(lives_on_after_init)


def copies() -> None:
    model = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train(model, optimizer, mine, steps=2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.Adam
        assert str(other.state_dict()) == str(optimizer.state_dict())


def test_copies_are_plain_optimizers(rank_pool):
    rank_pool(2).run(copies, init=True)


def alone() -> None:
    model = make_net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    train(model, optimizer, mine)
    assert context.current().size == 1


def test_one_rank_hooks_nothing(rank_pool):
    rank_pool(1).run(alone, init=True)
