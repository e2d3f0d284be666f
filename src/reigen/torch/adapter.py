"""torch tensors, seen as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reigen.errors import UnsupportedTypeError
from reigen.frontends.adapter import Array
from reigen.torch.cuda import LENDER, TorchLender
from reigen.torch.dtypes import dtype_of
from reigen.types import DTYPES, DType

_BFLOAT16 = DTYPES["bfloat16"]


def tensor_over(array: Array, dtype: DType) -> torch.Tensor:
    """A tensor of ``dtype`` over the array's memory; the array holds the storage type."""
    if dtype is _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes in the order in which they lie in memory: without a copy where it is dense and on the host."""
    tensor = tensor.detach().cpu()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent,), (1,)) if extent == tensor.numel() else tensor.contiguous().reshape(-1)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data


class TorchAdapter:
    """A :class:`~reigen.frontends.adapter.TensorAdapter` for dense tensors.

    Those of a GPU are lent to the plane for devices, if it takes them, and copied to the host otherwise; those of any
    other device are copied.
    """

    lender: TorchLender | None = LENDER

    def dtype(self, tensor: torch.Tensor) -> DType:
        """The element type; raises UnsupportedTypeError if it cannot be communicated."""
        return dtype_of(tensor.dtype)

    def given(self, value: Any, *, writable: bool = False) -> torch.Tensor:
        """The value itself, if it is a dense tensor."""
        if not isinstance(value, torch.Tensor):
            raise UnsupportedTypeError(f"a torch.Tensor is needed, got {type(value).__name__}")
        if value.layout is not torch.strided:
            raise UnsupportedTypeError(f"Tensor layout {value.layout} is not supported; use to_dense()")
        return value

    def device(self, tensor: torch.Tensor) -> str:
        """``cpu``, ``cuda``, ..."""
        return tensor.device.type

    def array(self, tensor: torch.Tensor) -> tuple[Array, bool]:
        """The contents, and whether the array is the tensor's memory."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        aliases = tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_neg()
        if not aliases:
            tensor = tensor.cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
        if tensor.dtype is torch.bfloat16:
            # NumPy has no bfloat16; its bits travel as uint16.
            return tensor.view(torch.int16).numpy().view(np.uint16), aliases
        return tensor.numpy(), aliases

    def wrap(self, array: Array, like: torch.Tensor) -> torch.Tensor:
        """A tensor over ``array`` (on the host: without a copy) with the dtype and device of ``like``."""
        return tensor_over(array, dtype_of(like.dtype)).to(like.device)

    def write(self, tensor: torch.Tensor, array: Array) -> None:
        """Copy ``array`` into the tensor, whatever its layout and device."""
        tensor.detach().copy_(tensor_over(array, dtype_of(tensor.dtype)))

    def modified(self, tensor: torch.Tensor) -> None:
        """Let autograd know, so that backward through an overwritten value is an error and not a wrong gradient."""
        torch.autograd.graph.increment_version(tensor)
