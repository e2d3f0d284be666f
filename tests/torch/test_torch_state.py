"""Starting from the same state: parameters, optimizer state, objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen.errors import MismatchError
from tests.torch.training import batches, make_net, mean_loss

OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


def parameters_everywhere(root: int) -> None:
    for as_list in (False, True):
        model = make_net(seed=hvd.rank()).to(memory_format=torch.channels_last)
        expected = make_net(seed=root).state_dict()
        state = model.state_dict()
        hvd.broadcast_parameters(list(model.named_parameters()) if as_list else state, root)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    tensors = [torch.tensor([float(hvd.rank())]), torch.tensor(hvd.rank())]
    hvd.broadcast_parameters(tensors, root_rank=root)
    assert [t.item() for t in tensors] == [root, root]
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(4, 3))
    hvd.broadcast_parameters(norm.state_dict(), root)
    means = hvd.allgather_object(norm.running_mean.tolist())
    assert all(mean == means[root] for mean in means)
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(model.named_parameters(), root)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast_parameters({}, hvd.size())
    with pytest.raises(ValueError, match="needed"):
        hvd.broadcast_parameters({"extra": "text"}, root)


@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 1), (3, 0)])
def test_broadcast_parameters(rank_pool, size, root):
    rank_pool(size).run(parameters_everywhere, root, init=True)


def optimizer_state(name: str, wrapped: bool, everyone_has_state: bool) -> None:
    """The root has trained; the others have not, or differently."""
    root = hvd.size() - 1
    model = make_net()
    groups = [
        {"params": list(model.conv.parameters()), "lr": 0.01 * (hvd.rank() + 1)},
        {"params": [*model.shared.parameters(), *model.head.parameters()]},
    ]
    optimizer = getattr(torch.optim, name)(groups, lr=0.1 + hvd.rank())
    if hvd.rank() == root or everyone_has_state:
        for x, y in batches(2, seed=hvd.rank()):
            optimizer.zero_grad()
            mean_loss(model, x, y).backward()
            optimizer.step()
        optimizer.param_groups[1]["initial_lr"] = 0.5 + hvd.rank()
    parameters_before = [p.detach().clone() for p in model.parameters()]
    state_before = str(optimizer.state_dict())
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    if hvd.rank() == root:
        assert str(optimizer.state_dict()) == state_before
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters_before, strict=True))
    states = hvd.allgather_object(optimizer.state_dict())
    for state in states:
        assert state["param_groups"] == states[root]["param_groups"]
        torch.testing.assert_close(state["state"], states[root]["state"], rtol=0, atol=0)
    optimizer.param_groups[0]["lr"] = 0.25  # still this optimizer's own groups, and a working optimizer
    optimizer.zero_grad()
    mean_loss(model, *next(batches(1))).backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state_when_only_the_root_has_any(rank_pool, name):
    rank_pool(2).run(optimizer_state, name, False, False, init=True)


@pytest.mark.parametrize("wrapped", [False, True])
def test_broadcast_optimizer_state_over_other_state(rank_pool, wrapped):
    rank_pool(2).run(optimizer_state, "Adam", wrapped, True, init=True)


def unusual_state() -> None:
    """What load_state_dict() would change: a tensor learning rate, float32 state of bfloat16 weights."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5 + hvd.rank(), dtype=torch.float64), capturable=False)
    if hvd.rank() == 0:
        buffer = torch.tensor([1.0, 2.0, 1 + 2**-20])
        optimizer.state[weight] = {"buffer": buffer, "same": [buffer], "note": ("text", None, 3)}
    hvd.broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state[weight]
    assert state["buffer"].dtype == torch.float32
    assert state["buffer"].tolist() == [1.0, 2.0, 1 + 2**-20]
    assert state["same"][0] is state["buffer"]
    assert state["note"] == ("text", None, 3)
    assert optimizer.param_groups[0]["lr"].item() == 0.5
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([weight]), 0)
    groups = [nn.Parameter(torch.ones(1 + hvd.rank()))]
    with pytest.raises(MismatchError, match=r"rank 0: group 0.*\(1,\)[\s\S]*rank 1: group 0.*\(2,\)"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(groups), 0)


def test_state_arrives_as_it_is(rank_pool):
    rank_pool(2).run(unusual_state, init=True)


def no_state() -> None:
    frozen, bare, ready = (nn.Parameter(torch.ones(2), requires_grad=number > 0) for number in range(3))
    ready.grad = torch.full((2,), 3.0)
    optimizer = torch.optim.SGD([frozen, bare, ready], lr=0.1, weight_decay=1.0, momentum=0.9)
    hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer), 0)
    assert frozen.grad is None
    assert (bare.grad.tolist(), ready.grad.tolist()) == ([0.0, 0.0], [3.0, 3.0])
    assert bare.tolist() == [1.0, 1.0]
    sparse = nn.Parameter(torch.ones(2))
    hvd.broadcast_optimizer_state(torch.optim.SparseAdam([sparse]), 0)
    assert sparse.grad is None


def test_without_state_there_are_gradients_of_zeros(rank_pool):
    rank_pool(2).run(no_state, init=True)


def objects() -> None:
    rank, n = hvd.rank(), hvd.size()
    mine = {"rank": rank, "payload": list(range(10 ** (rank + 1))), "function": lambda x: x + rank}
    received = hvd.broadcast_object(mine if rank == n - 1 else None, root_rank=n - 1, name="thing")
    assert received["rank"] == n - 1
    assert received["payload"] == list(range(10**n))
    assert received["function"](1) == n
    assert (received is mine) == (rank == n - 1)
    assert hvd.broadcast_object(None) is None
    everyone = hvd.allgather_object(mine)
    assert [(other["rank"], len(other["payload"])) for other in everyone] == [(r, 10 ** (r + 1)) for r in range(n)]
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast_object(1, root_rank=-1)


@pytest.mark.parametrize("size", [1, 3])
def test_objects(rank_pool, size):
    rank_pool(size).run(objects, init=True)
