"""Tensor class of ``p.grad`` while the gradient is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

_IN_PLACE = torch.Tensor.mul_, torch.Tensor.__imul__, torch.Tensor.div_, torch.Tensor.__itruediv__
_SCALINGS = frozenset((*_IN_PLACE, torch._foreach_mul_, torch._foreach_div_))


class PendingGradient(torch.Tensor):
    """Gradient under reduction, a tensor that ignores scaling by one: no write, no change of its version.

    ``torch.nn.utils.clip_grad_norm_`` multiplies also where nothing is to be clipped: that must neither count as a
    change, nor write back a value that was read before the reduction put the sum there.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what ``func`` does; results are plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SCALINGS and len(args) == 2 and not kwargs and _is_one(args[1]):
                return args[0]
            return func(*args, **(kwargs or {}))


def pending(gradient: torch.Tensor) -> torch.Tensor:
    """The same memory as a `PendingGradient`, which counts its changes together with ``gradient``."""
    return gradient if type(gradient) is PendingGradient else gradient.as_subclass(PendingGradient)


def data_ptr(gradient: torch.Tensor) -> int:
    """Return the address of its memory. Asking a `PendingGradient` itself takes several times as long."""
    if type(gradient) is not PendingGradient:
        return gradient.data_ptr()
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.data_ptr()


def version(gradient: torch.Tensor) -> int:
    """Return how often it was changed in place. Asking a `PendingGradient` itself takes several times as long."""
    if type(gradient) is not PendingGradient:
        return gradient._version
    with torch._C.DisableTorchFunctionSubclass():
        return gradient._version


def _is_one(factor: object) -> bool:
    if isinstance(factor, torch.Tensor):
        return factor.numel() == 1 and factor.item() == 1
    return isinstance(factor, (int, float)) and factor == 1
