"""Conversion of a framework's tensors to the memory that a collective works on, and of results to tensors.

That memory is an array in host memory: the tensor's own, or a copy of it. Where the tensors of an operation lie in the
memory of a device, the framework's package can lend it, and the context's backend for devices takes it, it is that
memory itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic

import msgspec

from reigen.api.adapter import Tensor, TensorAdapter, empty_like
from reigen.backends.device import DeviceArray, HostOrDeviceArray
from reigen.context import CollectiveResult, Context
from reigen.types import DType, ReduceOp


class InputTensor(msgspec.Struct, Generic[Tensor], frozen=True, eq=False):
    """A user's tensor in an operation, with its contents; ``aliases``: they are the tensor's own memory."""

    adapter: TensorAdapter[Tensor]
    tensor: Tensor
    dtype: DType
    source: HostOrDeviceArray
    aliases: bool

    def target(self, in_place: bool) -> HostOrDeviceArray:
        """Memory for a result of the same shape."""
        if in_place or not self.aliases:  # a private copy may as well receive the result
            return self.source
        if isinstance(self.source, DeviceArray):
            device = self.source.device
            new = device.empty(self.source.shape, self.dtype)
            return replace(new, ready=device.current().record())
        return empty_like(self.source)

    def result(self, outcome: CollectiveResult) -> Tensor:
        """The outcome as a new tensor."""
        if isinstance(outcome.array, DeviceArray):
            assert self.adapter.lender is not None
            return self.adapter.lender.receive(outcome.array)
        return self.adapter.wrap(outcome.on_host, self.tensor)

    def write_back(self, outcome: CollectiveResult) -> Tensor:
        """The tensor itself, with the outcome as its contents."""
        if isinstance(outcome.array, DeviceArray):
            assert self.adapter.lender is not None
            received = self.adapter.lender.receive(outcome.array)
            if not self.aliases:
                self.adapter.lender.copy(self.tensor, received)
        elif not self.aliases:
            self.adapter.write(self.tensor, outcome.on_host)
        if self.aliases:
            self.adapter.mark_modified(self.tensor)
        return self.tensor


def prepare_inputs(
    adapter: TensorAdapter[Tensor],
    context: Context,
    tensors: Sequence[Tensor],
    reduction: tuple[ReduceOp, float, float] | None = None,
) -> list[InputTensor[Tensor]]:
    """The memory of an operation's tensors: all of it a device's, or all of it the host's.

    ``reduction`` are operator and factors, if they are reduced.

    Raises:
        UnsupportedTypeError: an element type cannot be communicated.
        ArgumentError: they are on another device than this rank's tensors before.
    """
    dtypes = [adapter.dtype(tensor) for tensor in tensors]
    lender, backend = adapter.lender, context.device
    if lender is not None and backend is not None:
        devices = [lender.device(tensor) for tensor in tensors]
        if all(d is not None and backend.takes(d, dtype, reduction) for d, dtype in zip(devices, dtypes, strict=True)):
            lent = map(lender.lend, tensors)
            return [InputTensor(adapter, t, d, *memory) for t, d, memory in zip(tensors, dtypes, lent, strict=True)]
    return [InputTensor(adapter, t, d, *adapter.array(t)) for t, d in zip(tensors, dtypes, strict=True)]
