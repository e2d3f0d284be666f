"""Parameters that exist once a host, where one tensor stands for several: the bits of the same run without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import reigen.torch as hvd
from tests.torch.test_shared_parameters import OPTIMIZERS, assert_same_bits, assert_same_state

#: Outputs of the layers. 32 x 32 weights and 32 biases are whole vectors, and so may be joined; what has 5 is not.
WIDTHS = (32, 32, 32, 5, 32, 32, 32, 32, 32)
NAMES = ("SGD", "Adam", "AdamW", "Adagrad")


def made() -> torch.nn.Sequential:
    torch.manual_seed(3)
    inputs = (32, *WIDTHS[:-1])
    return torch.nn.Sequential(*(torch.nn.Linear(i, o) for i, o in zip(inputs, WIDTHS, strict=True)))


def wrapped(model: torch.nn.Sequential, name: str, *, share: bool) -> Any:
    """Two groups; what lies between their parameters in memory cannot be joined."""
    groups = [{"params": [*model[:6].parameters()], "lr": 0.02}, {"params": [*model[6:].parameters()]}]
    plain = getattr(torch.optim, name)(groups, **OPTIMIZERS[name])
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), share_parameters=share)
    optimizer.complete_sums_by(lambda _: False)  # without a job that survives deaths nobody asks
    return optimizer


def train(model: torch.nn.Sequential, optimizer: Any, steps: int, seed: int = 1) -> None:
    data = torch.Generator().manual_seed(10 * seed + hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=data)).square().mean().backward()
        optimizer.step()


def num_tensors(optimizer: Any) -> int:
    """How many this rank's optimizer updates."""
    return sum(len(group["params"]) for group in optimizer._inner.param_groups)


def trains(name: str) -> None:
    """A layer is frozen for a while, so that its steps are fewer; then states are loaded; then there is a new group."""
    torch.set_num_threads(1)
    models, optimizers, counts = [], [], []
    for share in (False, True):
        model = made()
        late = model[8]
        late.requires_grad_(requires_grad=False)
        optimizer = wrapped(model, name, share=share)
        for frozen in (None, model[1], None):
            if frozen is not None:
                frozen.requires_grad_(requires_grad=False)
            train(model, optimizer, 2)
            if share:
                counts.append((num_tensors(optimizer), len(optimizer._shared[0].own)))
            model[:8].requires_grad_(requires_grad=True)
        state = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 1, seed=2)
        optimizer.load_state_dict(state)
        train(model, optimizer, 2, seed=3)
        late.requires_grad_(requires_grad=True)
        train(model, optimizer, 2, seed=4)
        models.append(model)
        optimizers.append(optimizer)
    assert_same_bits(models[1], models[0])
    assert_same_state(optimizers[1], optimizers[0])
    assert all(tensors < pieces for tensors, pieces in counts)
    everyone = hvd.allgather_object(counts)
    first, frozen, after = (sum(each[moment][0] for each in everyone) for moment in range(3))
    assert first < frozen  # what has no gradient takes no step
    if name != "SGD":  # whose state has no steps
        assert first < after


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_the_same_run_without(rank_pool, name):
    rank_pool(2).run(trains, name, init=True)


class Signed(torch.optim.Optimizer):
    """Looks at shapes, as some classes do that leave out vectors when weights decay."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def vouches() -> None:
    model = made()
    optimizer = hvd.DistributedOptimizer(
        Signed(model.parameters()), model.named_parameters(), share_parameters=True, elementwise=True
    )
    train(model, optimizer, 2)
    assert num_tensors(optimizer) == len(optimizer._shared[0].own)


def test_a_class_that_is_not_torch_s_sees_its_parameters_one_by_one(rank_pool):
    rank_pool(2).run(vouches, init=True)
