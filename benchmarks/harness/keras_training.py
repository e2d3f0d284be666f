"""Training by Keras that every mode shares, as ``model.fit`` does it; Keras 3 or the legacy Keras, on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from benchmarks.harness.layers import MOMENTUM, Design, Layer, batch_of, design_of, first_weights, save_weights
from benchmarks.harness.work import Case

#: Steps of one operation.
NUM_STEPS = 10


class KerasTraining:
    """One rank's training of one model: a `Work` whose operation is `NUM_STEPS` calls of what `fit` calls for a step.

    The first operation begins with a `fit` of one step, which makes that function. Calls of `fit` would add what it
    costs to begin and end one, which was more than the steps of small models.

    Args:
        keras: the module, ``keras`` or ``tf_keras``.
        case: ``MODEL/anything``, and where to save the weights.
        rank: chooses the data.
        wrap_optimizer: gives what the model is compiled with.
        wrap_data: gives what `fit` reads.
        scope: where the model is made.
    """

    def __init__(
        self,
        keras: Any,
        case: Case,
        rank: int,
        *,
        wrap_optimizer: Callable[[Any], Any] = lambda optimizer: optimizer,
        wrap_data: Callable[[tf.data.Dataset], Any] = lambda dataset: dataset,
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        design = design_of(case)
        self._case, self._rank = case, rank
        self._first = first_weights(design)
        with scope():
            self._model = keras.Sequential([keras.Input(design.batch[1:]), *layers_of(keras, design.layers)])
            self._model.set_weights(self._first)
            optimizer = keras.optimizers.SGD(design.learning_rate, momentum=MOMENTUM)
            self._model.compile(wrap_optimizer(optimizer), loss_of(keras, design))
        self._data = wrap_data(tf.data.Dataset.from_tensors(batch_of(design, rank)).repeat())
        self._batches: Any = None

    def prepare(self) -> None:
        """Nothing: the data is there."""

    def operate(self) -> None:
        """Some steps."""
        if self._batches is None:
            self._model.fit(self._data, steps_per_epoch=1, verbose=0)
            self._batches = iter(self._data)
        for _ in range(NUM_STEPS):
            self._model.train_function(self._batches)

    def check(self) -> None:
        """Save the weights before and after the warm-up.

        Raises:
            WrongResultError: they are not finite, or have not changed.
        """
        save_weights(self._case, self._rank, self._first, self._model.get_weights())

    def close(self) -> None:
        """Forget the model."""
        del self._model, self._data, self._batches


def layers_of(keras: Any, layers: Sequence[Layer]) -> list[Any]:
    """Keras' layers."""
    made: list[Any] = []
    for layer in layers:
        match layer.kind:
            case "dense":
                made.append(keras.layers.Dense(layer.kernel[-1]))
            case "conv":
                made.append(keras.layers.Conv2D(layer.kernel[-1], layer.kernel[:2]))
            case "relu":
                made.append(keras.layers.ReLU())
            case "pool":
                made.append(keras.layers.MaxPooling2D())
            case "flatten":
                made.append(keras.layers.Flatten())
    return made


def loss_of(keras: Any, design: Design) -> Any:
    """The loss of a batch."""
    if design.num_classes:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.losses.MeanSquaredError()
