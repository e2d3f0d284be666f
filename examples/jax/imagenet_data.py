"""Images of ImageNet's layout, train/CLASS/*.JPEG and val/CLASS/*.JPEG, for imagenet_resnet50.py.

TensorFlow reads them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generated_data
import numpy as np
import tensorflow as tf


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="the directory of train and val")
    add("--synthetic", action="store_true", help="the same image again and again: how fast is it without files?")
    add("--num-images", type=int, default=320, help="how many to draw, or synthetic ones (default: %(default)s)")
    add("--classes", type=int, default=10, help="1000 in ImageNet (default: %(default)s)")
    add("--image-size", type=int, default=32, help="224 for ImageNet (default: %(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of products (default: %(default)s)")
    add("--batch", type=int, default=32, help="images of a step, of all ranks together (default: %(default)s)")
    add("--micro-batch", type=int, default=8, help="images of a forward pass (default: %(default)s)")
    add("--epochs", type=int, default=6, help="90 for ImageNet (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="for each 256 images of a step (default: %(default)s)")
    add("--drop-epochs", type=int, nargs="*", default=[4], help="the rate falls to a tenth (default: %(default)s)")
    add("--warmup-epochs", type=float, default=1.0, help="5 for ImageNet (default: %(default)s)")
    add("--label-smoothing", type=float, default=0.1, help="default: %(default)s")
    add("--checkpoint", type=Path, help="written after each epoch; training goes on from it where it is there")
    add("--goal", type=float, help="exit with 1 below this accuracy (default: 0.8 for drawn pictures)")
    return parser


def parse(parser: argparse.ArgumentParser, size: int) -> argparse.Namespace:
    """The options, with `passes`: the micro-batches of a step that each of the ranks takes."""
    options = parser.parse_args()
    options.passes, rest = divmod(options.batch, options.micro_batch * size)
    if rest or not options.passes:
        parser.error(f"--batch must be a multiple of --micro-batch times {size} ranks")
    if options.goal is None:
        options.goal = 0.0 if options.data or options.synthetic else 0.8
    return options


class Images:
    """Images to train on, or to test with, of which each rank takes its part.

    Args:
        options: of the script.
        directory: where train and val are; pictures are drawn there if --data names no other.
        part: ``"train"`` or ``"val"``.
        rank: of this process.
        size: number of processes.
    """

    def __init__(self, options: argparse.Namespace, directory: Path, part: str, rank: int, size: int) -> None:
        self._options, self._rank, self._size = options, rank, size
        if options.synthetic:
            self._files, self._labels = [""] * options.num_images, np.arange(options.num_images) % options.classes
            return
        if options.data is None and not (directory / "train").exists():
            generated_data.write_imagenet(directory, options.num_images, options.num_images // 4, options.image_size)
        directory = options.data or directory
        classes = sorted(each for each in (directory / part).glob("*") if each.is_dir())
        found = [(str(file), label) for label, each in enumerate(classes) for file in sorted(each.iterdir())]
        if not found:
            raise SystemExit(f"{directory}: no train/CLASS/ and val/CLASS/ there")
        self._files, self._labels = [file for file, _ in found], np.array([label for _, label in found])

    def __len__(self) -> int:
        return len(self._files)

    @property
    def steps(self) -> int:
        """Steps of an epoch. What is left over comes in another epoch."""
        return len(self) // self._options.batch

    def train(self, epoch: int) -> tf.data.Dataset:
        """This rank's micro-batches of an epoch: ``passes`` for each step."""
        options = self._options
        order = np.random.default_rng(epoch).permutation(len(self))[: self.steps * options.batch]
        mine = order.reshape(-1, options.micro_batch)[self._rank :: self._size].ravel()
        return self._batches(mine, lambda image, number: change(image, options.image_size, epoch, number))

    def test(self) -> tf.data.Dataset:
        """This rank's images, as they are."""
        mine = np.arange(self._rank, len(self), self._size)
        return self._batches(mine, lambda image, number: center(image, self._options.image_size))

    def _batches(self, numbers: np.ndarray, view: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> tf.data.Dataset:
        size = self._options.image_size
        synthetic = np.random.default_rng(0).normal(size=(size, size, 3)).astype(np.float32)

        def read(file: tf.Tensor, label: tf.Tensor, number: tf.Tensor) -> tuple[Any, tf.Tensor]:
            if self._options.synthetic:
                return synthetic, label
            raw = tf.io.decode_image(tf.io.read_file(file), channels=3, expand_animations=False)
            image = tf.ensure_shape(view(tf.cast(raw, tf.float32) / 255, number), (size, size, 3))
            return (image - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225), label

        parts = (np.array(self._files)[numbers], self._labels[numbers].astype(np.int32), numbers.astype(np.int32))
        images = tf.data.Dataset.from_tensor_slices(parts).map(read, num_parallel_calls=tf.data.AUTOTUNE)
        return images.batch(self._options.micro_batch).prefetch(2)


def change(image: tf.Tensor, size: int, epoch: int, number: tf.Tensor) -> tf.Tensor:
    """A part of the image, perhaps mirrored: epoch and number alone decide, whichever rank does it."""
    seed, whole = tf.stack([epoch, number]), tf.constant([[[0.0, 0.0, 1.0, 1.0]]])
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image), whole, seed, min_object_covered=0.0, aspect_ratio_range=(3 / 4, 4 / 3), area_range=(0.08, 1.0)
    )
    image = tf.image.resize(tf.slice(image, begin, extent), (size, size), antialias=True)
    return tf.image.stateless_random_flip_left_right(image, seed)


def center(image: tf.Tensor, size: int) -> tf.Tensor:
    """Seven eighths of the image's shorter side, in its middle."""
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    side = tf.minimum(height, width) * 7 // 8
    image = tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side)
    return tf.image.resize(image, (size, size), antialias=True)
