"""Views of gradients: for each parameter, a tensor over its place in the buckets' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reigen.api.adapter import Array
from reigen.api.gradients.bucket_plan import BucketPlan
from reigen.torch.adapter import tensor_over
from reigen.torch.dtypes import torch_dtype
from reigen.torch.reducer.pending_gradient import data_ptr, pending
from reigen.types import DTYPES, DType

#: Of so many bytes and more, a gradient is copied by the C library: see `BucketViews.fill`.
_SOME_BYTES = 1 << 15


class BucketViews:
    """Views of gradients in the buckets of one `BucketPlan` at a time.

    Args:
        parameters: whose gradients they hold.

    Attributes:
        tensors: one for each parameter, shaped like it, in the element type that travels; None for a parameter that is
            not in the plan.
        pending: the same memory, as what ``p.grad`` is while the bucket is reduced.
        arrays: the buckets, in host memory.
        buckets: the buckets, in the memory of a device. Of the two, one is empty.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.tensors: list[torch.Tensor | None] = [None] * len(parameters)
        self.pending: list[torch.Tensor | None] = [None] * len(parameters)
        self.arrays: list[Array] = []
        self.buckets: list[torch.Tensor] = []
        #: by parameter, the place once more, if it is of some size and in host memory: see `fill`
        self._bits: list[Array | None] = [None] * len(parameters)
        #: by parameter, the place as a tensor that nobody else is given: see `intact`
        self._own: list[torch.Tensor | None] = [None] * len(parameters)

    def intact(self, parameter: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the view of a parameter's gradient, made anew where the last one was given other memory.

        That is what ``p.grad.data = ...`` does, and with it ``model.double()``, ``float()``, ``cpu()`` and ``cuda()``.

        Args:
            parameter: its number.
            gradient: what its ``p.grad`` is.
        """
        own, place = self._own[parameter], self.tensors[parameter]
        if own is None or place is None:
            return place
        is_moved = place.data_ptr() != own.data_ptr() or self.has_moved(parameter, gradient)
        return self.renew(parameter) if is_moved else place

    def has_moved(self, parameter: int, gradient: torch.Tensor | None) -> bool:
        """Return whether a parameter's ``p.grad`` is that of `pending`, and was given other memory."""
        if gradient is None or gradient is not self.pending[parameter]:
            return False
        return data_ptr(gradient) != self.own(parameter).data_ptr()

    def renew(self, parameter: int) -> torch.Tensor:
        """Make the views of a parameter's gradient anew; return that of `tensors`."""
        return self._put(parameter, self.own(parameter))

    def own(self, parameter: int) -> torch.Tensor:
        """Return the place as a tensor whose changes are not counted as changes of the gradient."""
        own = self._own[parameter]
        assert own is not None
        return own

    def fill(self, parameter: int, gradient: torch.Tensor) -> None:
        """Copy a dense gradient to its place.

        The C library does it where nothing has to be converted or rearranged, and torch would not divide the work among
        threads: its copy does not read what it overwrites (`rep movsb`), which takes two thirds of the time of torch's.
        """
        place, bits = self.tensors[parameter], self._bits[parameter]
        assert place is not None
        if (
            bits is not None
            and gradient.dtype is place.dtype
            and gradient.stride() == place.stride()
            and gradient.is_cpu
            and type(gradient) is torch.Tensor
            and not (gradient.requires_grad or gradient.is_neg())
            and torch.get_num_threads() == 1
        ):
            bits[...] = _bits_of(gradient)
        else:
            place.copy_(gradient)

    def lay_out_on_device(self, plan: BucketPlan, memory: torch.Tensor) -> None:
        """Put the plan's buckets into ``memory``: bytes of a device."""
        memory.zero_()
        self.buckets = []
        for bucket in plan.buckets:
            dtype = torch_dtype(DTYPES[bucket.dtype])
            self.buckets.append(memory[bucket.offset : bucket.offset + bucket.nbytes].view(dtype))
            for place in bucket.places:
                parameter = self._parameters[place.parameter]
                flat = memory[place.offset : place.offset + place.nbytes].view(dtype)
                view = flat.as_strided(parameter.shape, strides_of(parameter))
                # Views count their changes together. Each gradient needs a count of its own: `Reducer.changed`.
                self._put(place.parameter, view)

    def lay_out(self, plan: BucketPlan, memory: Array) -> None:
        """Put the plan's buckets into ``memory``: bytes of the host."""
        memory[: plan.nbytes] = 0  # also brings the pages in, and leaves no garbage between the places
        self.arrays = []
        for bucket in plan.buckets:
            wire = DTYPES[bucket.dtype]
            self.arrays.append(memory[bucket.offset : bucket.offset + bucket.nbytes].view(wire.storage))
            for place in bucket.places:
                array = memory[place.offset : place.offset + place.nbytes]
                tensor = _view_as_parameter(array, wire, self._parameters[place.parameter])
                self._put(place.parameter, tensor)
                self._bits[place.parameter] = _bits_of(tensor) if place.nbytes >= _SOME_BYTES else None

    def shaped(self, flat: Array, parameter: int) -> torch.Tensor:
        """A tensor over the elements of a place, in whatever type they are, shaped like its parameter."""
        return torch.from_numpy(flat).as_strided(
            self._parameters[parameter].shape, strides_of(self._parameters[parameter])
        )

    def holds(self, parameter: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is the parameter's place itself."""
        return gradient is self.pending[parameter] or gradient is self.tensors[parameter]

    def _put(self, parameter: int, own: torch.Tensor) -> torch.Tensor:
        place = own.data  # another tensor over the same memory
        self._own[parameter], self.tensors[parameter], self.pending[parameter] = own, place, pending(place)
        return place

    def forget(self, copy: bool) -> None:
        """The memory is used no more. With ``copy`` gradients that lie there are copied out, because it goes away."""
        for index, (parameter, place) in enumerate(zip(self._parameters, self.tensors, strict=True)):
            if copy and place is not None and parameter.grad is not None and self.holds(index, parameter.grad):
                parameter.grad = place.clone()
        self.tensors, self.pending = [None] * len(self._parameters), [None] * len(self._parameters)
        self._own = [None] * len(self._parameters)
        self.arrays, self.buckets, self._bits = [], [], [None] * len(self._parameters)


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor laid out in memory like the parameter."""
    return torch.empty_like(parameter, device="meta").stride()


def _bits_of(tensor: torch.Tensor) -> Array:
    """A tensor of the host as an array over its memory; of bfloat16, which NumPy has not, the bits."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _view_as_parameter(array: Array, wire: DType, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor with the parameter's shape and layout over ``array``: its own storage, so that copies stay small."""
    flat: Any = tensor_over(array.view(wire.storage), wire)
    view: torch.Tensor = flat.as_strided(parameter.shape, strides_of(parameter))
    return view
