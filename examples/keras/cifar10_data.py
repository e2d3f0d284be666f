"""CIFAR-10's images for cifar10_vgg11.py: https://www.cs.toronto.edu/~kriz/cifar.html, binary version."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import generated_data
import numpy as np

VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
RECORD_BYTES = 1 + 3 * 32 * 32


def make_parser(description: str | None, stores: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kvstore", choices=stores, default="ring", help="default: %(default)s")
    add("--data", type=Path, help="where data_batch_1.bin and the others are")
    add("--num-images", type=int, default=800, help="how many pictures to draw (default: %(default)s)")
    add("--epochs", type=int, default=2, help="60 for CIFAR-10 (default: %(default)s)")
    add("--width", type=float, default=0.25, help="factor of all widths: 1 for VGG-11 itself (default: %(default)s)")
    add("--batch", type=int, default=32, help="images of a step, of all ranks together (default: %(default)s)")
    add("--lr", type=float, default=0.001, help="falls to a tenth after half and three quarters (default: %(default)s)")
    add("--goal", type=float, help="exit with 1 below this accuracy (default: 0.8, without --data)")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, size: int) -> None:
    """Complain about options that do not go with `size` ranks, and choose what was not said."""
    if options.batch % size:
        parser.error(f"--batch must be a multiple of the {size} ranks")
    if options.kvstore == "local" and size > 1:
        parser.error(f"--kvstore local is for one process: the {size} ranks would train a model each")
    if options.goal is None:
        options.goal = 0.0 if options.data else 0.8


def rate_of(options: argparse.Namespace, epoch: int) -> float:
    """The learning rate in an epoch."""
    drops = {options.epochs // 2, options.epochs * 3 // 4} - {0}
    return float(options.lr * 0.1 ** sum(epoch >= drop for drop in drops))


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


def scale(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 64 - 2  # about as large as normal numbers


def change(image: np.ndarray, epoch: int, number: int) -> np.ndarray:
    """An image that is perhaps mirrored, and moved by up to four pixels: epoch and number alone decide."""
    random = np.random.default_rng((epoch, number))
    return np.roll(image[:, ::-1] if random.random() < 0.5 else image, random.integers(-4, 5, 2), (0, 1))


class Batches:
    """A rank's part of each batch of an epoch. What is left over comes in another epoch.

    Args:
        images: of all ranks.
        labels: of these.
        options: of the script.
        epoch: says the order, and how images of --data are changed.
        rank: whose part it is.
        size: number of ranks.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, options: argparse.Namespace, epoch: int, rank: int, size: int
    ) -> None:
        self._images, self._labels, self._epoch, self._is_changed = images, labels, epoch, bool(options.data)
        order = np.random.default_rng(epoch).permutation(len(labels))[: len(labels) // options.batch * options.batch]
        self._batches = order.reshape(-1, options.batch)[:, rank::size]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        images = [
            change(self._images[number], self._epoch, number) if self._is_changed else self._images[number]
            for number in self._batches[index]
        ]
        return scale(np.stack(images)), self._labels[self._batches[index]]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[index] for index in range(len(self)))
