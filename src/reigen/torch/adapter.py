"""torch tensors, seen as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reigen.api.adapter import Array, TensorAdapter
from reigen.errors import UnsupportedTypeError
from reigen.torch.cuda_tensors import DEVICE_TENSOR_ADAPTER, TorchDeviceTensorAdapter
from reigen.torch.dtypes import DTYPE_OF, dtype_of
from reigen.types import DTYPES, DType

_BFLOAT16 = DTYPES["bfloat16"]
#: elements of a tensor by which `bytes_to_compare` tells it from another one
_NUM_TO_COMPARE = 1024


def tensor_over(array: Array, dtype: DType) -> torch.Tensor:
    """A tensor of ``dtype`` over the array's memory; the array holds the storage type."""
    if dtype is _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensor_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes in the order in which they lie in memory: without a copy where it is dense and on the host."""
    tensor = tensor.detach().cpu()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent,), (1,)) if extent == tensor.numel() else tensor.contiguous().reshape(-1)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data


def bytes_to_compare(tensor: torch.Tensor, *, whole: bool) -> NDArray[np.uint8]:
    """A tensor's bytes, or so many of them that tensors of other random numbers differ."""
    few = tensor if tensor.dim() < 2 else tensor[:1]
    return tensor_bytes(tensor if whole else few.reshape(-1)[:_NUM_TO_COMPARE])


class TorchAdapter(TensorAdapter[torch.Tensor]):
    """Dense tensors, whose collectives autograd differentiates.

    Those of a GPU are lent to the backend for devices, if it takes them, and copied to the host otherwise; those of any
    other device are copied.
    """

    stop_gradient = "detach() its input"
    lender: TorchDeviceTensorAdapter | None = DEVICE_TENSOR_ADAPTER

    def dtype(self, tensor: torch.Tensor) -> DType:
        return DTYPE_OF.get(tensor.dtype) or dtype_of(tensor.dtype)

    def as_tensor(self, value: Any, *, writable: bool = False) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise UnsupportedTypeError(f"a torch.Tensor is needed, got {type(value).__name__}")
        if value.layout is not torch.strided:
            raise UnsupportedTypeError(f"Tensor layout {value.layout} is not supported; use to_dense()")
        return value

    def device(self, tensor: torch.Tensor) -> str:
        return tensor.device.type

    def array(self, tensor: torch.Tensor) -> tuple[Array, bool]:
        if tensor.requires_grad:
            tensor = tensor.detach()
        aliases = tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg()
        if not aliases:
            tensor = tensor.cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
        if tensor.dtype is torch.bfloat16:
            # NumPy has no bfloat16; its bits travel as uint16.
            return tensor.view(torch.int16).numpy().view(np.uint16), aliases
        return tensor.numpy(), aliases

    def wrap(self, array: Array, like: torch.Tensor | None) -> torch.Tensor:
        """A tensor over ``array`` (on the host: without a copy) with the dtype and device of ``like``."""
        if like is None:
            return torch.from_numpy(array)
        return tensor_over(array, dtype_of(like.dtype)).to(like.device)

    def write(self, tensor: torch.Tensor, array: Array) -> None:
        tensor.detach().copy_(tensor_over(array, dtype_of(tensor.dtype)))

    #: lets autograd know, so that backward through an overwritten value is an error and not a wrong gradient
    mark_modified = staticmethod(torch.autograd.graph.increment_version)

    def needs_gradient(self, tensors: Sequence[torch.Tensor]) -> bool:
        return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)

    def differentiate(
        self,
        forward: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        backward: Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]],
        tensors: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        apply: Callable[..., tuple[torch.Tensor, ...]] = _DifferentiableCollective.apply
        return list(apply(forward, backward, *tensors))

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros that depend on the tensor; its gradient is zeros, too."""
        return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)

    def take_rows(self, tensor: torch.Tensor, begin: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return rows of a tensor, a view."""
        count = shape[0] if shape else 1
        rows = tensor[begin : begin + count]
        if rows.shape[0] < count:
            rows = torch.cat([rows, rows.new_zeros((count - rows.shape[0], *rows.shape[1:]))])
        return rows.reshape(shape)


class _DifferentiableCollective(torch.autograd.Function):
    """Any collective, whose backward is made of collectives: every rank has to run backward through it."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run it; only results of floating point take part in backward."""
        ctx.rule = backward
        results = forward(tensors)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Apply its rule."""
        return None, None, *ctx.rule(grads)
