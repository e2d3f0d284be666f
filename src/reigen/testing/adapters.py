"""Conformance suite of adapters: every framework's `TensorAdapter` passes the same one.

The functions of the table of collectives are run on real ranks, each in every form, and compared with NumPy's results
for all ranks' arrays, which every rank can compute; gradients with their closed forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen import context
from reigen.api.adapter import TensorAdapter
from reigen.api.collectives import Collectives
from reigen.api.functions import Dialect, FunctionSpec, list_functions, make_functions
from reigen.api.operations import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER, Collective, Sum
from reigen.engine.handle import Handle
from reigen.errors import ArgumentError, ReigenError, UnsupportedTypeError
from reigen.testing.pool import RankPool
from reigen.types import DTYPES

Array = NDArray[Any]
#: ``differentiate(function, tensors, weights)``: the gradients of the tensors of ``sum(w * r)`` over all results ``r``
#: of ``function(tensors)``, as the framework computes them.
Differentiate = Callable[[Callable[[list[Any]], list[Any]], list[Any], list[Any]], list[Any]]

_ROWS = 3


def check_adapter(
    make: Callable[[], TensorAdapter[Any]],
    pool: RankPool,
    *,
    differentiate: Differentiate | None = None,
    shapes: Sequence[tuple[int, ...]] = ((), (0,), (5,), (2, 3, 1)),
    timeout: float = 120.0,
) -> list[str]:
    """Run the suite on a pool of ranks.

    Args:
        make: makes the adapter; a function or class of a module that ranks can import.
        pool: runs the ranks.
        differentiate: computes gradients, where the framework has them; a function of a module, too.
        shapes: shapes of tensors to be tried.
        timeout: seconds for all of it.

    Returns:
        The names of the element types that were tried: those of which the adapter makes tensors.

    Raises:
        RankError: a case failed; the tracebacks name it.
    """
    names: list[str] = pool.run(_check_rank, make, differentiate, shapes, init=True, timeout=timeout)[0]
    return names


def _check_rank(
    make: Callable[[], TensorAdapter[Any]], differentiate: Differentiate | None, shapes: Sequence[tuple[int, ...]]
) -> list[str]:
    adapter = make()
    cases = _AdapterCases(adapter)
    dtypes = cases.check_arrays(shapes)
    for spec in list_functions(Dialect()):
        if spec.form.in_place and adapter.is_immutable:
            cases.check_not_written(spec)
            continue
        for dtype in dtypes if spec.form == (False, False) else ("float32",):
            cases.check_function(spec, dtype)
        if differentiate is not None and spec.form == (False, False):
            cases.check_gradient(spec, differentiate)
    cases.check_refusals()
    return dtypes


class _AdapterCases:
    """Cases of the suite, for one rank."""

    def __init__(self, adapter: TensorAdapter[Any]) -> None:
        job = context.current()
        self._adapter, self._rank, self._size = adapter, job.rank, job.size
        self._functions = make_functions(Collectives(adapter))

    # -- cases

    def check_arrays(self, shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Check tensors of arrays and arrays of tensors of any shape; return the element types there are."""
        known = [name for name in DTYPES if name != "bfloat16" and self._makes(np.ones(2, name))]
        assert "float32" in known, f"an adapter is needed that makes tensors of float32 at least, not of {known} alone"
        for name in known:
            for shape in shapes:
                array = (np.arange(np.prod(shape, dtype=int)) % 2).astype(name).reshape(shape)
                tensor = self._adapter.wrap(array.copy(), None)
                self._same(tensor, array, f"wrap {name} {shape}")
                assert tuple(tensor.shape) == shape, f"a tensor of {shape} says {tensor.shape}"
                assert self._adapter.as_tensor(tensor) is tensor, "as_tensor() changes a tensor"
                self._same(self._adapter.wrap(array.copy(), tensor), array, f"wrap {name} {shape} like another")
                if self._adapter.is_immutable:
                    continue
                other = np.logical_not(array).astype(name)
                self._adapter.write(tensor, np.asarray(other))
                self._same(tensor, other, f"write {name} {shape}")
        return known

    def check_function(self, spec: FunctionSpec, dtype: str) -> None:
        """Check a function of the table: its result, and which tensors it writes."""
        what = f"{spec.name} {dtype}"
        count = 3 if spec.grouped else 1
        all_arrays = [[self._input(rank, index, dtype) for index in range(count)] for rank in range(self._size)]
        truth = [self._truth(spec.collective, [each[index] for each in all_arrays]) for index in range(count)]
        tensors = [self._adapter.wrap(array.copy(), None) for array in all_arrays[self._rank]]
        result = self._functions[spec.name](
            tensors if spec.grouped else tensors[0], **self._options(spec.collective), name=what
        )
        if spec.form.is_async:
            assert isinstance(result, Handle), f"{what} gives no handle"
            result = result.wait()
        if spec.collective.returns_splits:
            result, splits = result
            self._same(splits, np.full(self._size, _ROWS, np.int32), f"splits of {what}")
        results = result if spec.grouped else [result]
        assert len(results) == count, f"{what} has {len(results)} results, not {count}"
        for index in range(count):
            self._same(results[index], truth[index], what)
            if spec.form.in_place:
                assert results[index] is tensors[index], f"{what} does not return its tensor"
            else:
                self._same(tensors[index], all_arrays[self._rank][index], f"the tensor given to {what}")

    def check_gradient(self, spec: FunctionSpec, differentiate: Differentiate) -> None:
        """Check the gradient of a function of the table."""
        collective = spec.collective
        count = 2 if spec.grouped else 1
        tensors = [self._adapter.wrap(self._input(self._rank, index, "float64"), None) for index in range(count)]
        shape = self._truth(collective, [self._input(r, 0, "float64") for r in range(self._size)]).shape
        all_arrays = [[self._weights(shape, rank, index) for index in range(count)] for rank in range(self._size)]
        weights = [self._adapter.wrap(array.copy(), None) for array in all_arrays[self._rank]]

        def function(arguments: list[Any]) -> list[Any]:
            result = self._functions[spec.name](
                arguments if spec.grouped else arguments[0],
                **self._options(collective),
                name=f"gradient of {spec.name}",
            )
            return list(result) if spec.grouped else [result[0] if collective.returns_splits else result]

        gradients = differentiate(function, tensors, weights)
        for index in range(count):
            truth = self._true_gradient(collective, [each[index] for each in all_arrays])
            self._same(gradients[index], truth, f"gradient of {spec.name}")

    def check_not_written(self, spec: FunctionSpec) -> None:
        """Check that a function that works in place refuses tensors that cannot be written; nothing was sent."""
        tensor = self._adapter.wrap(np.ones((self._size, 1), np.float32), None)
        try:
            self._functions[spec.name]([tensor] if spec.grouped else tensor, **self._options(spec.collective))
        except ArgumentError:
            return
        raise AssertionError(f"{spec.name} takes a tensor that cannot be written")

    def check_refusals(self) -> None:
        """Check that an object that is no tensor is refused at once, and nothing was sent."""
        try:
            self._functions[ALLREDUCE.name](object())
        except UnsupportedTypeError:
            pass
        else:
            raise AssertionError("an object that is no tensor is reduced")
        self._functions[ALLREDUCE.name](self._adapter.wrap(np.ones(2, np.float32), None))

    # -- helpers

    def _makes(self, array: Array) -> bool:
        """Return whether there are tensors of the array's element type."""
        try:
            return self._adapter.dtype(self._adapter.wrap(array, None)).name == array.dtype.name
        except (ReigenError, LookupError, TypeError, ValueError):  # depends on the framework
            return False

    def _input(self, rank: int, index: int, dtype: str) -> Array:
        """Make a rank's tensor: some rows for each rank, small numbers whose sums are exact in every element type."""
        values = np.arange(self._size * _ROWS * (index + 2)).reshape(self._size * _ROWS, index + 2)
        return ((values + rank * 7 + index) % 5).astype(dtype)

    def _weights(self, shape: tuple[int, ...], rank: int, index: int) -> Array:
        shape = (*shape[:1], shape[1] + index)
        return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + 3.0 * rank).astype(np.float64)

    def _options(self, collective: Collective) -> dict[str, Any]:
        if collective is BROADCAST:
            return {"root_rank": self._size - 1}
        if collective is ALLTOALL:
            return {"splits": [_ROWS] * self._size}
        return {"op": Sum} if collective.reduces else {}

    def _truth(self, collective: Collective, all_arrays: Sequence[Array]) -> Array:
        own = slice(self._rank * _ROWS, (self._rank + 1) * _ROWS)
        if collective is ALLGATHER:
            return np.concatenate(all_arrays)
        if collective is BROADCAST:
            return all_arrays[-1]
        if collective is ALLTOALL:
            return np.concatenate([each[own] for each in all_arrays])
        total: Array = np.sum(all_arrays, axis=0, dtype=all_arrays[0].dtype)
        if collective is ALLREDUCE:
            return total
        if collective is REDUCESCATTER:
            return total[own]
        raise NotImplementedError(f"the suite does not know the result of {collective.name}")

    def _true_gradient(self, collective: Collective, weights: Sequence[Array]) -> Array:
        """Return the gradient by Horovod's rules: those of allgather and broadcast average."""
        total: Array = np.sum(weights, axis=0)
        rows = self._size * _ROWS
        if collective is ALLREDUCE:
            return total
        if collective is ALLGATHER:
            return total[self._rank * rows : (self._rank + 1) * rows] / self._size
        if collective is BROADCAST:
            return total / self._size if self._rank == self._size - 1 else np.zeros_like(total)
        if collective is ALLTOALL:
            return np.concatenate([each[self._rank * _ROWS : (self._rank + 1) * _ROWS] for each in weights])
        if collective is REDUCESCATTER:
            return np.concatenate(weights) * self._size
        raise NotImplementedError(f"the suite does not know the gradient of {collective.name}")

    def _same(self, tensor: Any, truth: Array, what: str) -> None:
        array, _ = self._adapter.array(tensor)
        assert array.dtype == truth.dtype, f"{what}: {array.dtype} instead of {truth.dtype}"
        np.testing.assert_array_equal(array, truth, f"{what}, rank {self._rank} of {self._size}")
