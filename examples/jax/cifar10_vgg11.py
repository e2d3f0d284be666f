"""VGG-11 on CIFAR-10 with JAX and Flax, by parameter servers or by allreduce.

    reigen run -np 2 -s 1 python examples/jax/cifar10_vgg11.py --kvstore dist_sync
    reigen launch --launcher local -n 2 -s 1 python examples/jax/cifar10_vgg11.py --kvstore dist_sync
    reigen run -np 2 python examples/jax/cifar10_vgg11.py --kvstore ring
    python examples/jax/cifar10_vgg11.py --kvstore local

CIFAR-10's binary version (data_batch_1.bin and so on, https://www.cs.toronto.edu/~kriz/cifar.html) is read from --data;
without it, small pictures are drawn. --batch is that of all workers together, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import flax.linen as nn
import generated_data
import jax
import numpy as np
import optax
from cifar10_data import VGG11, Batches, check, load, make_parser, rate_of, scale
from progress import Progress

import reigen.jax as rj
from reigen import kv, optim


class Vgg11(nn.Module):
    """Configuration A of https://arxiv.org/abs/1409.1556 for 32 x 32 pixels: one linear layer, as is usual there."""

    factor: float

    @nn.compact
    def __call__(self, x: Any) -> jax.Array:
        for width in VGG11:
            if isinstance(width, str):
                x = nn.max_pool(x, (2, 2), (2, 2))
            else:
                he_normal = nn.initializers.he_normal()
                x = nn.relu(nn.Conv(int(width * self.factor), (3, 3), kernel_init=he_normal)(x))
        return nn.Dense(generated_data.CLASSES)(x.reshape(len(x), -1))


def train(options: argparse.Namespace, store: kv.KVStore) -> float:
    """The accuracy."""
    images, labels, test_images, test_labels = load(options)
    net = Vgg11(options.width)
    params = jax.jit(net.init)(jax.random.key(0), scale(images[:1]))
    leaves, tree = jax.tree.flatten(params)

    @jax.jit
    def gradient_of(leaves: list[Any], images: np.ndarray, labels: np.ndarray) -> tuple[jax.Array, list[jax.Array]]:
        def loss_of(leaves: list[Any]) -> jax.Array:
            logits = net.apply(jax.tree.unflatten(tree, leaves), images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum() / options.batch

        return jax.value_and_grad(loss_of)(leaves)

    @jax.jit
    def guess(leaves: list[Any], images: np.ndarray) -> jax.Array:
        return net.apply(jax.tree.unflatten(tree, leaves), images).argmax(1)

    accuracy = 0.0
    # The store takes arrays of NumPy. On servers or on the workers, Reigen's optimizer updates the weights.
    weights, keys = [np.array(leaf) for leaf in leaves], list(range(len(leaves)))
    store.set_optimizer(optim.create("adam", learning_rate=options.lr))
    store.broadcast(keys, weights, weights)
    progress = Progress(options.epochs * (len(labels) // options.batch) * options.batch, is_shown=rj.rank() == 0)
    for epoch in range(options.epochs):
        store.set_learning_rate(rate_of(options, epoch))
        for part, part_labels in Batches(images, labels, options, epoch, rj.rank(), rj.size()):
            loss, gradients = gradient_of(weights, part, part_labels)
            # The gradients of all workers are added up.
            store.pushpull(keys, [np.asarray(gradient) for gradient in gradients], out=weights)
            progress.add(options.batch, float(loss) * rj.size())
        accuracy = float((np.asarray(guess(weights, scale(test_images))) == test_labels).mean())
        if rj.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  accuracy {accuracy:.4f}", flush=True)
    norm = sum(float(np.square(weight.astype(np.float64)).sum()) for weight in weights) ** 0.5
    if rj.rank() == 0:
        how = f"{options.kvstore}, {rj.size()} worker(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; norm of the weights {norm:.6f}")
    return accuracy


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    parser = make_parser(__doc__, ["dist_sync", "ring", "local"])
    options = parser.parse_args()
    with kv.create(options.kvstore) as store:  # in a server that `reigen launch` has started, this is all
        rj.init()
        check(parser, options, rj.size())
        accuracy = train(options, store)
    rj.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
