"""Training whose steps have the same bits with any members: gradients of parts are added in the order of the parts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from reigen.elastic.cursor import Part
from reigen.errors import ArgumentError, CollectiveError
from reigen.torch.elastic.training import TorchTraining
from reigen.torch.ops import allgather
from reigen.torch.optimizers.optimizer_wrapper import WrappedOptimizer

#: Elements of each part that are gathered at once, so that not all parts' gradients have to be anywhere at one time.
_NUM_AT_ONCE = 1 << 20


class PartwiseTraining(TorchTraining):
    """`TorchTraining` for ``Job(..., deterministic="parts")``.

    Each part begins with the buffers of the step's beginning, and with random generators that are seeded by the numbers
    of step and part. Behind the last part the ranks gather what their parts have made, and every rank adds it up, in
    the order of the parts: gradients, weighted by the parts' shares of the step's samples, and buffers, whose weighted
    mean is what the step makes of them.

    Args:
        model: a module.
        optimizer: of its parameters; not a ``DistributedOptimizer``.
        objects: see `TorchTraining`.
    """

    _has_own_buffers = False

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> None:
        super().__init__(model, optimizer, objects)
        self._step_hooks: list[RemovableHandle] = []
        self._part: Part | None = None
        #: by dtype, what each part of this rank has made
        self._rows: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._is_summed = False

    def _prepare_optimizer(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, WrappedOptimizer):
            raise ArgumentError(
                f'deterministic="parts" adds up gradients by itself, and takes an optimizer of torch.optim as it is, '
                f"got {optimizer!r:.60}"
            )
        return optimizer

    def attach(self, update: AbstractContextManager[None], complete: Callable[[CollectiveError], bool]) -> None:
        """Implement `TrainingState.attach`."""

        def begin(*_: object) -> None:
            self.end_parts()
            update.__enter__()

        def end(*_: object) -> None:
            update.__exit__(None, None, None)

        self._step_hooks = [self._optimizer.register_step_pre_hook(begin), self._optimizer.register_step_post_hook(end)]

    def detach(self) -> None:
        """Implement `TrainingState.detach`."""
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()

    def registered_bytes(self) -> int:
        """Implement `TrainingState.registered_bytes`."""
        return 0

    def finish_gradients(self) -> None:
        """Implement `TrainingState.finish_gradients`."""

    def failed_update(self) -> bool | None:
        """Implement `TrainingState.failed_update`."""
        return False

    def _is_overlap_worth_it(self) -> bool:
        return False  # every rank takes its parts

    def begin_part(self, part: Part, step: int, size: int) -> None:
        """Implement `TrainingState.begin_part`."""
        self._keep_part()
        self._restore_buffers()
        seed = (step << 20) + part.number
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed)
        self._part = part

    def end_parts(self) -> None:
        """Implement `TrainingState.end_parts`."""
        if self._is_summed:
            return
        self._keep_part()
        self._restore_buffers()
        self._restore_generators()
        groups: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in self._summed_tensors():
            groups[_dtype_of_sum(tensor)].append(tensor)
        for dtype, tensors in sorted(groups.items(), key=lambda item: str(item[0])):
            self._deliver(self._add_up(dtype, sum(tensor.numel() for tensor in tensors)), tensors)
        self._is_summed = True

    def drop_gradients(self) -> None:
        """Implement `TrainingState.drop_gradients`."""
        self._part, self._is_summed = None, False
        self._rows.clear()
        for parameter in self._parameters():
            parameter.grad = None

    def describe_view(self) -> dict[int, int]:
        """Implement `TrainingState.describe_view`: no optimizer counts here."""
        return {}

    def enter_view(self, described: Sequence[dict[int, int]], *, keeps_gradients: bool) -> None:
        """Implement `TrainingState.enter_view`."""

    def renew(self) -> None:
        """Implement `TrainingState.renew`."""

    def _clear_gradients(self) -> None:
        self.drop_gradients()

    def _summed_tensors(self) -> list[torch.Tensor]:
        return [*(p for p in self._parameters() if p.requires_grad), *self._model.buffers()]

    def _keep_part(self) -> None:
        """Keep gradients and buffers of the part that comes to its end here."""
        part, self._part = self._part, None
        if part is None:
            return
        made: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in self._summed_tensors():
            source = tensor if not isinstance(tensor, torch.nn.Parameter) else tensor.grad
            source = torch.zeros_like(tensor) if source is None else source
            made[_dtype_of_sum(tensor)].append(source.detach().to(_dtype_of_sum(tensor)).flatten() * part.share)
        for dtype, pieces in made.items():
            self._rows[dtype].append(torch.cat(pieces))
        for parameter in self._parameters():
            parameter.grad = None

    def _add_up(self, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Collective: return the sum of all parts' rows."""
        rows = self._rows.pop(dtype, [])
        own = (
            torch.stack(rows) if rows else torch.empty(0, length, dtype=dtype, device=self._summed_tensors()[0].device)
        )
        total = torch.zeros(length, dtype=dtype, device=own.device)
        for begin in range(0, length, _NUM_AT_ONCE):
            end = min(begin + _NUM_AT_ONCE, length)
            gathered = allgather(own[:, begin:end].contiguous(), name=f"elastic.parts.{dtype}.{begin}")
            for row in gathered:
                total[begin:end] += row
        return total

    @staticmethod
    def _deliver(total: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        place = 0
        with torch.no_grad():
            for tensor in tensors:
                values = total[place : place + tensor.numel()].view(tensor.shape)
                place += tensor.numel()
                if isinstance(tensor, torch.nn.Parameter):
                    tensor.grad = values.to(tensor.dtype).clone()
                else:
                    tensor.copy_(values if tensor.is_floating_point() else values.round())


def _dtype_of_sum(tensor: torch.Tensor) -> torch.dtype:
    """Return the element type in which a tensor is added up."""
    return tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.float64
