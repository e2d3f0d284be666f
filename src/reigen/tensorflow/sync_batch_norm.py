"""Batch normalisation over the batches of all ranks, for ``tf.keras``: Keras 3 on TensorFlow, or the legacy one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from reigen import context
from reigen.api.operations import Sum
from reigen.elastic import membership
from reigen.errors import ArgumentError
from reigen.tensorflow.gradients import without_serial_numbers
from reigen.tensorflow.graph import ask
from reigen.tensorflow.ops import allreduce


@tf.keras.utils.register_keras_serializable(package="Reigen")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalisation whose statistics are those of all ranks' batches taken together.

    While training, the mean, the variance, the moving statistics and the gradient of the input are those of one layer
    over the concatenated batch. Ranks may have batches of different sizes, empty ones too. Forward and backward are one
    small collective each, which every rank must run. In inference, and in a job of one rank, this is
    ``tf.keras.layers.BatchNormalization``. Keras does not compile a model with such a layer by XLA.

    Args:
        fused: accepted for Horovod's sake, as False.
        kwargs: of ``tf.keras.layers.BatchNormalization``.

    Raises:
        ArgumentError: ``fused``, or ``renorm``.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise ArgumentError("SyncBatchNormalization does not support fused=True")
        if kwargs.get("renorm") or kwargs.get("synchronized"):
            raise ArgumentError("SyncBatchNormalization does not support renorm=True, nor synchronized=True")
        is_legacy = tf.keras.Model.__module__.startswith("tf_keras.")
        super().__init__(**kwargs, **({"fused": False} if is_legacy else {}))
        self.supports_jit = False

    def _moments(self, inputs: Any, mask_or_axes: Any, *, keep_dims: bool | None = None, mask: Any = None) -> Any:
        """Keras 3 calls it as ``(inputs, mask)``, the legacy one as ``(inputs, axes, keep_dims=..., mask=...)``."""
        if context.current().size == 1 and not (membership.may_change() and not tf.executing_eagerly()):
            options = {} if keep_dims is None else {"keep_dims": keep_dims, "mask": mask}
            return super()._moments(inputs, mask_or_axes, **options)
        name = f"sync_batch_norm.{without_serial_numbers(getattr(self, 'path', None) or self.name)}"
        if keep_dims is None:
            return combined_moments(inputs, self._reduction_axes, mask_or_axes, name)
        mean, variance = combined_moments(inputs, mask_or_axes, mask, name)
        if keep_dims:
            shape = [1 if axis in mask_or_axes else extent for axis, extent in enumerate(inputs.shape)]
            mean, variance = tf.reshape(mean, shape), tf.reshape(variance, shape)
        return mean, variance


def combined_moments(x: Any, axes: Sequence[int], mask: Any, name: str) -> tuple[Any, Any]:
    """The mean and the variance of each channel over the batches of all ranks; differentiable.

    Each rank writes the count, the mean and the squared deviations of its own values into its row of a table of zeros;
    the sum of the tables is the list of all. Combined so, nothing is lost where means are large and deviations small.

    Args:
        x: this rank's values.
        axes: all but that of the channels.
        mask: which of the values count, of ``x``'s shape without the last dimension; None: all.
        name: matches the ranks' calls.

    Returns:
        Two vectors of ``x``'s dtype.
    """
    job = context.current()
    weights = tf.ones_like(x) if mask is None else tf.broadcast_to(tf.cast(mask, x.dtype)[..., tf.newaxis], tf.shape(x))
    count = tf.reduce_sum(weights, axes, keepdims=True)
    mean = tf.reduce_sum(x * weights, axes, keepdims=True) / tf.maximum(count, 1)
    squares = tf.reduce_sum(weights * tf.square(x - mean), axes)
    own = tf.stack([tf.cast(tf.reshape(part, [-1]), tf.float64) for part in (count, mean, squares)])
    rank, size = job.rank, job.size
    if membership.may_change() and not tf.executing_eagerly():  # those at the time when the graph runs
        rank, size = ask("rank"), ask("size")
    place = tf.reshape(tf.one_hot(rank, size, dtype=tf.float64), [-1, 1, 1])
    counts, means, deviations = tf.unstack(allreduce(place * own, op=Sum, name=name), axis=1)
    total = tf.maximum(tf.reduce_sum(counts, 0), 1)
    mean = tf.reduce_sum(counts * means, 0) / total
    variance = tf.reduce_sum(deviations + counts * tf.square(means - mean), 0) / total
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)
