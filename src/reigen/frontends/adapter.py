"""What a framework must give so that everything in :mod:`reigen.frontends` works for its tensors."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from reigen.planes.device import Device, DeviceArray, Memory
from reigen.types import DType

#: An array in the storage type of a dtype (bfloat16 is stored as uint16).
Array = NDArray[Any]

Tensor = TypeVar("Tensor")


class Lender(Protocol[Tensor]):
    """Tensors of one framework in the memory of a device, lent to a plane for devices."""

    def device(self, tensor: Tensor) -> Device | None:
        """The device; None: the tensor is in host memory, or in that of a device which is not for lending."""

    def lend(self, tensor: Tensor) -> tuple[DeviceArray, bool]:
        """The contents, ready behind what the calling thread has enqueued, and whether that is the tensor's memory.

        If not (other layout), it is a private copy on the device.
        """

    def receive(self, array: DeviceArray) -> Tensor:
        """What owns the array; what the calling thread enqueues from now on finds the contents complete."""

    def copy(self, tensor: Tensor, contents: Tensor) -> None:
        """Copy ``contents`` (of the same shape) into the tensor, whatever its layout."""


class TensorAdapter(Protocol[Tensor]):
    """Tensors of one framework, seen as NumPy arrays.

    Arrays are C-contiguous, in host memory, of the tensor's shape, in ``dtype(tensor).storage``.

    Attributes:
        lender: lends what lies in the memory of devices; None: all tensors have to be copied to the host.
    """

    @property
    def lender(self) -> Lender[Tensor] | None:
        """See above."""

    def dtype(self, tensor: Tensor) -> DType:
        """The element type.

        Raises:
            UnsupportedTypeError: it, or the kind of tensor, cannot be communicated.
        """

    def given(self, value: Any, *, writable: bool = False) -> Tensor:
        """What a user passed as a tensor, as a tensor; ``writable``: it is to receive the result.

        Raises:
            UnsupportedTypeError: it is none.
            ArgumentError: it cannot be written.
        """

    def device(self, tensor: Tensor) -> str:
        """The kind of device whose memory holds the tensor: ``cpu``, ..."""

    def array(self, tensor: Tensor) -> tuple[Array, bool]:
        """The contents, and whether the array *is* the tensor's memory.

        It is wherever that is possible without copying; otherwise (other layout, other device) it is a private copy.
        """

    def wrap(self, array: Array, like: Tensor) -> Tensor:
        """A new tensor with the contents of ``array``, and the dtype and device of ``like``.

        The array is given away: the tensor may use its memory.
        """

    def write(self, tensor: Tensor, array: Array) -> None:
        """Copy ``array`` (of the same shape) into the tensor, whatever its layout and device."""

    def modified(self, tensor: Tensor) -> None:
        """Told after the tensor's memory was changed behind the framework's back, through ``array``."""


def as_rows(array: Memory) -> Memory:
    """The array itself, or a scalar as an array of one element: for operations along dimension 0."""
    return array.reshape(1) if array.ndim == 0 else array


def empty_like(array: Array) -> Array:
    """An uninitialised C-contiguous array of the same shape and storage type."""
    return np.empty(array.shape, array.dtype)
