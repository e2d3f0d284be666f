"""Interface that a framework implements so that everything in :mod:`reigen.api` works for its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from reigen.backends.device import Device, DeviceArray, HostOrDeviceArray
from reigen.types import DType

#: An array in the storage type of a dtype (bfloat16 is stored as uint16).
Array = NDArray[Any]

Tensor = TypeVar("Tensor")


class DeviceTensorAdapter(Protocol[Tensor]):
    """Tensors of one framework in the memory of a device, lent to a backend for devices."""

    def device(self, tensor: Tensor) -> Device | None:
        """The device; None: the tensor is in host memory, or in that of a device which is not for lending."""

    def lend(self, tensor: Tensor) -> tuple[DeviceArray, bool]:
        """Return the contents, ready behind the calling thread's work, and whether they are the tensor's memory.

        If not (other layout), it is a private copy on the device.
        """

    def receive(self, array: DeviceArray) -> Tensor:
        """Return the owner of the array; the calling thread's later work finds the contents complete."""

    def copy(self, tensor: Tensor, contents: Tensor) -> None:
        """Copy ``contents`` (of the same shape) into the tensor, whatever its layout."""


class TensorAdapter(ABC, Generic[Tensor]):
    """Tensors of one framework, seen as NumPy arrays: all that `reigen.api` needs to know of a framework.

    Arrays are C-contiguous, in host memory, of the tensor's shape, in ``dtype(tensor).storage``. Tensors have a
    ``shape`` and can be multiplied by a number. `reigen.testing.check_adapter` is the conformance suite.

    Attributes:
        lender: lends what lies in the memory of devices; None: all tensors have to be copied to the host.
        is_immutable: no tensor can be written: `as_tensor` refuses one that is to be, and `write` is never called.
        stop_gradient: what to do with the input of a collective that has no gradient, for messages.
    """

    is_immutable = False
    stop_gradient = "its input must be a constant"
    lender: DeviceTensorAdapter[Tensor] | None = None

    @abstractmethod
    def as_tensor(self, value: Any, *, writable: bool = False) -> Tensor:
        """Return a user's argument as a tensor; ``writable``: it is to receive the result.

        Raises:
            UnsupportedTypeError: it is none.
            ArgumentError: it cannot be written.
        """

    @abstractmethod
    def dtype(self, tensor: Tensor) -> DType:
        """The element type.

        Raises:
            UnsupportedTypeError: it, or the kind of tensor, cannot be communicated.
        """

    @abstractmethod
    def array(self, tensor: Tensor) -> tuple[Array, bool]:
        """The contents, and whether the array *is* the tensor's memory.

        It is wherever that is possible without copying; otherwise (other layout, other device) it is a private copy.
        """

    @abstractmethod
    def wrap(self, array: Array, like: Tensor | None) -> Tensor:
        """A new tensor with the contents of ``array``, and the dtype and device of ``like``; None: the array's.

        The array is given away: the tensor may use its memory.
        """

    @abstractmethod
    def write(self, tensor: Tensor, array: Array) -> None:
        """Copy ``array`` (of the same shape) into the tensor, whatever its layout and device."""

    def device(self, tensor: Tensor) -> str:
        """The kind of device whose memory holds the tensor: ``cpu``, ..."""
        return "cpu"

    def mark_modified(self, tensor: Tensor) -> None:
        """Called after the tensor's memory was changed behind the framework's back, through ``array``."""

    def needs_gradient(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether to `differentiate` a collective of these tensors, as a user gave them.

        By default it does not, ever.
        """
        return False

    def differentiate(
        self,
        forward: Callable[[Sequence[Tensor]], list[Tensor]],
        backward: Callable[[Sequence[Tensor]], list[Tensor | None]],
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return ``forward(tensors)``, and have the framework differentiate it by ``backward``.

        Args:
            forward: runs the collective: one result for each tensor, of its element type.
            backward: of the gradients of the results makes those of the tensors, by functions that are differentiable
                themselves; None for a tensor whose elements are no floating-point numbers, which is ignored among the
                gradients, too.
            tensors: of the collective.
        """
        return forward(tensors)

    def differentiate_in_both_modes(
        self,
        forward: Callable[[Sequence[Tensor]], list[Tensor]],
        backward: Callable[[Sequence[Tensor]], list[Tensor | None]],
        tangents: Callable[[Sequence[Tensor]], list[Tensor | None]],
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """Do what `differentiate` does, also in forward mode, where the framework has one that takes such rules.

        Args:
            forward: see `differentiate`.
            backward: see `differentiate`.
            tangents: of the tangents of the tensors makes those of the results; None as for ``backward``.
            tensors: of the collective.
        """
        return self.differentiate(forward, backward, tensors)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Return zeros in the tensor's shape: for gradients.

        A framework whose gradients can be differentiated again does it by functions of its own, of the tensor: then the
        tensor's gradient is zeros, and the collective that has made it is differentiated, too.
        """
        return self.wrap(np.zeros(tensor.shape, self.dtype(tensor).storage), tensor)  # type: ignore[attr-defined]

    def take_rows(self, tensor: Tensor, begin: int, shape: tuple[int, ...]) -> Tensor:
        """Return the rows from ``begin`` in a shape, with zeros behind the last one: for gradients.

        A framework whose gradients can be differentiated again does it by functions of its own.
        """
        rows = np.zeros((shape[0] if shape else 1, *tensor.shape[1:]), self.dtype(tensor).storage)  # type: ignore[attr-defined]
        found = self.array(tensor)[0][begin : begin + len(rows)]
        rows[: len(found)] = found
        return self.wrap(rows.reshape(shape), tensor)


def as_rows(array: HostOrDeviceArray) -> HostOrDeviceArray:
    """The array itself, or a scalar as an array of one element: for operations along dimension 0."""
    return array.reshape(1) if array.ndim == 0 else array


def empty_like(array: Array) -> Array:
    """An uninitialised C-contiguous array of the same shape and storage type."""
    return np.empty(array.shape, array.dtype)
