"""ResNet-50 on ImageNet with Flax and optax, in mixed precision.

    reigen run -np 2 python examples/jax/imagenet_resnet50.py
    reigen run -np 8 python examples/jax/imagenet_resnet50.py --data imagenet --classes 1000 --image-size 224 \\
        --batch 2048 --micro-batch 256 --epochs 90 --drop-epochs 30 60 80 --warmup-epochs 5 \\
        --checkpoint resnet50.msgpack

TensorFlow reads the images. --data has train/CLASS/*.JPEG and val/CLASS/*.JPEG; without it, a few pictures are drawn. A
step of --batch images, on all ranks together, is cut into micro-batches: each rank takes several of them one after the
other where the ranks are few. Batch normalisation looks at a micro-batch, so the number of ranks does not matter to
the weights; its running averages, over all images of an epoch, differ a little. It computes on processors: within
jax.jit, collectives are for these only (docs/jax.md).
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
from flax import serialization
from imagenet_data import Images, make_parser, parse
from progress import Progress
from resnet import BLOCKS, ResNet

import reigen.jax as rj

Tree = Any  # of arrays


def make_optimizer(options: argparse.Namespace, steps: int) -> Any:
    """SGD, whose rate grows during the first epochs, and falls to a tenth at each of --drop-epochs."""
    rate, warmup = options.lr * options.batch / 256, max(1.0, options.warmup_epochs * steps)

    def schedule(step: jax.Array) -> jax.Array:
        drops = sum(step >= epoch * steps for epoch in options.drop_epochs)
        return rate * jnp.minimum(1.0, (step + 1) / warmup) * 0.1**drops

    return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(schedule, momentum=0.9))


@functools.partial(jax.jit, static_argnums=0)
def count(net: ResNet, params: Tree, averages: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """How many images are recognised."""
    logits = net.apply({"params": params, "batch_stats": averages}, images, train=False)
    return (logits.argmax(1) == labels).sum()


def evaluate(net: ResNet, params: Tree, averages: Tree, test: Images) -> float:
    """The share that is recognised; each rank looks at its part."""
    right = sum(int(count(net, params, averages, *batch)) for batch in test.test().as_numpy_iterator())
    return float(rj.allreduce(np.float64(right), op=rj.Sum, name="right")) / len(test)


def train(options: argparse.Namespace, directory: Path) -> tuple[float, float]:
    """Accuracy, and mean loss of the last epoch."""
    data, test = (Images(options, directory, part, rj.rank(), rj.size()) for part in ("train", "val"))
    net = ResNet(options.layers, options.classes, jnp.dtype(options.dtype))
    one = jnp.zeros((1, options.image_size, options.image_size, 3))
    made = jax.jit(functools.partial(net.init, train=False))(jax.random.key(0), one)
    inner = make_optimizer(options, data.steps)
    saved = {"epoch": 0, "params": made["params"], "averages": made["batch_stats"], "inner": inner.init(made["params"])}
    if options.checkpoint and rj.rank() == 0 and options.checkpoint.exists():
        saved = serialization.from_bytes(saved, options.checkpoint.read_bytes())
    saved = rj.broadcast_parameters(saved, root_rank=0)
    params, averages, first = saved["params"], saved["averages"], int(saved["epoch"])
    # It sums up the gradients of so many micro-batches before it reduces them; `inner` sees steps only.
    several = {"backward_passes_per_step": options.passes, "average_aggregated_gradients": True}
    optimizer = rj.distributed(inner, **several)
    state = optimizer.init(params)
    state = state._replace(inner=saved["inner"]) if options.passes > 1 else saved["inner"]

    def loss_of(params: Tree, averages: Tree, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Tree]:
        variables = {"params": params, "batch_stats": averages}
        logits, changed = net.apply(variables, images, train=True, mutable="batch_stats")
        wanted = optax.smooth_labels(jax.nn.one_hot(labels, options.classes), options.label_smoothing)
        return optax.softmax_cross_entropy(logits, wanted).mean(), changed["batch_stats"]

    @jax.jit
    def step(params: Tree, averages: Tree, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, ...]:
        (loss, averages), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, averages, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), averages, state, loss

    mean = float("nan")
    accuracy = evaluate(net, params, averages, test) if first >= options.epochs else 0.0  # it was done already
    progress = Progress((options.epochs - first) * data.steps * options.batch, is_shown=rj.rank() == 0)
    for epoch in range(first, options.epochs):
        losses = []
        for images, labels in data.train(epoch).as_numpy_iterator():
            params, averages, state, loss = step(params, averages, state, images, labels)
            losses.append(float(loss))
            progress.add(options.micro_batch * rj.size(), losses[-1])
        mean = float(rj.allreduce(np.float64(np.mean(losses)), name="loss"))
        averages = rj.allreduce(averages, name="averages")
        accuracy = evaluate(net, params, averages, test)
        if rj.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {mean:.4f}  accuracy {accuracy:.4f}", flush=True)
        if rj.rank() == 0 and options.checkpoint:
            now = state.inner if options.passes > 1 else state
            parts = {"epoch": epoch + 1, "params": params, "averages": averages, "inner": now}
            written = options.checkpoint.with_suffix(".new")  # who is killed meanwhile leaves the old one
            written.write_bytes(serialization.to_bytes(parts))
            written.replace(options.checkpoint)
    return accuracy, mean


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, choices=BLOCKS, default=50, help="default: %(default)s")
    parser.set_defaults(epochs=4, drop_epochs=[3])  # enough here, where running averages are of a whole epoch
    tf.config.set_visible_devices([], "GPU")
    rj.init()
    options = parse(parser, rj.size())
    with tempfile.TemporaryDirectory() as made:
        accuracy, loss = train(options, Path(made))
    if rj.rank() == 0:
        how = f"{rj.size()} rank(s), ResNet-{options.layers}, {options.dtype}"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; last epoch's loss {loss:.6f}", flush=True)
    rj.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
