"""Record files of images, as im2rec makes them, for mxnet_imagenet_resnet50.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import mxnet as mx

_MEAN = dict(zip(("mean_r", "mean_g", "mean_b"), (123.68, 116.779, 103.939), strict=True))
_STD = dict(zip(("std_r", "std_g", "std_b"), (58.393, 57.12, 57.375), strict=True))


def records(file: Path, options: argparse.Namespace, rank: int, size: int, *, train: bool) -> mx.io.DataIter:
    """A rank's part of a record file."""
    pixels = options.image_size
    crop = {"random_resized_crop": True, "min_random_area": 0.08, "min_aspect_ratio": 3 / 4, "max_aspect_ratio": 4 / 3}
    changed = {"shuffle": True, "rand_mirror": True, **crop} if train else {"resize": pixels * 8 // 7}
    return mx.io.ImageRecordIter(
        path_imgrec=str(file),
        path_imgidx=str(file.with_suffix(".idx")),
        data_shape=(3, pixels, pixels),
        batch_size=options.batch_size,
        preprocess_threads=options.data_nthreads,
        num_parts=size,
        part_index=rank,
        **changed,
        **_MEAN,
        **_STD,
    )


def draw(directory: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """Record files for those who have none."""
    size = options.image_size * 8 // 7
    datasets.write_records(directory / "train", options.num_examples, size, seed=1)
    datasets.write_records(directory / "val", options.num_examples // 2, size, seed=2)
    return directory / "train.rec", directory / "val.rec"
