"""DistributedOptimizer for the legacy Keras: its optimizers, and those of ``tf.keras.optimizers.legacy``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from reigen.api.operations import Average, Sum
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.api.saved_models import find_horovods, read_optimizer
from reigen.errors import ArgumentError
from reigen.tensorflow.compression import Compression
from reigen.tensorflow.gradient_aggregation import LocalGradientAggregator
from reigen.tensorflow.gradient_tape import list_local_variables
from reigen.tensorflow.gradients import GradientReducer

_Optimizer = tf.keras.optimizers.Optimizer
_LegacyOptimizer = tf.keras.optimizers.legacy.Optimizer
_LOSS_SCALE = "LossScaleOptimizer"


class _Distributed:
    """Methods that a wrapped optimizer has before those of its own class.

    Keras calls `aggregate_gradients` (`_aggregate_gradients` in the older optimizers) where gradients of replicas are
    to be added up: before it applies or clips them, and before a LossScaleOptimizer looks whether they are finite.
    """

    _reducer: GradientReducer
    _aggregator: LocalGradientAggregator
    _local_layers: Sequence[Any] = ()
    iterations: Any

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable alone: it is this rank's own."""
        self._reducer.register_local(variable)

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduce gradients over all ranks; of several backward passes, the last one's, which have been added up."""
        pairs = list(grads_and_vars)
        for variable in list_local_variables(self._local_layers):
            self._reducer.register_local(variable)
        variables = [variable for _, variable in pairs]
        gradients = self._aggregator.aggregate([gradient for gradient, _ in pairs], variables)
        return list(zip(gradients, variables, strict=True))

    def _aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [gradient for gradient, _ in self.aggregate_gradients(grads_and_vars)]

    def _apply(self, pairs: list[tuple[Any, Any]], is_reduced: bool, apply: Any) -> Any:
        """Reduce, unless that has been done, and call ``apply(pairs)`` after the last of the backward passes."""
        if not is_reduced:
            pairs = self.aggregate_gradients(pairs)
        return self._aggregator.when_reduced(
            lambda: apply(pairs),
            lambda: self.iterations.assign_add(1, read_value=False),
            [gradient for gradient, _ in pairs],
        )


class _DistributedNew(_Distributed):
    """Optimizers of tf_keras since 2.11."""

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: Any = None,
        skip_gradients_aggregation: bool = False,
        **kw: Any,
    ) -> Any:
        """Apply gradients, reduced over all ranks unless ``skip_gradients_aggregation``."""
        pairs = list(grads_and_vars)
        with tf.init_scope():
            make_variables(self, [variable for _, variable in pairs])
        parent: Any = super()
        skips = skip_gradients_aggregation or not kw.pop("experimental_aggregate_gradients", True)
        return self._apply(
            pairs, skips, lambda reduced: parent.apply_gradients(reduced, name, skip_gradients_aggregation=True, **kw)
        )


class _DistributedOld(_Distributed):
    """Optimizers of ``tf.keras.optimizers.legacy``."""

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], name: Any = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """Apply gradients, reduced over all ranks if ``experimental_aggregate_gradients``."""
        pairs = list(grads_and_vars)
        with tf.init_scope():
            make_variables(self, [variable for gradient, variable in pairs if gradient is not None])
        parent: Any = super()
        return self._apply(
            pairs,
            not experimental_aggregate_gradients,
            lambda reduced: parent.apply_gradients(reduced, name, experimental_aggregate_gradients=False),
        )


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's, and what it returns is an optimizer
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer of the legacy Keras so that it applies gradients reduced over all ranks.

    The result is a new optimizer of a subclass of the given one's class, with the same name and configuration. A model
    that is saved with it loads without Reigen.

    Args:
        optimizer: of ``tf.keras.optimizers`` or ``tf.keras.optimizers.legacy``, or a LossScaleOptimizer of one.
        name: of the optimizer; None: the given one's.
        device_dense: accepted for Horovod's sake.
        device_sparse: accepted for Horovod's sake.
        compression: the element type in which gradients travel.
        sparse_as_dense: reduce IndexedSlices as dense tensors; otherwise their indices and values are gathered.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        op: Average or Sum.
        backward_passes_per_step: so many gradients are added up on this rank before they are reduced and applied.
        average_aggregated_gradients: divide those sums by their number.
        num_groups: deprecated; use ``groups``.
        groups: how many groups, or lists of variables: what is reduced together.
        process_set: the ranks that average among themselves. A rank outside it keeps its own gradients.
        scale_local_gradients: gradients of variables given to ``register_local_var()`` are divided by the number of
            ranks.

    Raises:
        ArgumentError: an argument makes no sense, or it is no such optimizer.
    """
    del device_dense, device_sparse
    if op not in (Average, Sum):
        raise ArgumentError(f"op should be Average or Sum for optimizers of Keras, got {op!r}")
    if isinstance(optimizer, _Distributed) or isinstance(inner_optimizer(optimizer), _Distributed):
        raise ArgumentError("the optimizer is distributed already")
    if not isinstance(optimizer, (_Optimizer, _LegacyOptimizer)):
        raise ArgumentError(
            f"optimizer should be one of tf.keras.optimizers or tf.compat.v1.train.Optimizer, got {type(optimizer)}"
        )
    reducer = GradientReducer(
        op,
        gradient_predivide_factor,
        compression,
        sparse_as_dense=sparse_as_dense,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    aggregator = LocalGradientAggregator(backward_passes_per_step, average_aggregated_gradients, reducer.reduce)
    if _LOSS_SCALE in type(optimizer).__name__:
        config = {key: each for key, each in optimizer.get_config().items() if key in _LOSS_SCALE_OPTIONS}
        return type(optimizer)(_wrap(optimizer.inner_optimizer, name, reducer, aggregator), **config)
    return _wrap(optimizer, name, reducer, aggregator)


_LOSS_SCALE_OPTIONS = ("dynamic", "initial_scale", "dynamic_growth_steps")


def PartialDistributedOptimizer(  # noqa: N802 - as above
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a `DistributedOptimizer` that leaves the variables of ``local_layers`` (one, or several) alone.

    The layers need not be built yet.
    """
    list_local_variables(local_layers)
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        0,
        groups,
        process_set,
        scale_local_gradients,
    )
    inner_optimizer(wrapped)._local_layers = (
        [local_layers] if hasattr(local_layers, "trainable_weights") else local_layers
    )
    return wrapped


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model whose optimizer, with its state, is wrapped in a `DistributedOptimizer`.

    Args:
        filepath: of a model that was saved with or without Reigen, or by Horovod.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions that it does not know, by name; one may make a DistributedOptimizer.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake: Keras finds out which kind of optimizer it is.

    Raises:
        ValueError: Keras cannot read the file.
    """
    del legacy_opts
    known = find_horovods(read_optimizer(filepath), tf.keras.optimizers)
    known |= {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(inner_optimizer(optimizer), _Distributed):
        wrapped = DistributedOptimizer(optimizer, compression=compression)
        _copy_state(inner_optimizer(wrapped), inner_optimizer(optimizer), model.trainable_variables)
        model.optimizer = wrapped
    return model


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of a LossScaleOptimizer; else itself."""
    return optimizer.inner_optimizer if _LOSS_SCALE in type(optimizer).__name__ else optimizer


def variables_of(optimizer: Any) -> list[Any]:
    """Return its variables: the older optimizers have a method for them."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def make_variables(optimizer: Any, variables: list[Any]) -> None:
    """Make an optimizer's own variables, for those of a model; those that exist stay as they are."""
    if isinstance(optimizer, _Optimizer):
        optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):
        with tf.name_scope(optimizer._name):
            optimizer._create_all_weights(variables)


def _wrap(optimizer: Any, name: str | None, reducer: GradientReducer, aggregator: LocalGradientAggregator) -> Any:
    own = type(optimizer)
    methods = _DistributedNew if isinstance(optimizer, _Optimizer) else _DistributedOld
    cls: Any = type(own.__name__, (methods, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    config = optimizer.get_config() | ({} if name is None else {"name": name})
    wrapped = cls.from_config(config)
    # Keras would track them as part of the model.
    object.__setattr__(wrapped, "_reducer", reducer)
    object.__setattr__(wrapped, "_aggregator", aggregator)
    return wrapped


def _copy_state(wrapped: Any, optimizer: Any, variables: list[Any]) -> None:
    """Give a new optimizer the state of the one that it was made of."""
    make_variables(wrapped, variables)
    if isinstance(wrapped, _Optimizer):
        make_variables(optimizer, variables)  # that of a SavedModel has none
        for new, old in zip(wrapped.variables, optimizer.variables, strict=True):
            new.assign(old)
    elif optimizer.get_weights():
        wrapped.set_weights(optimizer.get_weights())
