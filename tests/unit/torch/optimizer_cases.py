"""Optimizers of torch that update every element by itself, with options that reach every line of theirs."""

from __future__ import annotations

from typing import Any

import torch

_CASES: tuple[tuple[str, type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    ("momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("nesterov", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    ("amsgrad", torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01}),
    ("adamax", torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}),
    ("nadam", torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
    ("radam", torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    ("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "weight_decay": 0.01}),
    ("centred rmsprop", torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    ("adadelta", torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}),
    ("rprop", torch.optim.Rprop, {"lr": 0.01}),
    ("asgd", torch.optim.ASGD, {"lr": 0.1, "t0": 2, "weight_decay": 0.01}),
)
#: Classes with a fused kernel for processors.
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

#: name -> (class, options)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    f"{name}, {how}": (cls, {**options, **chosen})
    for name, cls, options in _CASES
    for how, chosen in (("plain", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True}))
    if how != "fused" or cls in _FUSED
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
