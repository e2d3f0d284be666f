"""Updates by the worker itself: of parameters and with gradients where they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from reigen import optim
from reigen.torch.adapter import TorchAdapter
from reigen.torch.kvstore.trainer_params import TrainerParam

_ADAPTER = TorchAdapter()


class LocalUpdater:
    """An optimizer of :mod:`reigen.optim` with its states, for torch parameters.

    Weights in the memory of a CPU are updated in place; others are copied to the host and back.
    """

    def __init__(self, optimizer: optim.Optimizer, entries: Sequence[TrainerParam]) -> None:
        self._updater = optim.Updater(optimizer)
        self._entries = entries

    def update(self, optimizer: optim.Optimizer) -> None:
        """Update every parameter that requires and has a gradient, with the numbers of ``optimizer``."""
        self._updater.set_optimizer(optimizer)
        for entry in self._entries:
            if entry.parameter.requires_grad and entry.parameter.grad is not None:
                self._update(entry, entry.parameter.grad)

    def save(self, path: str | Path, optimizer: optim.Optimizer) -> None:
        """Write the states, and the optimizer as it is now."""
        self._updater.set_optimizer(optimizer)
        self._updater.save(path, dump_optimizer=True)

    def load(self, states: optim.States) -> None:
        """Go on from there; raises ConfigError if they are not states of the optimizer."""
        self._updater.set_states(states)

    def _update(self, entry: TrainerParam, gradient: torch.Tensor) -> None:
        parameter = entry.parameter
        dtype = _ADAPTER.dtype(parameter)
        weight, aliases = _ADAPTER.array(parameter)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows = gradient.indices()[0].cpu().numpy().astype(np.int64, copy=False)
            values, _ = _ADAPTER.array(gradient.values())
            self._updater.update_rows(entry.key, rows, values, weight, dtype)
        else:
            values, _ = _ADAPTER.array(gradient)
            self._updater(entry.key, values, weight, dtype)
        if aliases:
            _ADAPTER.mark_modified(parameter)
        else:
            _ADAPTER.write(parameter, weight)
