"""A training step of JAX that every mode shares: loss, gradients and optax's SGD in one jit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness.layers import MOMENTUM, Design, Layer, batch_of, design_of, first_weights, save_weights
from benchmarks.harness.work import Case

#: Weights, the optimizer's state, inputs, targets -> weights and state.
Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class JaxTraining:
    """One rank's training of one model: a `Work` whose operation is a whole step.

    Args:
        case: ``MODEL/anything``, and where to save the weights.
        rank: chooses the data.
        wrap_optimizer: gives what updates.
        reduce_gradients: within the program; it sees the gradients of this rank.
        compile_step: makes a program of a step; it may write into the memory of weights and state.
        place_shared: puts what is the same on all ranks where the program reads it.
        place_own: the same for what is this rank's.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        *,
        wrap_optimizer: Callable[[optax.GradientTransformation], Any] = lambda optimizer: optimizer,
        reduce_gradients: Callable[[Any], Any] = lambda gradients: gradients,
        compile_step: Callable[[Step], Step] = lambda step: jax.jit(step, donate_argnums=(0, 1)),
        place_shared: Callable[[Any], Any] = jnp.array,
        place_own: Callable[[Any], Any] = jnp.array,
    ) -> None:
        design = design_of(case)
        self._case, self._rank = case, rank
        self._first = first_weights(design)
        optimizer = wrap_optimizer(optax.sgd(design.learning_rate, MOMENTUM))

        def loss(weights: Any, inputs: Any, targets: Any) -> Any:
            return loss_of(design, outputs_of(design.layers, weights, inputs), targets)

        def step(weights: Any, state: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
            gradients = reduce_gradients(jax.grad(loss)(weights, inputs, targets))
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state

        self._step = compile_step(step)
        self._batch = [place_own(array) for array in batch_of(design, rank)]
        self._weights = [place_shared(array) for array in self._first]
        self._state = jax.tree.map(place_shared, optimizer.init(self._first))

    def prepare(self) -> None:
        """Nothing: the data is there."""

    def operate(self) -> None:
        """One step."""
        self._weights, self._state = jax.block_until_ready(self._step(self._weights, self._state, *self._batch))

    def check(self) -> None:
        """Save the weights before and after the warm-up.

        Raises:
            WrongResultError: they are not finite, or have not changed.
        """
        now = [np.asarray(array.addressable_data(0)) for array in self._weights]
        save_weights(self._case, self._rank, self._first, now)

    def close(self) -> None:
        """Forget the model."""
        del self._step, self._weights, self._state


def outputs_of(layers: Sequence[Layer], weights: Sequence[Any], signal: Any) -> Any:
    """The forward pass."""
    remaining = iter(weights)
    for layer in layers:
        match layer.kind:
            case "dense":
                signal = signal @ next(remaining) + next(remaining)
            case "conv":
                dimensions = ("NHWC", "HWIO", "NHWC")
                signal = jax.lax.conv_general_dilated(
                    signal, next(remaining), (1, 1), "VALID", dimension_numbers=dimensions
                ) + next(remaining)
            case "relu":
                signal = jax.nn.relu(signal)
            case "pool":
                signal = jax.lax.reduce_window(signal, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            case "flatten":
                signal = signal.reshape(signal.shape[0], -1)
    return signal


def loss_of(design: Design, outputs: Any, targets: Any) -> Any:
    """The loss of a batch."""
    if design.num_classes:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
    return jnp.mean(jnp.square(outputs - targets))
