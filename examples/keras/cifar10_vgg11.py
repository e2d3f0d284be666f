"""VGG-11 on CIFAR-10 with Keras 3, by allreduce or by parameter servers.

    export KERAS_BACKEND=torch
    reigen run -np 2 python examples/keras/cifar10_vgg11.py --kvstore ring
    reigen run -np 2 -s 1 python examples/keras/cifar10_vgg11.py --kvstore dist_sync
    reigen launch --launcher local -n 2 -s 1 python examples/keras/cifar10_vgg11.py --kvstore dist_sync

Any backend will do: tensorflow, jax or torch. CIFAR-10's binary version (data_batch_1.bin and so on,
https://www.cs.toronto.edu/~kriz/cifar.html) is read from --data; without it, small pictures are drawn. --batch is that
of all ranks together, so that their number does not matter.
"""

from __future__ import annotations

import sys
from typing import Any

import cifar10_data
import generated_data
import keras
import numpy as np
from common import Show, choose_device
from progress import Progress

import reigen.keras as hvd
from reigen import kv, optim


class Batches(cifar10_data.Batches, keras.utils.PyDataset):
    """`cifar10_data.Batches` as ``fit`` wants them."""

    def __init__(self, *args: Any) -> None:
        keras.utils.PyDataset.__init__(self)
        cifar10_data.Batches.__init__(self, *args)


class StoreOptimizer(keras.optimizers.Optimizer):
    """Has the servers of a store update the weights: pushes the gradients and pulls the weights.

    It needs values, so it runs in a step that is not compiled: ``compile(run_eagerly=True)``.

    Args:
        store: whose sums are of the gradients of all ranks.
        optimizer: what the servers do with them.
    """

    def __init__(self, store: kv.KVStore, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer.learning_rate)
        store.set_optimizer(optimizer)
        self._store = store

    def start(self, variables: list[keras.Variable]) -> None:
        """Make the keys: rank 0's weights are those of all."""
        self.build(variables)
        self._keys = list(range(len(variables)))
        self._weights = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
        self._store.broadcast(self._keys, self._weights, self._weights)
        for variable, weight in zip(variables, self._weights, strict=True):
            variable.assign(weight)

    def apply(self, grads: list[Any], trainable_variables: list[keras.Variable] | None = None) -> None:
        gradients = [keras.ops.convert_to_numpy(gradient) for gradient in grads]
        self._store.pushpull(self._keys, gradients, out=self._weights)
        for variable, weight in zip(trainable_variables or self._trainable_variables, self._weights, strict=True):
            variable.assign(np.array(weight))


def make_model(factor: float) -> keras.Model:
    """Configuration A of https://arxiv.org/abs/1409.1556 for 32 x 32 pixels: one linear layer, as is usual there."""
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for width in cifar10_data.VGG11:
        if isinstance(width, str):
            layers.append(keras.layers.MaxPooling2D(2))
        else:
            options = {"padding": "same", "activation": "relu", "kernel_initializer": "he_normal"}
            layers.append(keras.layers.Conv2D(int(width * factor), 3, **options))
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(generated_data.CLASSES)])


def main() -> int:
    parser = cifar10_data.make_parser(__doc__, ["ring", "dist_sync"])
    options = parser.parse_args()
    store = kv.create(options.kvstore)  # in a server that `reigen launch` has started, this is all
    hvd.init()
    cifar10_data.check(parser, options, hvd.size())
    choose_device(hvd.local_rank())
    keras.utils.set_random_seed(0)
    model = make_model(options.width)
    images, labels, test_images, test_labels = cifar10_data.load(options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if options.kvstore == "ring":  # Keras's own optimizer: the store is not needed
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(options.lr)), loss=loss)
        hvd.broadcast_variables(model.variables, root_rank=0)
    else:
        averaged = {"rescale_grad": 1 / hvd.size(), "epsilon": 1e-7}  # the store adds up; Keras's epsilon
        by_servers = StoreOptimizer(store, optim.create("adam", learning_rate=options.lr, **averaged))
        by_servers.start(model.trainable_variables)
        model.compile(optimizer=by_servers, loss=loss, run_eagerly=True)
    progress = Progress(options.epochs * (len(labels) // options.batch) * options.batch, is_shown=hvd.rank() == 0)
    callbacks = [hvd.callbacks.MetricAverageCallback(), Show(progress, options.batch)]
    for epoch in range(options.epochs):
        rate = cifar10_data.rate_of(options, epoch)
        if options.kvstore == "ring":
            model.optimizer.learning_rate = rate
        else:
            store.set_learning_rate(rate)
        batches = Batches(images, labels, options, epoch, hvd.rank(), hvd.size())
        history = model.fit(batches, verbose=0, shuffle=False, callbacks=callbacks)
        guesses = model.predict(cifar10_data.scale(test_images), verbose=0).argmax(1)
        accuracy = float((guesses == test_labels).mean())
        if hvd.rank() == 0:
            mean = history.history["loss"][0]
            print(f"epoch {epoch + 1}/{options.epochs}  loss {mean:.4f}  accuracy {accuracy:.4f}", flush=True)
    norm = sum(float(np.square(weights.astype(np.float64)).sum()) for weights in model.get_weights()) ** 0.5
    if hvd.rank() == 0:
        how = f"{keras.backend.backend()}, {options.kvstore}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; norm of the weights {norm:.6f}")
    store.close()
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
