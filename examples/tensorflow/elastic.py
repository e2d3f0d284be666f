"""Handwritten digits in an elastic job: kill a process while it trains, and the others go on.

    reigen run -np 4 --min-np 2 python examples/tensorflow/elastic.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

A step has --batch images of all ranks, whoever dies: they are dealt anew to those who are left. What was done since the
last commit is done again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import reigen.tensorflow as hvd

GOAL = 0.95  # of the test images


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="images of a step, of all ranks (default: %(default)s)")
    options = parser.parse_args()
    hvd.init()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    steps = len(train) // options.batch
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(128, activation="relu"), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
    weights, optimizer = model.trainable_variables, tf.keras.optimizers.SGD(0.1, momentum=0.9)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, step=0, accuracy=0.0)
    state.register_reset_callbacks([lambda: say(f"{hvd.size()} ranks go on at epoch {state.epoch}, step {state.step}")])

    @tf.function(reduce_retracing=True)
    def update(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / options.batch
        # Added up, for each rank has divided by the batch of all.
        gradients = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return hvd.allreduce(loss, op=hvd.Sum, name="loss")

    @hvd.elastic.run
    def fit(state: hvd.elastic.State) -> None:
        while state.epoch < options.epochs:
            start, first, loss = time.perf_counter(), state.step, tf.zeros(())
            batches = np.random.default_rng(state.epoch).permutation(train)[: steps * options.batch]
            for batch in batches.reshape(steps, options.batch)[state.step :]:
                mine = batch[hvd.rank() :: hvd.size()]
                loss = update(images[mine], labels[mine])
                state.step += 1
                if state.step % 10 == 0:
                    state.commit()  # a death goes back to here, and newcomers join here
            state.accuracy = float(np.mean(np.argmax(model(images[test]), 1) == labels[test]))
            took = time.perf_counter() - start  # of an epoch, or of what was left of it
            rate, left = (state.step - first) * options.batch / took, (options.epochs - state.epoch - 1) * took
            line = f"epoch {state.epoch + 1:3}/{options.epochs}  {hvd.size()} ranks  accuracy {state.accuracy:.4f}"
            say(f"{line}  loss {float(loss):.4f}  {rate:,.0f} samples/s  ETA {left:.0f} s")
            state.epoch, state.step = state.epoch + 1, 0
            state.commit()

    fit(state)
    say(f"test accuracy {state.accuracy:.4f}, wanted {GOAL}")
    return 0 if state.accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
