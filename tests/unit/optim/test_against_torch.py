"""The rules that torch has, too, against torch.optim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reigen.optim import Updater, create

pytestmark = pytest.mark.slow  # torch's first step imports its compiler

TORCH: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "sgd": ({"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nag": (
        {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "adam": ({"wd": 0.01, "epsilon": 1e-14}, torch.optim.Adam, {"eps": 1e-14}),
    "adamw": ({"wd": 0.01, "epsilon": 1e-3}, torch.optim.AdamW, {"eps": 1e-3}),
    "adagrad": ({"eps": 1e-20}, torch.optim.Adagrad, {"eps": 1e-20}),
    "rmsprop": ({"wd": 0.01, "epsilon": 1e-20}, torch.optim.RMSprop, {"lr": 0.001, "alpha": 0.9, "eps": 1e-20}),
}


@pytest.mark.parametrize("name", TORCH)
def test_float64_weights_are_trained_as_by_torch(name: str) -> None:
    """Where torch adds epsilon elsewhere, it is too small to matter."""
    ours, kind, theirs = TORCH[name]
    random = np.random.default_rng(1)
    weight, gradients = random.standard_normal(1000), [random.standard_normal(1000) for _ in range(6)]
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer = kind([parameter], weight_decay=ours.get("wd", 0.0), **theirs)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    updater, result = Updater(create(name, **ours)), weight.copy()
    for gradient in gradients:
        updater(0, gradient, result)
    np.testing.assert_allclose(result, parameter.detach().numpy(), rtol=1e-9, atol=1e-12)
