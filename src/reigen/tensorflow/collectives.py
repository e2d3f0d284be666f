"""Collectives on tensors of TensorFlow: at once on eager ones, as operations of the graph on others.

Elsewhere in this package, and in `reigen.keras`, gradients are reduced by `reduce_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from msgspec import structs

from reigen.api.adapter import Array
from reigen.api.collectives import Collectives, Form, Implementation
from reigen.api.compression import as_compressor
from reigen.api.device_tensors import InputTensor
from reigen.api.native_calls import NativeCall
from reigen.api.operations import ALLGATHER, ALLREDUCE, ALLTOALL, Collective, as_group, as_root
from reigen.api.process_sets import ProcessSet, process_set_number
from reigen.backends.device import HostOrDeviceArray
from reigen.context import CollectiveResult, Context
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError
from reigen.tensorflow import graph
from reigen.tensorflow.adapter import DTYPE_OF, TensorFlowAdapter, as_any_tensor, dtype_of
from reigen.tensorflow.compression import COMPRESSION_NAMES, Compression
from reigen.types import ReduceOp

#: bytes from which a result is written into memory of TensorFlow's, instead of being copied there
_OWN_MEMORY_BYTES = 16384


class TensorFlowCollectives(Collectives[tf.Tensor]):
    """Collectives on tensors, those of graphs, too; allreduces take IndexedSlices.

    Functions have more arguments, of Horovod's: the compression, and others that do nothing.
    """

    def implementation(self, collective: Collective, grouped: bool, form: Form) -> Implementation:
        def run(value: Any, argument: Any, name: str | None, process_set: ProcessSet, *extra: Any) -> Any:
            if not collective.reduces:
                return self.run(collective, grouped, value, argument, name, process_set)
            compression = as_compressor(next(each for each in extra if hasattr(each, "compress")), COMPRESSION_NAMES)
            group = as_group(value) if grouped else (value,)
            if any(isinstance(each, tf.IndexedSlices) for each in group) and collective is ALLREDUCE:
                results = self._reduce_mixed(group, argument, name, process_set, compression)
            elif compression is Compression.none:
                return self.run(collective, grouped, group if grouped else value, argument, name, process_set)
            else:
                results = self._reduce_compressed(collective, grouped, group, argument, name, process_set, compression)
            return results if grouped else results[0]

        return run

    def run(
        self,
        collective: Collective,
        grouped: bool,
        value: Any,
        argument: Any,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        group = list(map(as_any_tensor, as_group(value) if grouped else [value]))
        if tf.executing_eagerly():
            return super().run(collective, grouped, group if grouped else group[0], argument, name, process_set)
        results = self._run_in_graph(collective, grouped, group, argument, name, process_set)
        return results if grouped or (collective is ALLTOALL and argument is not None) else results[0]

    def _run_in_graph(
        self,
        collective: Collective,
        grouped: bool,
        tensors: list[tf.Tensor],
        argument: Any,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        for tensor in tensors:
            dtype_of(tensor.dtype)
        if not tensors:
            raise ArgumentError("a group needs at least one tensor")
        if collective is ALLTOALL:
            tensors, argument = [*tensors, _splits_tensor(argument)], None
        elif collective.parse is not None:
            argument = as_root(argument)
        label = graph.name_of(f"{'grouped_' * grouped}{collective.name}") if name is None else str(name)
        number = process_set_number(process_set)
        results = graph.emit(NativeCall.of(collective, argument, label, number, is_grouped=grouped), tensors)
        return tuple(results) if collective is ALLTOALL else results

    def _reduce_compressed(
        self,
        collective: Collective,
        grouped: bool,
        group: Sequence[Any],
        argument: Any,
        name: str | None,
        process_set: ProcessSet,
        compression: Any,
    ) -> list[tf.Tensor]:
        pairs = list(map(compression.compress, group))
        tensors = [tensor for tensor, _ in pairs]
        results = self.run(collective, grouped, tensors if grouped else tensors[0], argument, name, process_set)
        made = results if grouped else [results]
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(made, pairs, strict=True)]

    def _reduce_mixed(
        self, group: Sequence[Any], argument: ReductionSpec, name: str | None, process_set: ProcessSet, compression: Any
    ) -> list[Any]:
        """Reduce dense tensors together, and gather each of the IndexedSlices."""
        results: dict[int, Any] = {}
        dense = {index: each for index, each in enumerate(group) if not isinstance(each, tf.IndexedSlices)}
        for index, each in enumerate(group):
            if index not in dense:
                label = name if name is None or len(group) == 1 else f"{name}.{index}"
                results[index] = self._gather_slices(each, argument, label, process_set)
        if dense:
            reduced = self._reduce_compressed(
                ALLREDUCE, True, [*dense.values()], argument, name, process_set, compression
            )
            results.update(zip(dense, reduced, strict=True))
        return [results[index] for index in range(len(group))]

    def _gather_slices(
        self, slices: tf.IndexedSlices, reduction: ReductionSpec, name: str | None, process_set: ProcessSet
    ) -> tf.IndexedSlices:
        op, prescale, postscale = reduction
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise NotImplementedError(f"IndexedSlices can be reduced with op=Average or Sum, not {op.name.title()}")
        if (prescale, postscale) != (1.0, 1.0):
            raise NotImplementedError("IndexedSlices cannot be scaled: leave out prescale_factor and postscale_factor")
        # under the name of a dense tensor's sum: an error where another rank has one
        values, indices = self.run(ALLGATHER, True, [slices.values, slices.indices], None, name, process_set)
        if op is ReduceOp.AVERAGE:
            values = values / tf.cast(_size_of(process_set), values.dtype)
        return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)

    def _receiver(
        self, job: Context, given: InputTensor[tf.Tensor], out: tf.Tensor | None
    ) -> tuple[HostOrDeviceArray, Callable[[CollectiveResult], tf.Tensor]]:
        source = given.source
        if not (isinstance(source, np.ndarray) and given.aliases and source.nbytes >= _OWN_MEMORY_BYTES):
            return super()._receiver(job, given, out)
        tensor = tf.raw_ops.Empty(shape=source.shape, dtype=given.tensor.dtype)
        memory: Array = self.adapter.array(tensor)[0]  # nobody else has it yet
        return memory, lambda outcome: tensor


COLLECTIVES = TensorFlowCollectives(TensorFlowAdapter())


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def reduce_gradients(
    tensors: Sequence[tf.Tensor],
    reduction: ReductionSpec,
    name: str,
    process_set: ProcessSet,
    labels: Sequence[str] = (),
) -> list[tf.Tensor]:
    """Reduce dense tensors as one grouped operation, in a graph or at once.

    Args:
        tensors: of any shapes and supported element types; the same on every rank.
        reduction: operator and factors.
        name: matches the ranks' calls.
        process_set: whose ranks take part.
        labels: may say which tensor each one is, for the error where ranks have different ones.

    Returns:
        The results, in order; differentiable.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: see `reigen.errors`; not in a graph, which raises it when it runs.
    """
    if not tensors:
        return []
    if not tf.executing_eagerly():
        call = NativeCall.of(ALLREDUCE, reduction, name, process_set_number(process_set), is_grouped=True)
        return graph.emit(structs.replace(call, labels=tuple(labels)), list(map(as_any_tensor, tensors)))
    if COLLECTIVES.adapter.needs_gradient(tensors):
        results: list[tf.Tensor] = COLLECTIVES.run(ALLREDUCE, True, tensors, reduction, name, process_set)
        return results
    start = COLLECTIVES.start_group
    return start(ALLREDUCE, tensors, reduction, name, process_set, labels=labels, blocking=True).wait()


def _splits_tensor(splits: Any) -> tf.Tensor:
    """Return the splits as an int32 vector; an empty one for None."""
    if splits is None:
        return tf.zeros([0], tf.int32)
    if not isinstance(splits, tf.Tensor | tf.Variable):
        return tf.constant(list(splits), tf.int32, shape=[len(splits)])
    if splits.dtype != tf.int32 or splits.shape.rank not in (1, None):
        raise ArgumentError(f"splits must be a 1-D int32 tensor, got {splits.shape.rank}-D {splits.dtype.name}")
    return tf.convert_to_tensor(splits)


def _size_of(process_set: ProcessSet) -> Any:
    if tf.executing_eagerly():
        return process_set.size() or 1
    return graph.ask("size", process_set_number(process_set))


__all__ = ["COLLECTIVES", "DTYPE_OF", "TensorFlowCollectives", "reduce_gradients"]
