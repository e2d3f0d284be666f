"""Clipping by the norm of all gradients together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch

from reigen.errors import ArgumentError

_EPSILON = 1e-8


@torch.no_grad()
def clip_global_norm(
    arrays: Iterable[torch.Tensor | None], max_norm: float, check_isfinite: bool = True
) -> float | torch.Tensor:
    """Scale tensors in place so that their common 2-norm is at most ``max_norm``: by min(1, max_norm / (norm + 1e-8)).

    Call it between ``Trainer.allreduce_grads()`` and ``Trainer.update()``: all workers hold the same gradients there,
    and find the same norm. They are sums, over the workers and over what each of them has summed its loss over.

    Args:
        arrays: dense or sparse floating point tensors of any dtypes and devices; None is passed over.
        max_norm: above 0.
        check_isfinite: False: the norm is not looked at, so that nothing waits for a device.

    Returns:
        The norm before: a float, or with ``check_isfinite=False`` a float tensor of one element.

    Raises:
        ArgumentError: no tensors, or ``max_norm`` is not above 0.

    Warns:
        UserWarning: the norm is NaN or infinite; the tensors are left as they are.
    """
    tensors = [array for array in arrays if array is not None]
    if not tensors:
        raise ArgumentError("clip_global_norm() needs at least one tensor")
    if not max_norm > 0:
        raise ArgumentError(f"max_norm must be above 0, got {max_norm}")
    device = tensors[0].device
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([_norm(tensor).to(device) for tensor in tensors]))
    scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    if not check_isfinite:
        _scale(tensors, scale)
        return norm
    value = float(norm)
    if not math.isfinite(value):
        warnings.warn(f"the norm of the gradients is {value}; nothing is clipped", UserWarning, stacklevel=3)
    elif value + _EPSILON > max_norm:
        _scale(tensors, scale)
    return value


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    # The squares of float16 leave its range.
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm


def _scale(tensors: list[torch.Tensor], scale: torch.Tensor) -> None:
    for tensor in tensors:
        (tensor._values() if tensor.is_sparse else tensor).mul_(scale.to(tensor.device))
