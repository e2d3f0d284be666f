"""Every adapter passes the public conformance suite; so does one of a framework that nobody has."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reigen.api import operations
from reigen.api.adapter import TensorAdapter
from reigen.api.functions import Dialect, list_functions
from reigen.api.numpy_adapter import NumpyAdapter
from reigen.testing import RankError, RankPool, check_adapter
from reigen.testing.adapters import _AdapterCases
from reigen.torch.adapter import TorchAdapter
from tests.conformance import toy

MakePool = Callable[[int], RankPool]
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


def differentiate_torch(
    function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    tensors: list[torch.Tensor],
    weights: list[torch.Tensor],
) -> list[torch.Tensor | None]:
    leaves = [tensor.requires_grad_() for tensor in tensors]
    results = function(leaves)
    torch.autograd.backward(results, weights)
    return [leaf.grad for leaf in leaves]


@SIZES
def test_numpy(rank_pool: MakePool, size: int) -> None:
    assert len(check_adapter(NumpyAdapter, rank_pool(size))) == 10


@SIZES
def test_torch(rank_pool: MakePool, size: int) -> None:
    assert len(check_adapter(TorchAdapter, rank_pool(size), differentiate=differentiate_torch)) == 10


@SIZES
def test_a_framework_of_seven_methods_has_everything(rank_pool: MakePool, size: int) -> None:
    assert len(check_adapter(toy.ToyAdapter, rank_pool(size), differentiate=toy.differentiate)) == 10
    assert len([name for name in vars(toy.ToyAdapter) if not name.startswith("_")]) <= 7
    names = [spec.name for spec in list_functions(Dialect())]
    assert len(names) == 22
    for name in names:
        function = getattr(toy, name)
        assert inspect.getdoc(function)
        assert next(iter(inspect.signature(function).parameters)) == ("tensors" if "grouped" in name else "tensor")


class Forgetful(toy.ToyAdapter):
    """Results are not written into the tensor."""

    def write(self, tensor: toy.ToyTensor, array: Any) -> None:
        pass


class Careless(toy.ToyAdapter):
    """A private copy is said to be the tensor's memory."""

    def array(self, tensor: toy.ToyTensor) -> tuple[Any, bool]:
        return tensor.read(), True


class Narrow(NumpyAdapter):
    """Results come in another element type."""

    def wrap(self, array: Any, like: Any) -> Any:
        return array.astype(np.float32) if array.dtype == np.float64 else array


class Generous(NumpyAdapter):
    """Anything is a tensor."""

    def as_tensor(self, value: Any, *, writable: bool = False) -> Any:
        return value if isinstance(value, np.ndarray) else np.zeros(3)


class Backwards(toy.ToyAdapter):
    """Gradients are those of the results."""

    def differentiate(self, forward: Any, backward: Any, tensors: Any) -> Any:
        return super().differentiate(forward, list, tensors)


@pytest.mark.parametrize("broken", [Forgetful, Careless, Generous, Backwards])
def test_the_suite_finds_faults(rank_pool: MakePool, broken: Callable[[], TensorAdapter[Any]]) -> None:
    with pytest.raises(RankError, match=r"AssertionError|Error"):
        check_adapter(broken, rank_pool(2), differentiate=toy.differentiate if broken is Backwards else None)


def test_the_suite_tells_what_an_adapter_has_no_tensors_of(rank_pool: MakePool) -> None:
    assert "float64" not in check_adapter(Narrow, rank_pool(1))


def test_the_suite_names_a_collective_that_it_does_not_know(rank_pool: MakePool) -> None:
    def check() -> None:
        cases = _AdapterCases(NumpyAdapter())
        new, arrays = dataclasses.replace(operations.REDUCESCATTER, name="scan"), [np.ones((3, 2))]
        with pytest.raises(NotImplementedError, match="the result of scan"):
            cases._truth(new, arrays)
        with pytest.raises(NotImplementedError, match="the gradient of scan"):
            cases._true_gradient(new, arrays)

    rank_pool(1).run(check, init=True)
