"""A framework that nobody has: tensors of its own with gradients, and all that Reigen needs of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.api.adapter import TensorAdapter
from reigen.api.collectives import Collectives
from reigen.api.functions import make_functions
from reigen.errors import UnsupportedTypeError
from reigen.types import DType, dtype_named


class ToyTensor:
    """Numbers in memory that is hidden behind a copy, and how they were made."""

    def __init__(self, values: NDArray[Any], *, traced: bool = False) -> None:
        self._values = np.array(values)
        self.shape = self._values.shape
        self.traced = traced
        self.gradient: ToyTensor | None = None
        self.made_of: Sequence[ToyTensor] = ()
        self.back: Callable[[], None] | None = None

    def read(self) -> NDArray[Any]:
        return self._values.copy()

    def overwrite(self, values: NDArray[Any]) -> None:
        self._values[...] = values

    def __mul__(self, factor: float) -> ToyTensor:
        return ToyTensor(self._values * factor)


class ToyAdapter(TensorAdapter[ToyTensor]):
    def as_tensor(self, value: Any, *, writable: bool = False) -> ToyTensor:
        if not isinstance(value, ToyTensor):
            raise UnsupportedTypeError(f"a ToyTensor is needed, got {type(value).__name__}")
        return value

    def dtype(self, tensor: ToyTensor) -> DType:
        return dtype_named(tensor.read().dtype.name)

    def array(self, tensor: ToyTensor) -> tuple[NDArray[Any], bool]:
        return tensor.read(), False

    def wrap(self, array: NDArray[Any], like: ToyTensor | None) -> ToyTensor:
        return ToyTensor(array)

    def write(self, tensor: ToyTensor, array: NDArray[Any]) -> None:
        tensor.overwrite(array)

    def needs_gradient(self, tensors: Sequence[ToyTensor]) -> bool:
        return any(getattr(tensor, "traced", False) for tensor in tensors)

    def differentiate(
        self,
        forward: Callable[[Sequence[ToyTensor]], list[ToyTensor]],
        backward: Callable[[Sequence[ToyTensor]], list[ToyTensor | None]],
        tensors: Sequence[ToyTensor],
    ) -> list[ToyTensor]:
        results = forward(tensors)

        def back() -> None:
            given = [ToyTensor(np.zeros(r.shape)) if r.gradient is None else r.gradient for r in results]
            for tensor, gradient in zip(tensors, backward(given), strict=True):
                tensor.gradient = gradient

        for result in results:
            result.traced, result.made_of, result.back = True, tensors, back
        return results


globals().update(make_functions(Collectives(ToyAdapter())))


def differentiate(
    function: Callable[[list[ToyTensor]], list[ToyTensor]], tensors: list[ToyTensor], weights: list[ToyTensor]
) -> list[ToyTensor | None]:
    """The toy's backward: one step deep."""
    for tensor in tensors:
        tensor.traced = True
    results = function(tensors)
    for result, weight in zip(results, weights, strict=True):
        result.gradient = weight
    assert results[0].back is not None
    results[0].back()
    return [tensor.gradient for tensor in tensors]
