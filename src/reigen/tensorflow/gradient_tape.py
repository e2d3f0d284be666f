"""DistributedGradientTape: a tape whose gradients all ranks agree on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from reigen.api.operations import Average
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.errors import ArgumentError
from reigen.tensorflow.compression import Compression
from reigen.tensorflow.gradients import GradientReducer


class _DistributedTape:
    """Methods that a distributed tape has before those of the user's class.

    It shares the user's tape's state, all but what is in slots.
    """

    __slots__ = ()
    _reducer: GradientReducer
    _own_class: type[tf.GradientTape]

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Compute gradients as ``tf.GradientTape.gradient`` does, and reduce them over all ranks.

        Args:
            target: what is differentiated.
            sources: by what; a variable or tensor, or a nested structure of them, the same on every rank.
            output_gradients: of the target.
            unconnected_gradients: NONE: a source that the target does not depend on has None, on every rank. ZERO: it
                has zeros, so that ranks may differ in this.
            use_generic_names: the operations' names do not have the variables' in them.

        Returns:
            Reduced gradients, in the structure of ``sources``.

        Raises:
            FailedPreconditionError: ranks have other sources, gradients where others have None, or other shapes; on
                every rank.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        name = "gradients.of_sources" if use_generic_names else "gradients"
        reduced = self._reducer.reduce(tf.nest.flatten(own), tf.nest.flatten(sources), name)
        return tf.nest.pack_sequence_as(own, reduced)

    def jacobian(self, *args: Any, **options: Any) -> Any:
        """Compute this rank's own Jacobian: nothing is reduced."""
        return self._plain().jacobian(*args, **options)

    def batch_jacobian(self, *args: Any, **options: Any) -> Any:
        """Compute this rank's own Jacobian: nothing is reduced."""
        return self._plain().batch_jacobian(*args, **options)

    def register_local_source(self, source: tf.Variable) -> None:
        """Leave the gradient of a variable alone: it is this rank's own."""
        self._reducer.register_local(source)

    def get_local_and_global_gradients(
        self, gradients: Iterable[Any], sources: Iterable[Any]
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Divide gradients into those of local sources and those that were reduced, as pairs ``(gradient, source)``."""
        pairs = list(zip(gradients, sources, strict=True))
        local = [pair for pair in pairs if self._reducer.is_local(pair[1])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[1])]

    def _plain(self) -> Any:
        plain = object.__new__(self._own_class)
        plain.__dict__ = self.__dict__
        return plain


@functools.cache
def _distributed_class(own: Any) -> Any:
    return type(own.__name__, (_DistributedTape, own), {"__slots__": ("_reducer",), "_own_class": own})


def DistributedGradientTape(  # noqa: N802 - the name is Horovod's, and what it returns is a tape
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a tape whose ``gradient()`` returns gradients reduced over all ranks.

    It shares its state with the given tape, before, inside and after the ``with`` block, and may be used in eager code
    and in ``tf.function``. All dense gradients are one operation, or one for each of the ``groups``. The sources must
    be the same on every rank, in the same order. In a job of one rank this is a plain tape, but for
    ``sparse_as_dense``.

    Args:
        gradtape: any tape of TensorFlow's; persistent ones, too.
        device_dense: accepted for Horovod's sake.
        device_sparse: accepted for Horovod's sake.
        compression: the element type in which gradients travel.
        sparse_as_dense: reduce IndexedSlices as dense tensors; otherwise their indices and values are gathered.
        op: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        num_groups: deprecated; use ``groups``.
        groups: how many groups, or lists of variables: what is reduced together. By default all gradients.
        process_set: the ranks that average among themselves. A rank outside it keeps its own gradients.
        scale_local_gradients: gradients of local sources are divided by the number of ranks.

    Raises:
        ArgumentError: an argument makes no sense.

    Example::

        with tf.GradientTape() as tape:
            loss = compute_loss(model(x), y)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
    """
    del device_dense, device_sparse
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _DistributedTape):
        raise ArgumentError(f"gradtape should be a tf.GradientTape that is not distributed yet, got {gradtape!r}")
    own: Any = type(gradtape)
    tape = object.__new__(_distributed_class(own))
    tape._reducer = GradientReducer(
        op,
        gradient_predivide_factor,
        compression,
        sparse_as_dense=sparse_as_dense,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    tape.__dict__ = gradtape.__dict__
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - as above
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a `DistributedGradientTape` that leaves the variables of ``local_layers`` (one, or several) alone."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in list_local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def list_local_variables(local_layers: Any) -> list[Any]:
    """The trainable variables of a layer, or of layers; none of None.

    Raises:
        ArgumentError: something in it is no layer.
    """
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise ArgumentError(f"local_layers should be a layer of Keras or a list of them, got {local_layers!r}")
    return [variable for layer in layers for variable in layer.trainable_weights]
