"""ResNet-50 on ImageNet with Keras 3, in mixed precision.

    KERAS_BACKEND=tensorflow reigen run -np 2 python examples/keras/imagenet_resnet50.py
    KERAS_BACKEND=torch reigen run -np 8 python examples/keras/imagenet_resnet50.py --data imagenet --classes 1000 \\
        --image-size 224 --batch 2048 --micro-batch 256 --epochs 90 --drop-epochs 30 60 80 --warmup-epochs 5 \\
        --checkpoint resnet50.npz

Any backend will do: tensorflow, jax or torch; TensorFlow reads the images. --data has train/CLASS/*.JPEG and
val/CLASS/*.JPEG; without it, a few pictures are drawn. A step of --batch images, on all ranks together, is cut into
micro-batches: each rank takes several of them one after the other where the ranks are few. Batch normalisation looks at
a micro-batch, so the number of ranks does not matter to the weights; its running averages differ a little.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from common import Show, choose_device
from imagenet_data import Images, make_parser, parse
from progress import Progress
from resnet import BLOCKS, make_resnet

import reigen.keras as hvd


def factor(options: argparse.Namespace, steps: int, epoch: float) -> float:
    """Of the learning rate: it grows during the first epochs, and falls to a tenth at each of --drop-epochs."""
    step = int(epoch * steps + 1e-6)
    warmup = min(1.0, (step + 1) / max(1.0, options.warmup_epochs * steps))
    return warmup * 0.1 ** sum(step >= drop * steps for drop in options.drop_epochs)


def evaluate(model: keras.Model, test: tf.data.Dataset, count: int) -> float:
    """The share of all `count` images that is recognised; each rank looks at its part, with averages of all ranks."""
    for variable in model.non_trainable_variables:
        variable.assign(hvd.allreduce(variable, name=variable.path))
    right = 0
    for images, labels in test.as_numpy_iterator():
        right += int((np.argmax(model.predict_on_batch(images), 1) == labels).sum())
    return float(hvd.allreduce(np.float64(right), name="right", op=hvd.Sum)) / count


def train(options: argparse.Namespace, directory: Path) -> tuple[float, float]:
    """Accuracy, and mean loss of the last epoch."""
    data, test = (Images(options, directory, part, hvd.rank(), hvd.size()) for part in ("train", "val"))
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if options.dtype == "bfloat16" else "float32")
    model = make_resnet(options.layers, options.classes, options.image_size)
    rate = options.lr * options.batch / 256
    # Keras's weight decay does not pass through the momentum: ten times as much has the effect of 1e-4 that does.
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=1e-3)
    # It averages the gradients of so many micro-batches before it reduces and applies them.
    several = {"backward_passes_per_step": options.passes, "average_aggregated_gradients": True}
    optimizer = hvd.DistributedOptimizer(optimizer, **several)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=options.label_smoothing)
    model.compile(optimizer=optimizer, loss=loss)
    optimizer.build(model.trainable_variables)
    state, first = [*model.variables, *optimizer.momentums], 0
    if options.checkpoint and hvd.rank() == 0 and options.checkpoint.exists():
        with np.load(options.checkpoint) as saved:
            first = int(saved["epoch"])
            for number, variable in enumerate(state):
                variable.assign(saved[f"arr_{number}"])
    first = hvd.broadcast_object(first)
    hvd.broadcast_variables(state, root_rank=0)

    accuracy = evaluate(model, test.test(), len(test)) if first >= options.epochs else 0.0  # it was done already
    progress = Progress((options.epochs - first) * data.steps * options.batch, is_shown=hvd.rank() == 0)
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        rate,
        functools.partial(factor, options, data.steps),
        staircase=False,
        momentum_correction=False,
        steps_per_epoch=data.steps * options.passes,
    )
    callbacks = [schedule, hvd.callbacks.MetricAverageCallback(), Show(progress, options.micro_batch * hvd.size())]
    mean = float("nan")
    for epoch in range(first, options.epochs):
        batches = data.train(epoch).map(lambda images, labels: (images, tf.one_hot(labels, options.classes)))
        shown = {"verbose": 0, "shuffle": False, "callbacks": callbacks}
        history = model.fit(batches, initial_epoch=epoch, epochs=epoch + 1, **shown)
        mean = history.history["loss"][0]
        accuracy = evaluate(model, test.test(), len(test))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {mean:.4f}  accuracy {accuracy:.4f}", flush=True)
        if hvd.rank() == 0 and options.checkpoint:
            written = options.checkpoint.with_suffix(".new")  # who is killed meanwhile leaves the old one
            with written.open("wb") as file:
                np.savez(file, *map(keras.ops.convert_to_numpy, state), epoch=epoch + 1)
            written.replace(options.checkpoint)
    return accuracy, mean


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, choices=BLOCKS, default=50, help="default: %(default)s")
    hvd.init()
    choose_device(hvd.local_rank())
    if keras.backend.backend() != "tensorflow":
        tf.config.set_visible_devices([], "GPU")  # it only reads images
    options = parse(parser, hvd.size())
    with tempfile.TemporaryDirectory() as made:
        accuracy, loss = train(options, Path(made))
    if hvd.rank() == 0:
        how = f"{keras.backend.backend()}, {hvd.size()} rank(s), ResNet-{options.layers}, {options.dtype}"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; last epoch's loss {loss:.6f}", flush=True)
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
