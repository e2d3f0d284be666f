"""The models of `reigen bench train-step` for frameworks other than PyTorch: layers, first weights and data, in NumPy.

Shapes and the ranges of the first weights are those of `benchmarks.harness.models`. Images have their channels last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.work import Case, WrongResultError
from reigen.errors import ArgumentError

Array = NDArray[np.float32]
_SEED = 20
MOMENTUM = 0.9


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        kind: ``dense``, ``conv``, ``relu``, ``pool`` (2 x 2, the largest) or ``flatten``.
        kernel: shape of the kernel: inputs x outputs, or height x width x inputs x outputs; empty: no weights.
        is_normal: the kernel is drawn from a normal distribution that keeps the scale of signals behind a ReLU.
    """

    kind: str
    kernel: tuple[int, ...] = ()
    is_normal: bool = False


@dataclass(frozen=True)
class Design:
    """A model, one batch for it, and its loss.

    Attributes:
        layers: from the input to the output.
        batch: shape of one rank's inputs, float32.
        num_classes: 0: the targets are float32 like the outputs, the loss is the mean of squares; else class numbers.
        learning_rate: for SGD with momentum.
    """

    layers: tuple[Layer, ...]
    batch: tuple[int, ...]
    num_classes: int
    learning_rate: float


def _dense_stack(widths: Sequence[int], *, is_normal: bool = False) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [Layer("dense", (inputs, outputs), is_normal), Layer("relu")]
    return tuple(layers[:-1])


_CNN = (
    *(Layer("conv", (3, 3, 1, 32)), Layer("relu"), Layer("conv", (3, 3, 32, 64)), Layer("relu")),
    *(Layer("pool"), Layer("flatten"), *_dense_stack((64 * 12 * 12, 128, 10))),
)

DESIGNS = {
    "mlp": Design(_dense_stack((1024, 4096, 4096, 1024)), (32, 1024), 0, 0.05),
    "deep": Design(_dense_stack((256,) * 81, is_normal=True), (64, 256), 0, 0.001),
    "cnn": Design(_CNN, (32, 28, 28, 1), 10, 0.01),
}


def design_of(case: Case) -> Design:
    """The model of a case that is called ``MODEL/VARIANT``.

    Raises:
        ArgumentError: there is no such model.
    """
    design = DESIGNS.get(case.name.partition("/")[0])
    if design is None:
        raise ArgumentError(f"there is no model {case.name!r}; there are {', '.join(DESIGNS)}")
    return design


def first_weights(design: Design) -> list[Array]:
    """Kernel and bias of every layer that has them, in order; the same on every rank."""
    random = np.random.default_rng(_SEED)
    weights: list[Array] = []
    for layer in design.layers:
        if layer.kernel:
            fan_in = prod(layer.kernel[:-1])
            limit = 1 / sqrt(fan_in)
            if layer.is_normal:
                kernel = random.normal(0.0, sqrt(2 / fan_in), layer.kernel)
            else:
                kernel = random.uniform(-limit, limit, layer.kernel)
            weights += [kernel.astype(np.float32), random.uniform(-limit, limit, layer.kernel[-1:]).astype(np.float32)]
    return weights


def batch_of(design: Design, rank: int) -> tuple[Array, NDArray[Any]]:
    """Inputs and targets of a rank: always the same, different from the other ranks'."""
    random = np.random.default_rng(_SEED + 1 + rank)
    inputs = random.standard_normal(design.batch, np.float32)
    if design.num_classes:
        return inputs, random.integers(design.num_classes, size=design.batch[0], dtype=np.int32)
    outputs = next(layer.kernel[-1] for layer in reversed(design.layers) if layer.kernel)
    return inputs, random.standard_normal((design.batch[0], outputs), np.float32)


def save_weights(case: Case, rank: int, first: Sequence[Array], now: Sequence[NDArray[Any]]) -> None:
    """Write a rank's weights before and after the warm-up where the case says (see `Case.save`).

    Raises:
        WrongResultError: they are not finite, or have not changed.
    """
    before, after = (np.concatenate([np.ravel(array) for array in arrays]) for arrays in (first, now))
    if not np.isfinite(after).all():
        raise WrongResultError("the weights are not finite")
    if np.array_equal(before, after):
        raise WrongResultError("the weights have not changed")
    if case.save:
        np.savez(f"{case.save}.{rank}.npz", initial=before, weights=after)
