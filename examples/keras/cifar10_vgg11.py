"""VGG-11 on CIFAR-10 with Keras 3: `KERAS_BACKEND=torch reigen run -np 2 python examples/keras/cifar10_vgg11.py`.

Any backend will do: tensorflow, jax or torch. CIFAR-10's binary version (data_batch_1.bin and so on,
https://www.cs.toronto.edu/~kriz/cifar.html) is read from --data; without it, small pictures are drawn. --batch is that
of all ranks together, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import generated_data
import keras
import numpy as np
from progress import Progress

import reigen.keras as hvd

VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
RECORD_BYTES = 1 + 3 * 32 * 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="where data_batch_1.bin and the others are")
    add("--num-images", type=int, default=800, help="how many pictures to draw (default: %(default)s)")
    add("--epochs", type=int, default=2, help="60 for CIFAR-10 (default: %(default)s)")
    add("--width", type=float, default=0.25, help="factor of all widths: 1 for VGG-11 itself (default: %(default)s)")
    add("--batch", type=int, default=32, help="images of a step, of all ranks together (default: %(default)s)")
    add("--lr", type=float, default=0.001, help="falls to a tenth after half and three quarters (default: %(default)s)")
    add("--goal", type=float, help="exit with 1 below this accuracy (default: 0.8, without --data)")
    options = parser.parse_args()
    if options.batch % hvd.size():
        parser.error(f"--batch must be a multiple of the {hvd.size()} ranks")
    if options.goal is None:
        options.goal = 0.0 if options.data else 0.8
    return options


def read(directory: Path, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """The images of all files, as bytes of the shape (number, 32, 32, 3), and their labels."""
    raw = b"".join(path.read_bytes() for path in sorted(directory.glob(pattern)))
    if not raw or len(raw) % RECORD_BYTES:
        raise SystemExit(f"{directory}/{pattern}: {len(raw)} bytes; CIFAR-10 has {RECORD_BYTES} for each image")
    records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].astype(np.int32)


def load(options: argparse.Namespace) -> tuple[np.ndarray, ...]:
    """Images and labels to train on, images and labels to test with."""
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            generated_data.write_cifar10(Path(made), options.num_images, options.num_images // 4)
        directory = options.data or Path(made)
        return *read(directory, "data_batch_*.bin"), *read(directory, "test_batch.bin")


def change(image: np.ndarray, epoch: int, number: int) -> np.ndarray:
    """An image that is perhaps mirrored, and moved by up to four pixels: epoch and number alone decide."""
    random = np.random.default_rng((epoch, number))
    return np.roll(image[:, ::-1] if random.random() < 0.5 else image, random.integers(-4, 5, 2), (0, 1))


class Batches(keras.utils.PyDataset):
    """This rank's part of each batch of an epoch. What is left over comes in another epoch."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, epoch: int, options: argparse.Namespace) -> None:
        super().__init__()
        self._images, self._labels, self._epoch, self._is_changed = images, labels, epoch, bool(options.data)
        order = np.random.default_rng(epoch).permutation(len(labels))[: len(labels) // options.batch * options.batch]
        self._batches = order.reshape(-1, options.batch)[:, hvd.rank() :: hvd.size()]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        images = [
            change(self._images[number], self._epoch, number) if self._is_changed else self._images[number]
            for number in self._batches[index]
        ]
        return scale(np.stack(images)), self._labels[self._batches[index]]


def scale(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 64 - 2  # about as large as normal numbers


def make_model(factor: float) -> keras.Model:
    """Configuration A of https://arxiv.org/abs/1409.1556 for 32 x 32 pixels: one linear layer, as is usual there."""
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for width in VGG11:
        if isinstance(width, str):
            layers.append(keras.layers.MaxPooling2D(2))
        else:
            options = {"padding": "same", "activation": "relu", "kernel_initializer": "he_normal"}
            layers.append(keras.layers.Conv2D(int(width * factor), 3, **options))
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(generated_data.CLASSES)])


class Show(keras.callbacks.Callback):
    """Samples per second, the loss and the time that is left, on one rank."""

    def __init__(self, progress: Progress, batch: int) -> None:
        super().__init__()
        self._progress, self._batch = progress, batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._progress.add(self._batch, (logs or {}).get("loss", 0.0))


def main() -> int:
    hvd.init()
    options = parse()
    keras.utils.set_random_seed(0)
    model = make_model(options.width)
    images, labels, test_images, test_labels = load(options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(options.lr)), loss=loss)
    hvd.broadcast_variables(model.variables, root_rank=0)
    steps = len(labels) // options.batch
    drops = {options.epochs // 2, options.epochs * 3 // 4} - {0}
    progress = Progress(options.epochs * steps * options.batch, is_shown=hvd.rank() == 0)
    callbacks = [hvd.callbacks.MetricAverageCallback(), Show(progress, options.batch)]
    for epoch in range(options.epochs):
        model.optimizer.learning_rate = options.lr * 0.1 ** sum(epoch >= drop for drop in drops)
        history = model.fit(Batches(images, labels, epoch, options), verbose=0, shuffle=False, callbacks=callbacks)
        mean = history.history["loss"][0]
        accuracy = float((model.predict(scale(test_images), verbose=0).argmax(1) == test_labels).mean())
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {mean:.4f}  accuracy {accuracy:.4f}", flush=True)
    norm = sum(float(np.square(weights.astype(np.float64)).sum()) for weights in model.get_weights()) ** 0.5
    if hvd.rank() == 0:
        how = f"{keras.backend.backend()}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; norm of the weights {norm:.6f}")
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
