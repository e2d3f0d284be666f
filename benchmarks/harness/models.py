"""Models that are trained in `reigen bench train-step`, and a training step that every mode shares.

Each mode only decides what is wrapped: the model (DDP), the optimizer (Reigen), or nothing (one rank alone).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from benchmarks.harness.work import Case, WrongResultError
from reigen.errors import ArgumentError

_SEED = 20


@dataclass(frozen=True)
class Recipe:
    """How to make a model, one batch for it, and its loss.

    Attributes:
        about: what the model is, in words.
        make: makes the model; the same for the same seed.
        batch: shape of one rank's inputs, float32.
        num_classes: 0: the targets are float32 like the outputs; else they are class numbers.
        learning_rate: for SGD with momentum 0.9; Adam has its own, which suits all.
    """

    about: str
    make: Callable[[], nn.Module]
    batch: tuple[int, ...]
    num_classes: int
    learning_rate: float


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))


def _deep() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(80):
        linear = nn.Linear(256, 256)
        # The default would let signals vanish on the way through 80 layers, and arithmetic on denormals is slow.
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _stack() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(24):
        linear = nn.Linear(1024, 1024)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _tiny() -> nn.Module:
    return nn.Linear(8, 8)


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


RECIPES = {
    "mlp": Recipe("wide MLP, 25 M parameters, batch 32", _mlp, (32, 1024), 0, 0.05),
    "deep": Recipe("80 layers of 256 x 256, batch 64", _deep, (64, 256), 0, 0.001),
    # Much to compute and much to send, in many tensors of one size: for overlapping the two on a slow network.
    "stack": Recipe("24 layers of 1024 x 1024, 25 M parameters, batch 1536", _stack, (1536, 1024), 0, 0.001),
    "tiny": Recipe("8 x 8: a step that loads all code and needs no memory", _tiny, (8, 8), 0, 0.01),
    "cnn": Recipe("2 convolutions, 1.2 M parameters, 28 x 28 images, batch 32", _cnn, (32, 1, 28, 28), 10, 0.01),
}


_ADAM_LEARNING_RATE = 1e-4


def recipe_of(case: Case) -> Recipe:
    """The recipe of a case's model.

    Raises:
        ArgumentError: there is no such model.
    """
    recipe = RECIPES.get(case.name.partition("/")[0].partition("+")[0])
    if recipe is None:
        raise ArgumentError(f"there is no model {case.name!r}; there are {', '.join(RECIPES)}")
    return recipe


def variant_of(case: Case) -> str:
    """What a case's name says behind the model and the optimizer: ``MODEL[+OPTIMIZER]/VARIANT``.

    Example:
        >>> variant_of(Case("mlp+adam/view"))
        'view'
    """
    return case.name.partition("/")[2]


class Training:
    """One rank's training of one model: a `Work` whose operation is a whole step.

    All ranks start with the same weights and have different data; the data does not depend on the mode.

    Args:
        case: ``MODEL[+OPTIMIZER]/anything``, and where to save the weights. Without an optimizer it is SGD.
        rank: chooses the data.
        wrap_model: gives what is called in the forward pass.
        wrap_optimizer: gives what steps.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        *,
        wrap_model: Callable[[nn.Module], nn.Module] = lambda model: model,
        wrap_optimizer: Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer] = lambda opt, _: opt,
    ) -> None:
        recipe = recipe_of(case)
        torch.set_num_threads(1)
        torch.manual_seed(_SEED)
        self.model = recipe.make()
        self._save, self._rank = case.save, rank
        self._initial = self._weights() if case.save else None
        data = torch.Generator().manual_seed(_SEED + 1 + rank)
        self._inputs = torch.randn(recipe.batch, generator=data)
        self._targets = self._make_targets(recipe, data)
        self._loss = nn.CrossEntropyLoss() if recipe.num_classes else nn.MSELoss()
        self._forward = wrap_model(self.model)
        self._optimizer = wrap_optimizer(_make_optimizer(case, self.model), self.model)

    def prepare(self) -> None:
        """Nothing: the data is there."""

    def operate(self) -> None:
        """One step."""
        torch.autograd.backward(self.forward())
        self._optimizer.step()

    def forward(self) -> torch.Tensor:
        """The first half of a step: the loss, with no gradients yet."""
        self._optimizer.zero_grad()
        loss: torch.Tensor = self._loss(self._forward(self._inputs), self._targets)
        return loss

    def check(self) -> None:
        """Save the weights before and after the warm-up.

        Raises:
            WrongResultError: they are not finite.
        """
        weights = self._weights()
        if not np.isfinite(weights).all():
            raise WrongResultError("the weights are not finite")
        if self._initial is not None:
            np.savez(f"{self._save}.{self._rank}.npz", initial=self._initial, weights=weights)
            self._initial = None

    def close(self) -> None:
        """Forget the model and what wraps it."""
        del self._forward, self._optimizer, self.model

    def _weights(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        with torch.no_grad():
            flat: np.ndarray[tuple[int], np.dtype[np.float32]] = torch.cat(
                [parameter.reshape(-1) for parameter in self.model.parameters()]
            ).numpy()
        return flat

    def _make_targets(self, recipe: Recipe, data: torch.Generator) -> torch.Tensor:
        if recipe.num_classes:
            return torch.randint(recipe.num_classes, recipe.batch[:1], generator=data)
        with torch.no_grad():
            outputs = self.model(self._inputs[:1]).shape[1:]
        return torch.randn((recipe.batch[0], *outputs), generator=data)


def _make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    name = case.name.partition("/")[0].partition("+")[2]
    if name in ("", "sgd"):
        return torch.optim.SGD(model.parameters(), lr=recipe_of(case).learning_rate, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=_ADAM_LEARNING_RATE)
    raise ArgumentError(f"there is no optimizer {name!r}; there are sgd and adam")


class Backward(Training):
    """The backward pass by itself: of a step, only that is timed, and the weights stay what they are."""

    def prepare(self) -> None:
        """The forward pass."""
        self._pending = self.forward()

    def operate(self) -> None:
        """The backward pass."""
        torch.autograd.backward(self._pending)
