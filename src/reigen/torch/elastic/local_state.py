"""State of a model that only forward passes change, each rank's own, which a warm spare does not follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from reigen.torch.elastic.state import copy_state
from reigen.torch.elastic.untrained_parameters import UntrainedParameters
from reigen.torch.sync_batch_norm import SyncBatchNorm

_SPARES_TEXT = (
    "--spares N:warm (REIGEN_WARM_SPARES): the model has {}, whose forward pass needs all ranks, and a warm spare, "
    "which has no samples, makes none. Start this job with --spares N, or use BatchNorm"
)


def find_synchronized_layer(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return a layer whose forward pass needs all ranks, if there is one."""
    layers = (each for each in model.modules() if isinstance(each, SyncBatchNorm | torch.nn.SyncBatchNorm))
    return next(layers, None)


def unlearned_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return all state of a model's modules but parameters, by whichever name (tied ones have several)."""
    names = dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict().items() if name not in names}


@dataclass(frozen=True, slots=True)
class TorchLocalCopy:
    """Copy of a member's local state, in the memory of its host.

    Attributes:
        own: buffers and the like, by name; empty where all ranks have the same.
        fixed: parameters that steps change though the optimizer does not have them, by name.
        moving: see `UntrainedParameters.moving`.
        undone: of buffers, what they were when the member's latest step began. Its forward passes may have changed them
            since; whoever goes on with this step here, and undoes it later, goes back to these.
        fixed_undone: the same of ``fixed``.
    """

    own: dict[str, Any]
    fixed: dict[str, torch.Tensor]
    moving: list[str] | None
    undone: dict[str, torch.Tensor]
    fixed_undone: dict[str, torch.Tensor]


class TorchLocalState:
    """Implementation of `reigen.elastic.training.LocalState`: buffers, and parameters that forward passes change.

    Args:
        model: whose.
        find_fixed: returns the parameters that the optimizer does not have, by name.
        untrained: knows which of these change.
        undone: copies of buffers, by name, to which a step that is undone goes back.
        has_buffers: buffers are each rank's own; else all ranks have the same, and spares, too.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        find_fixed: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        untrained: UntrainedParameters,
        undone: dict[str, torch.Tensor],
        *,
        has_buffers: bool,
    ) -> None:
        self._model, self._find_fixed, self._untrained, self._undone = model, find_fixed, untrained, undone
        self._has_buffers = has_buffers

    def find_problem(self) -> str:
        """Implement `LocalState.find_problem`."""
        layer = find_synchronized_layer(self._model)
        return "" if layer is None else _SPARES_TEXT.format(type(layer).__name__)

    @property
    def is_empty(self) -> bool:
        """Implement `LocalState.is_empty`."""
        return not self._own_state() and not any(True for _ in self._find_fixed())

    def copy(self) -> TorchLocalCopy:
        """Implement `LocalState.copy`."""
        changing = self._untrained.changing()
        fixed = {name: _in_memory(each) for name, each in self._find_fixed() if name in changing}
        own = {name: _in_memory(each) for name, each in self._own_state().items()}
        undone = {name: _in_memory(each) for name, each in self._undone.items() if name in own}
        fixed_undone = {name: _in_memory(copy) for name, copy in changing.items() if copy is not None}
        return TorchLocalCopy(own, fixed, self._untrained.moving, undone, fixed_undone)

    def load(self, local: TorchLocalCopy) -> None:
        """Implement `LocalState.load`."""
        self._model.load_state_dict(local.own, strict=False)
        with torch.no_grad():
            for name, each in self._find_fixed():
                if name in local.fixed:
                    each.copy_(local.fixed[name])
        self._untrained.follow(local.moving, local.fixed_undone)
        for name, buffer in self._model.named_buffers():
            if name in self._undone:
                self._undone[name] = copy_state(local.undone.get(name, buffer).to(buffer.device), self._undone[name])

    def _own_state(self) -> dict[str, Any]:
        return unlearned_state(self._model) if self._has_buffers else {}


def _in_memory(value: Any) -> Any:
    """Return a copy that lies in the host's memory: another rank need not have this one's GPU."""
    return copy_state(value.detach().cpu() if isinstance(value, torch.Tensor) else value, None)
