"""A training step of TensorFlow that every mode shares: a loop of one's own, in one tf.function.

A mode decides how gradients come about and who applies them: nothing more (one rank alone), Reigen's tape, or a
strategy. The optimizer is TensorFlow's own, which every version of Keras and every strategy leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from benchmarks.harness.layers import MOMENTUM, Design, Layer, batch_of, design_of, first_weights, save_weights
from benchmarks.harness.work import Case


class TensorflowTraining:
    """One rank's training of one model: a `Work` whose operation is a whole step.

    Args:
        case: ``MODEL/anything``, and where to save the weights.
        rank: chooses the data.
        wrap_tape: gives what is asked for the gradients.
        run: calls a function of inputs and targets, within the tf.function.
        loss_factor: what the loss is multiplied by.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        *,
        wrap_tape: Callable[[tf.GradientTape], Any] = lambda tape: tape,
        run: Callable[..., Any] = lambda function, args: function(*args),
        loss_factor: float = 1.0,
    ) -> None:
        design = design_of(case)
        self._case, self._rank = case, rank
        self._first = first_weights(design)
        self._variables = [tf.Variable(array, name=f"weight_{number}") for number, array in enumerate(self._first)]
        optimizer = tf.compat.v1.train.MomentumOptimizer(design.learning_rate, MOMENTUM)
        inputs, targets = map(tf.constant, batch_of(design, rank))

        def replica_step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(design, outputs_of(design.layers, self._variables, inputs), targets) * loss_factor
            gradients = wrap_tape(tape).gradient(loss, self._variables)
            optimizer.apply_gradients(zip(gradients, self._variables, strict=True))
            return loss

        step = tf.function(lambda inputs, targets: run(replica_step, (inputs, targets)), autograph=False)
        self._step: Callable[[], Any] = lambda: step(inputs, targets)

    def prepare(self) -> None:
        """Nothing: the data is there."""

    def operate(self) -> None:
        """One step."""
        self._step()

    def check(self) -> None:
        """Save the weights before and after the warm-up.

        Raises:
            WrongResultError: they are not finite, or have not changed.
        """
        save_weights(self._case, self._rank, self._first, [variable.numpy() for variable in self._variables])

    def close(self) -> None:
        """Forget the model."""
        del self._step, self._variables


def outputs_of(layers: Sequence[Layer], weights: Sequence[Any], signal: tf.Tensor) -> tf.Tensor:
    """The forward pass."""
    remaining = iter(weights)
    for layer in layers:
        match layer.kind:
            case "dense":
                signal = tf.matmul(signal, next(remaining)) + next(remaining)
            case "conv":
                signal = tf.nn.conv2d(signal, next(remaining), 1, "VALID") + next(remaining)
            case "relu":
                signal = tf.nn.relu(signal)
            case "pool":
                signal = tf.nn.max_pool2d(signal, 2, 2, "VALID")
            case "flatten":
                signal = tf.reshape(signal, (signal.shape[0], -1))
    return signal


def loss_of(design: Design, outputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """The loss of a batch."""
    if design.num_classes:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs))
    return tf.reduce_mean(tf.square(outputs - targets))
