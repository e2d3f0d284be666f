"""ResNet-50 on ImageNet with a loop of one's own in TensorFlow, in mixed precision.

    reigen run -np 2 python examples/tensorflow/imagenet_resnet50.py
    reigen run -np 8 python examples/tensorflow/imagenet_resnet50.py --data imagenet --classes 1000 --image-size 224 \\
        --batch 2048 --micro-batch 256 --epochs 90 --drop-epochs 30 60 80 --warmup-epochs 5 --checkpoint resnet50

--data has train/CLASS/*.JPEG and val/CLASS/*.JPEG; without it, a few pictures are drawn. A step of --batch images, on
all ranks together, is cut into micro-batches: each rank takes several of them one after the other where the ranks are
few. Batch normalisation looks at a micro-batch, so the number of ranks does not matter to the weights; its running
averages differ a little. --checkpoint is a directory here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from imagenet_data import Images, make_parser, parse
from progress import Progress
from resnet import BLOCKS, make_resnet

import reigen.tensorflow as hvd


def rate_of(options: argparse.Namespace, steps: int, step: int) -> float:
    """The learning rate: it grows during the first epochs, and falls to a tenth at each of --drop-epochs."""
    warmup = min(1.0, (step + 1) / max(1.0, options.warmup_epochs * steps))
    drops = sum(step >= epoch * steps for epoch in options.drop_epochs)
    return options.lr * options.batch / 256 * warmup * 0.1**drops


def evaluate(model: tf.keras.Model, test: tf.data.Dataset, count: int) -> float:
    """The share of all `count` images that is recognised; each rank looks at its part, with averages of all ranks."""
    averages = [variable.value for variable in model.non_trainable_variables]
    for variable, average in zip(averages, hvd.grouped_allreduce(averages, name="averages"), strict=True):
        variable.assign(average)
    predict = tf.function(model, reduce_retracing=True)
    right = sum(int(np.count_nonzero(np.argmax(predict(images), 1) == labels)) for images, labels in test)
    return float(hvd.allreduce(tf.constant(float(right)), name="right", op=hvd.Sum)) / count


def train(options: argparse.Namespace, directory: Path) -> tuple[float, float]:
    """Accuracy, and mean loss of the last epoch."""
    data, test = (Images(options, directory, part, hvd.rank(), hvd.size()) for part in ("train", "val"))
    tf.keras.utils.set_random_seed(0)
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16" if options.dtype == "bfloat16" else "float32")
    model = make_resnet(options.layers, options.classes, options.image_size)
    weights = model.trainable_variables
    optimizer = tf.keras.optimizers.SGD(momentum=0.9)
    optimizer.build(weights)
    sums = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in weights]
    loss_of = tf.keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=options.label_smoothing)
    epoch_done = tf.Variable(0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch_done)
    manager = tf.train.CheckpointManager(checkpoint, options.checkpoint, max_to_keep=1) if options.checkpoint else None
    if manager and hvd.rank() == 0:
        checkpoint.restore(manager.latest_checkpoint)
    hvd.broadcast_variables([*model.variables, *optimizer.variables, epoch_done], root_rank=0)

    @tf.function
    def compute(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Add the gradients of a micro-batch to those of this rank."""
        with tf.GradientTape() as tape:
            loss = loss_of(tf.one_hot(labels, options.classes), model(images, training=True))
        for total, gradient in zip(sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(gradient / options.passes)
        return loss

    @tf.function
    def update() -> None:
        """Average the gradients of all ranks, and apply them, with a decay of the weights."""
        gradients = hvd.grouped_allreduce([total.read_value() for total in sums], name="gradients")
        decayed = [gradient + 1e-4 * weight for gradient, weight in zip(gradients, weights, strict=True)]
        optimizer.apply_gradients(zip(decayed, weights, strict=True))
        for total in sums:
            total.assign(tf.zeros_like(total))

    mean, first = float("nan"), int(epoch_done)
    accuracy = evaluate(model, test.test(), len(test)) if first >= options.epochs else 0.0  # it was done already
    progress = Progress((options.epochs - first) * data.steps * options.batch, is_shown=hvd.rank() == 0)
    for epoch in range(first, options.epochs):
        losses: list[tf.Tensor] = []
        for images, labels in data.train(epoch):
            losses.append(compute(images, labels))
            progress.add(options.micro_batch * hvd.size(), losses[-1])
            if len(losses) % options.passes == 0:
                step = epoch * data.steps + len(losses) // options.passes - 1
                optimizer.learning_rate.assign(rate_of(options, data.steps, step))
                update()
        mean = float(hvd.allreduce(tf.reduce_mean(tf.stack(losses)), name="loss"))
        accuracy = evaluate(model, test.test(), len(test))
        epoch_done.assign(epoch + 1)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {mean:.4f}  accuracy {accuracy:.4f}", flush=True)
        if hvd.rank() == 0 and manager:
            manager.save()
    return accuracy, mean


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, choices=BLOCKS, default=50, help="default: %(default)s")
    hvd.init()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    options = parse(parser, hvd.size())
    with tempfile.TemporaryDirectory() as made:
        accuracy, loss = train(options, Path(made))
    if hvd.rank() == 0:
        how = f"{hvd.size()} rank(s), ResNet-{options.layers}, {options.dtype}"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; last epoch's loss {loss:.6f}", flush=True)
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
