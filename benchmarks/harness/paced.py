"""Models whose layers take a known time, for benchmarks where stand-in hosts share this machine's processors.

The gradients are computed for real. Each layer has a time, and what its arithmetic leaves of it is slept: behind its
part of forward, and before its part of backward. So a rank computes at the same pace however many ranks share a
processor, as long as these have time for all, and what differs between jobs is what communication adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reigen.errors import ArgumentError

BATCH = 4


@dataclass(frozen=True)
class PacedLayer:
    """One layer: what makes it, and seconds of its forward and of its backward part."""

    make: Callable[[], nn.Module]
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class PacedModel:
    """A model: its layers, and the shape and the largest value of a batch of whole numbers; 0: normal floats."""

    about: str
    layers: tuple[PacedLayer, ...]
    batch: tuple[int, ...]
    num_values: int = 0


def _linear(inputs: int, outputs: int, milliseconds: float) -> PacedLayer:
    """A fully connected layer; backward takes two thirds of its time."""
    return PacedLayer(lambda: nn.Linear(inputs, outputs), milliseconds / 3e3, milliseconds / 1.5e3)


MODELS = {
    # Much alike everywhere: 60 tensors.
    "deep": PacedModel(
        "30 layers of 192 x 192, 1.1 M parameters, 120 ms",
        tuple(_linear(192, 192, 4.0) for _ in range(30)),
        (BATCH, 192),
    ),
    # Like VGG: most time in small layers at the front, most bytes at the end, whose gradients come first.
    "classifier": PacedModel(
        "8 layers of 128 x 128, then 128 x 4096 and 4096 x 384, 2.2 M parameters, 150 ms",
        (*(_linear(128, 128, 17.0) for _ in range(8)), _linear(128, 4096, 7.0), _linear(4096, 384, 7.0)),
        (BATCH, 128),
    ),
    # Like a language model: a large table at the front, whose gradient comes last, when nothing is left to hide it.
    "embedding": PacedModel(
        "table of 8192 x 96, then 6 layers of 96 x 96, 0.8 M parameters, 60 ms",
        (
            PacedLayer(lambda: nn.EmbeddingBag(8192, 96), 0.002, 0.004),
            *(_linear(96, 96, 9.0) for _ in range(6)),
        ),
        (BATCH, 8),
        8192,
    ),
}


def paced_model(name: str) -> PacedModel:
    """The model of that name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in MODELS:
        raise ArgumentError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]


class _Clock:
    """The time at which what has been computed so far should have been computed, in seconds."""

    def __init__(self) -> None:
        self._due = 0.0

    def start(self) -> None:
        """A step begins now."""
        self._due = time.perf_counter()

    def spend(self, seconds: float) -> None:
        """Sleep for what is left of so many seconds since the time before was spent."""
        self._due += seconds
        time.sleep(max(0.0, self._due - time.perf_counter()))


class _Pace(torch.autograd.Function):
    """The identity, which takes a time forward and a time backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, clock: _Clock, layer: PacedLayer) -> torch.Tensor:
        ctx.clock, ctx.layer = clock, layer
        clock.spend(layer.forward_seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock.spend(ctx.layer.backward_seconds)
        return gradients[0], None, None


class PacedModule(nn.Module):
    """The layers, each followed by its pace: backward comes to the pace first, then to the layer's gradients."""

    def __init__(self, model: PacedModel) -> None:
        super().__init__()
        self._specs = model.layers
        self._clock = _Clock()
        self.layers = nn.ModuleList(layer.make() for layer in model.layers)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self._clock.start()
        for layer, spec in zip(self.layers, self._specs, strict=True):
            values = _Pace.apply(torch.tanh(layer(values)), self._clock, spec)  # type: ignore[no-untyped-call]
        return values


def make_batch(model: PacedModel, rank: int) -> torch.Tensor:
    """A rank's inputs: always the same, different from the other ranks'."""
    random = torch.Generator().manual_seed(21 + rank)
    if model.num_values:
        return torch.randint(model.num_values, model.batch, generator=random)
    return torch.randn(model.batch, generator=random)
