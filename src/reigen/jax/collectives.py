"""The collectives of the table on jax.Arrays, traced values and pytrees of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reigen.api.collectives import Collectives, Form, Implementation
from reigen.api.compression import as_compressor
from reigen.api.device_tensors import InputTensor
from reigen.api.operations import ALLREDUCE, Collective, as_group
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.backends.device import HostOrDeviceArray
from reigen.context import CollectiveResult, Context
from reigen.elastic import membership
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError
from reigen.jax.adapter import JaxAdapter, dtype_of, empty_aligned, is_communicable
from reigen.jax.compression import COMPRESSION_NAMES, Compression, Compressor
from reigen.jax.primitive import run_collective
from reigen.jax.tracing import is_traced

_ADAPTER = JaxAdapter()
_SAME_BITS = {"uint32": jnp.int32, "uint64": jnp.int64}

Restore = Callable[[Any], Any]


class JaxCollectives(Collectives[jax.Array]):
    """Collectives on pytrees, inside JAX's transformations, too; reductions take ``compression`` as well."""

    def implementation(self, collective: Collective, grouped: bool, form: Form) -> Implementation:
        if form.is_async:
            return super().implementation(collective, grouped, form)
        return functools.partial(self.run_on_tree, collective, grouped)

    def run_on_tree(
        self,
        collective: Collective,
        grouped: bool,
        value: Any,
        argument: Any,
        name: str | None,
        process_set: ProcessSet,
        compression: Compressor = Compression.none,
    ) -> Any:
        """Run a blocking form: of an array, of a pytree as one group, or (``grouped``) of a list of arrays."""
        if collective.in_place and not grouped and compression is Compression.none and _is_plain(value):
            return self.start(collective, value, argument, name or None, process_set, blocking=True).wait()
        number = process_set_number(process_set)
        if collective.returns_splits and isinstance(argument, jax.core.Tracer):  # shapes of results depend on them
            raise ArgumentError(
                f"splits must be known when the program is traced, got {argument}: pass a tuple or a NumPy array, or "
                "make the argument of jax.jit static (static_argnames)"
            )
        if collective.parse is not None:
            argument = collective.parse(_ADAPTER, argument)
        as_compressor(compression, COMPRESSION_NAMES)
        leaves, tree = (as_group(value), None) if grouped else jax.tree.flatten(value)
        is_tree = tree is not None and (not leaves or not jax.tree_util.treedef_is_leaf(tree))
        if is_tree and not leaves:
            return value
        prepared = [_prepare(leaf, collective.reduces, compression) for leaf in leaves]
        arrays = [array for array, _ in prepared]
        if collective.returns_splits:
            if is_tree:
                raise ArgumentError(
                    f"{collective.name} takes one array, not a pytree: the splits are those of its rows"
                )
            result, rows = run_collective(collective, arrays, argument, name, number, grouped=False)
            return prepared[0][1](result) if argument is None else (prepared[0][1](result), rows)
        if is_tree and not collective.grouped:
            results = self._run_each(collective, arrays, argument, name, process_set)
        else:
            results = run_collective(collective, arrays, argument, name, number, grouped=grouped or is_tree)
        restored = [restore(result) for result, (_, restore) in zip(results, prepared, strict=True)]
        return restored if tree is None else jax.tree.unflatten(tree, restored)

    def _receiver(
        self, job: Context, given: InputTensor[jax.Array], out: jax.Array | None
    ) -> tuple[HostOrDeviceArray, Callable[[CollectiveResult], jax.Array]]:
        source = given.source
        if out is not None or not given.aliases or not isinstance(source, np.ndarray):
            return super()._receiver(job, given, out)
        return empty_aligned(source.shape, source.dtype), given.result

    def _run_each(
        self, collective: Collective, arrays: Sequence[Any], argument: Any, name: str | None, process_set: ProcessSet
    ) -> list[Any]:
        """Run a collective that has no groups of every array; here, all of them at once."""
        names = [None if name is None else f"{name}.{index}" for index in range(len(arrays))]
        if is_traced() or any(isinstance(array, jax.core.Tracer) for array in arrays):
            number = process_set_number(process_set)
            return [
                run_collective(collective, [array], argument, each, number, grouped=False)[0]
                for array, each in zip(arrays, names, strict=True)
            ]
        handles = [
            self.start(collective, array, argument, each, process_set)
            for array, each in zip(arrays, names, strict=True)
        ]
        return [handle.wait() for handle in handles]


def reduce_gradients(
    gradients: Sequence[Any],
    reduction: ReductionSpec,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    compression: Compressor = Compression.none,
) -> list[Any]:
    """Reduce gradients as one group, here or in a program that is traced; no gradients give none.

    Args:
        gradients: jax.Arrays or traced values; the same shapes and dtypes on all ranks.
        reduction: operator and factors.
        name: matches the ranks' calls.
        process_set: whose ranks take part.
        compression: in which type they travel.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here, or the job has warm spares; nothing was sent.
        CollectiveError: it failed; inside a program JAX raises it, as a JaxRuntimeError, where a result is needed.
    """
    membership.check_plain_step()
    if not gradients:
        return []
    prepared = [_prepare(gradient, True, compression) for gradient in gradients]
    arrays = [array for array, _ in prepared]
    number = process_set_number(process_set)
    results = run_collective(ALLREDUCE, arrays, reduction, name, number, grouped=True)
    return [restore(result) for result, (_, restore) in zip(results, prepared, strict=True)]


def _is_plain(value: Any) -> bool:
    """Return whether it is an array with contents, of a type that travels, that becomes no part of a program."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and is_communicable(value.dtype) and not is_traced()


def _prepare(value: Any, reduces: bool, compression: Compressor) -> tuple[Any, Restore]:
    """Return a user's array as it travels, and what makes a result of that."""
    array = _ADAPTER.as_tensor(value)
    compressed, ctx = compression.compress(array)
    travelling, restore = _as_communicable(compressed, reduces)
    if travelling is array:
        return array, _keep
    return travelling, lambda result: compression.decompress(restore(result), ctx)


def _as_communicable(array: Any, reduces: bool) -> tuple[Any, Restore]:
    """Return an array in an element type that can be communicated, and the way back.

    Floating-point numbers of 8 bits are summed in float32, and rounded once. Random keys and unsigned integers travel
    where nothing is calculated with them.
    """
    dtype = array.dtype
    if is_communicable(dtype):
        return array, _keep
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) and not reduces:
        implementation = jax.random.key_impl(array)
        data, restore = _as_communicable(jax.random.key_data(array), reduces)
        return data, lambda result: jax.random.wrap_key_data(restore(result), impl=implementation)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
        return array.astype(jnp.float32), lambda result: result.astype(dtype)
    if not reduces and dtype.name in _SAME_BITS:
        same = jax.lax.bitcast_convert_type(array, _SAME_BITS[dtype.name])
        return same, lambda result: jax.lax.bitcast_convert_type(result, dtype)
    dtype_of(dtype)
    return array, _keep


def _keep(result: Any) -> Any:
    return result
