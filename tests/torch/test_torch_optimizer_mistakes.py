"""What goes wrong around a DistributedOptimizer: everybody learns of it, and the next step works."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen.errors import ArgumentError, DeadlineError, StepOrderError
from tests.patience import patiently
from tests.torch.training import assert_identical_everywhere, assert_same, batches, make_net, mean_loss, mine


class Broken(torch.autograd.Function):
    """Hands a tensor on; its backward raises."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken backward")


class Chain(nn.Module):
    """Four layers; backward can be broken in front of any of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()

    def forward(self, x: torch.Tensor, broken_before: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == broken_before:
                x = Broken.apply(x)
            x = torch.tanh(layer(x))
        return x


def pair() -> tuple[Chain, torch.optim.Optimizer, Chain, torch.optim.Optimizer]:
    truth, model = Chain(), Chain()
    reference = torch.optim.SGD(truth.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return truth, reference, model, optimizer


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def breaks_everywhere() -> None:
    """In steps 0 (nothing is planned yet) and 2, backward breaks at another layer on each rank; nobody steps."""
    n, rank = hvd.size(), hvd.rank()
    truth, reference, model, optimizer = pair()
    for step in range(5):
        if step in (0, 2):
            with pytest.raises(RuntimeError, match="broken backward"):
                model(rows(rank, step), broken_before=1 + rank).sum().backward()
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.synchronize()
            optimizer.zero_grad()
            continue
        reference.zero_grad()
        sum(truth(rows(r, step)).sum() / n for r in range(n)).backward()
        reference.step()
        optimizer.zero_grad()
        model(rows(rank, step)).sum().backward()
        optimizer.step()
        assert_same(model, truth)
    assert_identical_everywhere(model)


def breaks_on_one_rank() -> None:
    """Rank 1 breaks in front of layer 2 and takes part with the gradients that it has, and zeros for the others."""
    n, rank = hvd.size(), hvd.rank()
    truth, reference, model, optimizer = pair()
    for step in range(4):
        breaks = step in (0, 2)
        reference.zero_grad()
        for r in range(n):
            if breaks and r == 1:
                with pytest.raises(RuntimeError):
                    (truth(rows(r, step), broken_before=2).sum() / n).backward()
            else:
                (truth(rows(r, step)).sum() / n).backward()
        reference.step()
        optimizer.zero_grad()
        if breaks and rank == 1:
            with pytest.raises(RuntimeError):
                model(rows(rank, step), broken_before=2).sum().backward()
        else:
            model(rows(rank, step)).sum().backward()
        optimizer.step()
        assert_same(model, truth)
    assert_identical_everywhere(model)


@pytest.mark.slow
@pytest.mark.parametrize("func", [breaks_everywhere, breaks_on_one_rank])
def test_an_exception_in_backward(rank_pool, func):
    rank_pool(2).run(func, init=True, env={"REIGEN_BUCKET_BYTES": "200"})


def stays_away() -> None:
    """Rank 1's backward breaks, and it turns to something else: both are told, at the deadline, who is missing."""
    rank = hvd.rank()
    model = Chain()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def step(broken_before: int) -> None:
        optimizer.zero_grad()
        model(rows(rank, 1), broken_before).sum().backward()
        optimizer.step()

    step(-1)
    before = copy.deepcopy(model.state_dict())
    if rank == 0:
        with pytest.raises(DeadlineError) as caught:
            step(-1)
        assert caught.value.ranks == (1,)
        assert any("layers.3.weight" in note for note in caught.value.__notes__)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    else:
        with pytest.raises(RuntimeError, match="broken backward"):
            step(2)
        with pytest.raises(DeadlineError) as missed:
            hvd.barrier()
        assert missed.value.ranks == (0,)
    hvd.allreduce(torch.ones(1), name="nobody leaves before both have been told")


@pytest.mark.slow
def test_a_rank_that_never_comes_back_from_backward_is_named(rank_pool):
    patiently(lambda seconds: rank_pool(2).run(stays_away, init=True, env={"REIGEN_DEADLINE": f"{seconds:g}"}), 2.0)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clamp(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5


def changes_too_early() -> None:
    """Gradients that are on their way are changed: an error before any parameter is, from the first step on."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        for change in (clip, clamp, replace):
            truth, model = make_net(), make_net()
            reference = torch.optim.SGD(truth.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
            )
            for step, (x, y) in enumerate(batches(4)):
                optimizer.zero_grad()
                mean_loss(model, mine(x), mine(y)).backward()
                if step % 2 == 0:
                    change(model)
                    with pytest.raises(StepOrderError, match=r"head\.bias.*synchronize"):
                        optimizer.step()
                    optimizer.synchronize()
                    continue
                optimizer.step()
                reference.zero_grad()
                mean_loss(truth, x, y).backward()
                reference.step()
                if compression is hvd.Compression.none:
                    assert_same(model, truth)
            assert_identical_everywhere(model)


def test_gradients_must_not_be_changed_while_they_are_on_their_way(rank_pool):
    rank_pool(2).run(changes_too_early, init=True)


def logs_the_norm() -> None:
    """Clipping where nothing is to be clipped multiplies by one: nobody's gradient changes, from the first step on."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        for passes, set_to_none in ((1, True), (1, False), (2, True)):
            truth, model = make_net(), make_net()
            reference = torch.optim.SGD(truth.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression, passes
            )
            for x, y in batches(4):
                optimizer.zero_grad(set_to_none=set_to_none)
                for _ in range(passes):
                    mean_loss(model, mine(x), mine(y)).backward()
                for foreach in (None, True, False):
                    assert nn.utils.clip_grad_norm_(model.parameters(), torch.inf, foreach=foreach) > 0
                for parameter in model.parameters():
                    parameter.grad *= 1
                    parameter.grad /= 1.0
                    assert type(parameter.grad.clone()) is type(parameter.grad + 1) is torch.Tensor
                optimizer.step()
                assert all(type(p.grad) is torch.Tensor for p in model.parameters())
                reference.zero_grad()
                (mean_loss(truth, x, y) * passes).backward()
                reference.step()
                if compression is hvd.Compression.none:
                    assert_same(model, truth)
            assert_identical_everywhere(model)


def test_a_norm_may_be_taken_at_any_time(rank_pool):
    rank_pool(2).run(logs_the_norm, init=True)


def sparse_minimum() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), op=hvd.Min)
    for _ in range(2):
        loss = embedding(torch.tensor([hvd.rank()])).sum() if hvd.rank() else embedding.weight.sum()
        loss.backward()  # dense on rank 0, sparse on the others: all of them get the error
        with pytest.raises(ArgumentError, match="op=Average or op=Sum, got MIN"):
            optimizer.step()
        optimizer.zero_grad()
    dense = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), op=hvd.Min, sparse_as_dense=True)
    del optimizer
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([hvd.rank(), 3])).sum().backward()
    dense.step()
    assert (before - embedding.weight.detach())[:, 0].tolist() == pytest.approx([0, 0, 0, 1])


def test_sparse_gradients_have_no_minimum(rank_pool):
    rank_pool(2).run(sparse_minimum, init=True)


def one_lot_differs() -> None:
    """Parameters that are added later differ between the ranks; those known before still work."""
    first, rank = nn.Parameter(torch.zeros(2)), hvd.rank()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
    first.sum().backward()
    optimizer.step()
    late = nn.Parameter(torch.zeros(2 + rank))
    optimizer.add_param_group({"params": [late]})
    for _ in range(2):
        optimizer.zero_grad()
        (first.sum() + late.sum()).backward()
        with pytest.raises(hvd.HorovodInternalError, match=r"\(2,\)[\s\S]*\(3,\)"):
            optimizer.step()
    assert first.tolist() == [-1.0, -1.0]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_a_failure_of_some_gradients_leaves_nothing_on_its_way(rank_pool):
    rank_pool(2).run(one_lot_differs, init=True)
