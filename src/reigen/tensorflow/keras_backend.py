"""TensorFlow as Keras's backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from reigen.api.collectives import Form
from reigen.api.job import shutdown
from reigen.api.operations import ALLREDUCE
from reigen.api.process_sets import ProcessSet
from reigen.engine.operation_builders import ReductionSpec
from reigen.tensorflow.collectives import COLLECTIVES, reduce_gradients
from reigen.tensorflow.compression import Compression
from reigen.tensorflow.errors import collective_errors


class TensorFlowKerasBackend:
    """A `reigen.keras.backend.KerasBackend`: eager, in graphs, and in branches of these."""

    skips_updates = True

    def reduce_gradients(
        self, tensors: Sequence[tf.Tensor], reduction: ReductionSpec, name: str, process_set: ProcessSet
    ) -> list[Any]:
        """Return the tensors, reduced as one operation."""
        results: list[Any] = reduce_gradients([*map(tf.convert_to_tensor, tensors)], reduction, name, process_set)
        return results

    def reduce_sparse(
        self, gradient: tf.IndexedSlices, reduction: ReductionSpec, name: str, process_set: ProcessSet
    ) -> tf.IndexedSlices:
        """Return IndexedSlices of all ranks' rows, scaled."""
        run = COLLECTIVES.implementation(ALLREDUCE, True, Form())
        (gathered,) = run(
            [gradient], reduction._replace(prescale=1.0, postscale=1.0), name, process_set, Compression.none
        )
        factor = reduction.prescale * reduction.postscale
        return (
            gathered
            if factor == 1.0
            else tf.IndexedSlices(gathered.values * factor, gathered.indices, gathered.dense_shape)
        )

    def wait_for(self, values: Sequence[Any]) -> None:
        """They are there: a step waits for its collectives."""

    def shutdown(self) -> None:
        """Leave the job."""
        shutdown()

    def change_job(self, change: Callable[[], None]) -> None:
        """Leave the job, and enter another."""
        change()

    def collective_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors of failed collectives are CollectiveErrors."""
        return collective_errors()

    def leave_uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself: tracing follows tensors, not Python."""
        return function

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which an optimizer is applied."""
        return nullcontext()

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether it is IndexedSlices."""
        return isinstance(gradient, tf.IndexedSlices)

    def to_dense(self, gradient: tf.IndexedSlices) -> tf.Tensor:
        """Return it as a tensor."""
        return tf.convert_to_tensor(gradient)


BACKEND = TensorFlowKerasBackend()
