"""DistributedOptimizer: any optimizer of Keras 3, fed with gradients that all ranks agree on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from reigen import context as contexts
from reigen.api.gradients.reduce_group import choose_reduction
from reigen.api.gradients.tracker import check_passes
from reigen.api.operations import Average
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.errors import ArgumentError
from reigen.keras.backend import load_backend
from reigen.keras.compression import Compression, choose_compressor
from reigen.keras.gradient_reducer import GradientReducer, ReduceOptions
from reigen.types import ReduceOp

#: since which Keras clips the gradients that it applies, after their accumulation
_OLDEST = (3, 5)
if tuple(map(int, keras.__version__.split(".")[:2])) < _OLDEST:
    raise ImportError(f"reigen.keras needs Keras 3.5 or later, and this is {keras.__version__}: pip install -U keras")


class DistributedOptimizerMixin:
    """First base of a wrapped optimizer's class: reduces the gradients that are applied, after their accumulation.

    Keras's optimizers accumulate gradients themselves (``gradient_accumulation_steps``); ``backward_passes_per_step``
    is that, too. The gradients are reduced just before they are clipped, which Keras does only when it applies them.
    """

    #: options of all instances of the class, and its local layers
    _reducer_options: ReduceOptions
    _reducer_layers: Sequence[Any] = ()
    #: as the user's optimizer has it
    _own_accumulation_steps: int | None
    #: of Keras's optimizers
    gradient_accumulation_steps: int | None
    built: bool
    variables: list[Any]
    _iterations: Any
    _trainable_variables: list[Any]
    _accumulated_gradients: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reducer = GradientReducer(self._reducer_options, self._reducer_layers)
        self._own_accumulation_steps = self.gradient_accumulation_steps
        passes = self._reducer_options.backward_passes
        if passes > 1:
            self.gradient_accumulation_steps = passes * (self._own_accumulation_steps or 1)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce a variable's gradients: each rank has its own values of it."""
        self._reducer.register_local(var)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Reduce the gradients over all ranks, and update the variables; collective."""
        given = list(grads)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if len(given) == len(variables) > 0:
            given = self._reducer.begin(given, variables)
        super().apply(given, trainable_variables if trainable_variables is None else variables)  # type: ignore[misc]

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Do what Keras does when ``fit`` ends, also by an error of whatever kind, which goes on behind this.

        JAX has not asked before whether all collectives have succeeded.

        Raises:
            CollectiveError: one has failed.
        """
        # an interrupted step may have left variables without a value
        values = [variable._value for variable in var_list]
        load_backend().wait_for([value for value in values if value is not None])
        super().finalize_variable_values(var_list)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the wrapped optimizer."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        if "gradient_accumulation_steps" in config:
            config["gradient_accumulation_steps"] = self._own_accumulation_steps
        return config

    def save_own_variables(self, store: Any) -> None:
        """Save the variables of the wrapped optimizer, without gradients that are being accumulated."""
        for number, variable in enumerate(self._saved_variables()):
            store[str(number)] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """Load variables that the wrapped optimizer, or this one, has saved."""
        saved = self._saved_variables()
        if len(store.keys()) != len(saved):
            super().load_own_variables(store)  # type: ignore[misc]  # which warns
            return
        for number, variable in enumerate(saved):
            variable.assign(store[str(number)])

    def _saved_variables(self) -> list[Any]:
        if self._own_accumulation_steps == self.gradient_accumulation_steps or not self.built:
            return list(self.variables)
        dropped = {id(variable) for variable in self._accumulated_gradients}
        return [variable for variable in self.variables if id(variable) not in dropped]

    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        self._reducer.expect(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: list[Any]) -> list[Any]:
        steps = self.gradient_accumulation_steps
        if steps and not load_backend().skips_updates:
            reduced = ops.cond(
                ops.equal((self._iterations + 1) % steps, 0),
                lambda: self._reducer.reduce(grads),
                lambda: list(grads),
            )
        else:
            reduced = self._reducer.reduce(grads)
        clipped: list[Any] = super()._clip_gradients(reduced)  # type: ignore[misc]
        return clipped

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:
        found = [
            self._reducer.reduce_maximum(gradient, variable)
            if getattr(variable, "overwrite_with_gradient", False)
            else gradient
            for gradient, variable in zip(grads, vars, strict=True)
        ]
        return super()._overwrite_variables_directly_with_gradients(found, vars)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - the name is Horovod's, and what it returns is an optimizer
    optimizer: keras.optimizers.Optimizer,
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
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer of Keras 3 so that it applies gradients reduced over all ranks, on any of Keras's backends.

    The result is a new optimizer of a subclass of the given one's class, with the same name and configuration, and with
    its variables' values if it was built. A model that is saved with it loads without Reigen, as one with the plain
    optimizer. Gradients are reduced as one operation, before they are clipped; a variable whose gradient is missing on
    some ranks gets zeros from these, and one that has none on any rank is left out, which the ranks agree on when the
    optimizer is first applied. With mixed precision Keras puts a LossScaleOptimizer around it: the ranks then skip a
    step if the gradients are not finite on any of them.

    Args:
        optimizer: of ``keras.optimizers``, or another subclass of its ``Optimizer``.
        name: of the optimizer; None: the given one's.
        device_dense: accepted for Horovod's sake.
        device_sparse: accepted for Horovod's sake.
        compression: the element type in which gradients travel.
        sparse_as_dense: reduce sparse gradients (TensorFlow's IndexedSlices) as dense ones; otherwise their rows are
            gathered.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        op: Average or Sum.
        backward_passes_per_step: gradients that are summed up locally before they are reduced and applied. With
            ``gradient_accumulation_steps`` of Keras's own, sums of so many are averaged.
        average_aggregated_gradients: divide those sums by ``backward_passes_per_step``.
        num_groups: deprecated; use ``groups``.
        groups: reduce as more than one operation: as so many, or lists of variables that are reduced together, with the
            others in one more.
        process_set: the ranks that reduce among themselves. On a rank outside it this is the plain optimizer.
        scale_local_gradients: divide the gradients of variables that are not reduced (``register_local_var``) by the
            number of ranks.

    Returns:
        The optimizer, with ``register_local_var(var)`` added; a LossScaleOptimizer, if that is what was given, around
        one.

    Raises:
        ArgumentError: an argument makes no sense, or the optimizer is wrapped already.
        NotInitializedError: ``init()`` has not been called.
    """
    del device_dense, device_sparse
    options = ReduceOptions(
        reduction=_choose_reduction(op, gradient_predivide_factor),
        compressor=choose_compressor(compression),
        sparse_as_dense=sparse_as_dense,
        backward_passes=check_passes(backward_passes_per_step),
        average_passes=average_aggregated_gradients,
        groups=_choose_groups(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _wrap(optimizer, name, options, ())


def PartialDistributedOptimizer(  # noqa: D417, N802 - as above
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer as `DistributedOptimizer` does, without some layers, whose gradients are not reduced.

    Args:
        optimizer: see `DistributedOptimizer`, as for all arguments that are not here.
        local_layers: a layer, or several; they need not be built yet.
        scale_local_gradients: divide their gradients by the number of ranks.

    Raises:
        ArgumentError: an argument makes no sense; ``local_layers`` are no layers.
        NotInitializedError: ``init()`` has not been called.
    """
    del device_dense, device_sparse
    layers = [] if local_layers is None else [local_layers] if isinstance(local_layers, keras.Layer) else local_layers
    if not all(isinstance(layer, keras.Layer) for layer in layers):
        raise ArgumentError(f"local_layers must be layers of Keras, got {local_layers!r}")
    options = ReduceOptions(
        reduction=_choose_reduction(op, gradient_predivide_factor),
        compressor=choose_compressor(compression),
        sparse_as_dense=sparse_as_dense,
        backward_passes=check_passes(backward_passes_per_step),
        average_passes=average_aggregated_gradients,
        groups=_choose_groups(groups, 0),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _wrap(optimizer, name, options, list(layers))


def _choose_reduction(op: int, predivide: float) -> Any:
    reduction = choose_reduction(op, predivide)
    if reduction.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ArgumentError(f"op must be Average or Sum with Keras, got {reduction.op.name.title()}")
    return reduction


def _choose_groups(groups: Any, num_groups: int) -> int | list[list[Any]] | None:
    """Meaning of ``groups`` and of the older ``num_groups``."""
    chosen = groups if groups is not None else num_groups or None
    if chosen is None or (isinstance(chosen, int) and not isinstance(chosen, bool) and chosen >= 0):
        return chosen or None
    if isinstance(chosen, list) and all(isinstance(group, list) for group in chosen):
        members = [id(variable) for group in chosen for variable in group]
        if len(set(members)) == len(members):
            return chosen
    raise ArgumentError(f"groups must be a number of groups, or lists of variables, each in one list, got {chosen!r}")


def _wrap(optimizer: Any, name: str | None, options: ReduceOptions, layers: Sequence[Any]) -> Any:
    contexts.current()
    process_set_number(options.process_set)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentError(f"an optimizer of keras.optimizers is needed, got {type(optimizer).__name__}")
    _make_loss_scale_agree()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        config = optimizer.get_config()
        wrapped: Any = type(optimizer).from_config(config if name is None else {**config, "name": name})
        inner = _wrap(optimizer.inner_optimizer, None, options, layers)
        _take_state(wrapped, optimizer)
        wrapped.inner_optimizer = inner
        return wrapped
    if isinstance(optimizer, DistributedOptimizerMixin):
        raise ArgumentError("the optimizer is a DistributedOptimizer already")
    plain = type(optimizer)
    members = {
        "apply": load_backend().leave_uncompiled(DistributedOptimizerMixin.apply),
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "_reducer_options": options,
        "_reducer_layers": layers,
    }
    cls: Any = type(plain.__name__, (DistributedOptimizerMixin, plain), members)
    _register_like(plain, cls)
    config = optimizer.get_config()
    return _take_state(cls.from_config(config if name is None else {**config, "name": name}), optimizer)


def _register_like(plain: type, cls: type) -> None:
    """Have Keras write the wrapped class's registered name, if it has one, when an optimizer of ``cls`` is saved."""
    registered = keras.saving.get_registered_name(plain)
    if registered != plain.__name__:
        package, _, given = registered.rpartition(">")
        keras.saving.register_keras_serializable(package, given)(cls)
        keras.saving.get_custom_objects()[registered] = plain


def _take_state(wrapped: Any, optimizer: Any) -> Any:
    """Give a new optimizer the variables' values of the one that it was made of."""
    if not optimizer.built:
        return wrapped
    wrapped.build(list(optimizer._trainable_variables))
    values: dict[str, Any] = {}
    optimizer.save_own_variables(values)
    wrapped.load_own_variables(values)
    return wrapped


@functools.cache
def _make_loss_scale_agree() -> None:
    """Have LossScaleOptimizer decide alike on all ranks whether the gradients are finite.

    ``compile`` puts one around the optimizer by itself, and asks only it: it applies the gradients or skips the step,
    on each rank by its own gradients, so that some ranks would wait for the others' gradients in vain.
    """
    cls = keras.optimizers.LossScaleOptimizer
    check_finite = cls.check_finite

    @functools.wraps(check_finite)
    def check_finite_everywhere(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        inner = self.inner_optimizer
        return inner._reducer.all_finite(finite) if isinstance(inner, DistributedOptimizerMixin) else finite

    cls.check_finite = check_finite_everywhere
