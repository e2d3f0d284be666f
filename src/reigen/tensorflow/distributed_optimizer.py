"""DistributedOptimizer: the wrapper for what kind of optimizer it is; that of ``tf.compat.v1.train`` is here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from reigen.api.operations import Adasum, Average
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.errors import ArgumentError
from reigen.tensorflow.compression import Compression
from reigen.tensorflow.errors import raises_tensorflow_errors
from reigen.tensorflow.gradient_aggregation import LocalGradientAggregator, PassCounter, after, zeros_like_variable
from reigen.tensorflow.gradients import GradientReducer


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):
    """An optimizer of ``tf.compat.v1.train`` whose ``compute_gradients()`` reduces over all ranks.

    Args:
        optimizer: the user's.
        name: of the new one.
        use_locking: of the new one, which has no updates of its own.
        reducer: what is done with gradients.
        passes: backward passes of one reduction.
        average_passes: divide by their number.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reducer: GradientReducer,
        passes: int,
        average_passes: bool,
    ) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer
        self._reducer = reducer
        self._aggregator = LocalGradientAggregator(passes, average_passes, reducer.reduce)

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable alone: it is this rank's own."""
        self._reducer.register_local(variable)

    def compute_gradients(self, *args: Any, **options: Any) -> list[tuple[Any, Any]]:
        """Compute this rank's gradients as the user's optimizer does, and reduce them; pairs with their variables."""
        pairs = self._optimizer.compute_gradients(*args, **options)
        variables = [variable for _, variable in pairs]
        gradients = self._aggregator.aggregate([gradient for gradient, _ in pairs], variables)
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients of `compute_gradients`; passes that have not reduced only count the global step."""
        pairs = list(grads_and_vars)

        def count() -> Any:
            return tf.no_op() if global_step is None else tf.compat.v1.assign_add(global_step, 1)

        return self._aggregator.when_reduced(
            lambda: self._optimizer.apply_gradients(pairs, global_step=global_step, name=name),
            count,
            [gradient for gradient, _ in pairs],
        )

    def get_slot(self, *args: Any, **options: Any) -> Any:
        """Return a slot of the user's optimizer."""
        return self._optimizer.get_slot(*args, **options)

    def get_slot_names(self, *args: Any, **options: Any) -> Any:
        """Return the names of the user's optimizer's slots."""
        return self._optimizer.get_slot_names(*args, **options)

    def variables(self, *args: Any, **options: Any) -> Any:
        """Return the variables of the user's optimizer."""
        return self._optimizer.variables(*args, **options)


class AdasumV1Optimizer(DistributedV1Optimizer):
    """An optimizer of ``tf.compat.v1.train`` that steps on its own gradients; Adasum combines the steps' differences.

    After so many steps, the change of each variable since the last combination is combined over all ranks.
    """

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, reducer: GradientReducer, passes: int):
        super().__init__(optimizer, name, use_locking, reducer, 1, False)
        self._counter = PassCounter(passes)
        self._starts: list[Any] = []

    def compute_gradients(self, *args: Any, **options: Any) -> list[tuple[Any, Any]]:
        """Compute this rank's gradients as the user's optimizer does."""
        pairs: list[tuple[Any, Any]] = self._optimizer.compute_gradients(*args, **options)
        return pairs

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """Step, and combine what that did to the variables."""
        pairs = list(grads_and_vars)
        shared = [v for gradient, v in pairs if gradient is not None and not self._reducer.is_local(v)]
        if self._counter.passes == 1:
            starts = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(variable)) for variable in shared]
            started = starts
        else:
            with tf.init_scope():
                if self._counter.prepare():
                    self._starts = list(map(zeros_like_variable, shared))
            starts = self._starts
            started = [self._counter.when(0, lambda: _assign(starts, shared))]
        with after(*started):
            applied = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with after(applied):
            counted = None if self._counter.passes == 1 else self._counter.add()
        with after(applied, counted):
            return self._counter.when(0, lambda: self._combine(shared, starts))

    def _combine(self, variables: list[Any], starts: list[Any]) -> Any:
        starts = list(map(tf.convert_to_tensor, starts))
        changes = [tf.convert_to_tensor(v) - start for v, start in zip(variables, starts, strict=True)]
        combined = self._reducer.reduce(changes, variables, "deltas")
        return _assign(variables, [start + change for start, change in zip(starts, combined, strict=True)])


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    made = [variable.assign(tf.convert_to_tensor(new)) for variable, new in zip(variables, values, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*made)


@raises_tensorflow_errors
def DistributedOptimizer(  # noqa: N802 - the name is Horovod's, and what it returns is an optimizer
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer so that it applies gradients reduced over all ranks.

    All gradients of a step are one operation, or one for each of the ``groups``. For optimizers of
    ``tf.compat.v1.train`` they are reduced in ``compute_gradients()``, in graphs and in eager code; for those of Keras,
    see :func:`reigen.tensorflow.keras.DistributedOptimizer`. Variables are broadcast by
    :func:`broadcast_global_variables`, its hook or its callback.

    Args:
        optimizer: of ``tf.compat.v1.train``, or of the Keras that is ``tf.keras``.
        name: of the wrapper of a v1 optimizer.
        use_locking: of the wrapper of a v1 optimizer.
        device_dense: accepted for Horovod's sake.
        device_sparse: accepted for Horovod's sake.
        compression: the element type in which gradients travel.
        sparse_as_dense: reduce IndexedSlices as dense tensors; otherwise their indices and values are gathered.
        backward_passes_per_step: so many gradients are added up on this rank before they are reduced and applied.
        op: Average, Sum, Min, Max or Product; those of Keras take the first two. Adasum, for v1 optimizers: each rank
            steps on its own gradients, and the variables' changes are combined.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        average_aggregated_gradients: divide the sums of ``backward_passes_per_step`` by that number.
        num_groups: deprecated; use ``groups``.
        groups: how many groups, or lists of variables: what is reduced together.
        process_set: the ranks that average among themselves. A rank outside it keeps its own gradients.
        scale_local_gradients: gradients of variables given to ``register_local_var()`` are divided by the number of
            ranks.

    Raises:
        ArgumentError: an argument makes no sense, or it is no optimizer that can be wrapped.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from reigen.tensorflow import keras  # only now: scripts without Keras do not load it

        if op == Adasum:
            raise ArgumentError("op=Adasum is not supported for optimizers of Keras; use one of tf.compat.v1.train")
        return keras.DistributedOptimizer(
            optimizer,
            name=name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if isinstance(optimizer, DistributedV1Optimizer):
        raise ArgumentError("the optimizer is distributed already")
    reducer = GradientReducer(
        op,
        gradient_predivide_factor,
        compression,
        sparse_as_dense=sparse_as_dense or op == Adasum,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if op == Adasum:
        return AdasumV1Optimizer(optimizer, name, use_locking, reducer, backward_passes_per_step)
    passes, average = backward_passes_per_step, average_aggregated_gradients
    return DistributedV1Optimizer(optimizer, name, use_locking, reducer, passes, average)
