"""Models and data that the optimizer's tests share, and the independent truth: one process, the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

import reigen.torch as hvd

#: Everything is float64: what is equal up to the order of sums is equal to twelve digits.
TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}
ROWS = 12  # divisible by 1, 2, 3 and 4 ranks


class Net(nn.Module):
    """A convolution, a shared layer, a layer that may be skipped, parameters of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.shared = nn.Linear(12, 12)
        self.extra = nn.Linear(12, 12, bias=False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.conv(x)).flatten(1)))
        hidden = torch.tanh(self.shared(hidden))
        if use_extra:
            hidden = torch.tanh(self.extra(hidden))
        return self.head(hidden) + self.nothing.sum()


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batches(steps: int, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(ROWS, 2, 4, 4, dtype=torch.float64, generator=generator)
        yield x, torch.randn(ROWS, 2, dtype=torch.float64, generator=generator)


def mine(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return x.tensor_split(hvd.size())[hvd.rank()]


def mean_loss(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def train(
    model: Net,
    optimizer: torch.optim.Optimizer,
    part: Callable[[torch.Tensor], torch.Tensor],
    steps: int = 4,
    set_to_none: bool = True,
) -> None:
    """An ordinary loop; with a closure where the optimizer needs one."""
    for x, y in batches(steps):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = mean_loss(model, part(x), part(y))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def whole(x: torch.Tensor) -> torch.Tensor:
    """All rows: what the one process of the truth trains on."""
    return x


def assert_same(model: nn.Module, truth: nn.Module) -> None:
    for (name, value), other in zip(model.state_dict().items(), truth.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def assert_identical_everywhere(model: nn.Module) -> None:
    """Bit for bit, on all ranks."""
    bits = [value.detach().contiguous().numpy().tobytes() for value in model.state_dict().values()]
    everyone = hvd.allgather_object(bits)
    assert all(other == everyone[0] for other in everyone)
