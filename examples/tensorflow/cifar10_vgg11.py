"""VGG-11 on CIFAR-10 with a loop of one's own in TensorFlow, by parameter servers or by allreduce.

    reigen run -np 2 -s 1 python examples/tensorflow/cifar10_vgg11.py --kvstore dist_sync
    reigen launch --launcher local -n 2 -s 1 python examples/tensorflow/cifar10_vgg11.py --kvstore dist_sync
    reigen run -np 2 python examples/tensorflow/cifar10_vgg11.py --kvstore ring
    python examples/tensorflow/cifar10_vgg11.py --kvstore local

CIFAR-10's binary version (data_batch_1.bin and so on, https://www.cs.toronto.edu/~kriz/cifar.html) is read from --data;
without it, small pictures are drawn. --batch is that of all workers together, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import generated_data
import numpy as np
import tensorflow as tf
from cifar10_data import VGG11, Batches, check, load, make_parser, rate_of, scale
from progress import Progress

import reigen.tensorflow as hvd
from reigen import kv, optim


def make_model(factor: float) -> tf.keras.Model:
    """Configuration A of https://arxiv.org/abs/1409.1556 for 32 x 32 pixels: one linear layer, as is usual there."""
    layers: list[Any] = [tf.keras.Input((32, 32, 3))]
    for width in VGG11:
        if isinstance(width, str):
            layers.append(tf.keras.layers.MaxPooling2D(2))
        else:
            options = {"padding": "same", "activation": "relu", "kernel_initializer": "he_normal"}
            layers.append(tf.keras.layers.Conv2D(int(width * factor), 3, **options))
    head = [tf.keras.layers.Flatten(), tf.keras.layers.Dense(generated_data.CLASSES)]
    return tf.keras.Sequential([*layers, *head])


def train(options: argparse.Namespace, store: kv.KVStore) -> float:
    """The accuracy."""
    images, labels, test_images, test_labels = load(options)
    tf.keras.utils.set_random_seed(0)
    model = make_model(options.width)
    variables = model.trainable_variables

    @tf.function(reduce_retracing=True)
    def gradients_of(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_sum(losses) / options.batch
        return loss, tape.gradient(loss, variables)

    def accuracy_of_test() -> float:
        guesses = model.predict(scale(test_images), batch_size=256, verbose=0).argmax(1)
        return float((guesses == test_labels).mean())

    accuracy = 0.0
    # The store takes arrays of NumPy. On servers or on the workers, Reigen's optimizer updates the weights.
    weights, keys = [np.array(variable) for variable in variables], list(range(len(variables)))
    store.set_optimizer(optim.create("adam", learning_rate=options.lr))
    store.broadcast(keys, weights, weights)
    for variable, weight in zip(variables, weights, strict=True):
        variable.assign(weight)
    progress = Progress(options.epochs * (len(labels) // options.batch) * options.batch, is_shown=hvd.rank() == 0)
    for epoch in range(options.epochs):
        store.set_learning_rate(rate_of(options, epoch))
        for part, part_labels in Batches(images, labels, options, epoch, hvd.rank(), hvd.size()):
            loss, gradients = gradients_of(part, part_labels)
            # The gradients of all workers are added up.
            store.pushpull(keys, [gradient.numpy() for gradient in gradients], out=weights)
            for variable, weight in zip(variables, weights, strict=True):
                variable.assign(weight)
            progress.add(options.batch, loss * hvd.size())
        accuracy = accuracy_of_test()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  accuracy {accuracy:.4f}", flush=True)
    norm = sum(float(np.square(weight.astype(np.float64)).sum()) for weight in weights) ** 0.5
    if hvd.rank() == 0:
        how = f"{options.kvstore}, {hvd.size()} worker(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; norm of the weights {norm:.6f}")
    return accuracy


def main() -> int:
    parser = make_parser(__doc__, ["dist_sync", "ring", "local"])
    options = parser.parse_args()
    with kv.create(options.kvstore) as store:  # in a server that `reigen launch` has started, this is all
        hvd.init()
        check(parser, options, hvd.size())
        if gpus := tf.config.list_physical_devices("GPU"):
            tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
        accuracy = train(options, store)
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
