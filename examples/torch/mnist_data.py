"""MNIST's four files, compressed or not: train-images-idx3-ubyte, train-labels-idx1-ubyte, and t10k's.

A file begins with two zero bytes, 8 for unsigned bytes, its number of dimensions, and their lengths as big-endian
32-bit integers; the values follow (http://yann.lecun.com/exdb/mnist/).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

CLASSES = 10


def read(directory: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images to train on, their labels, images to test with, theirs.

    Images are float32 of the shape (number, height, width), from 0 to 1; labels are int64.

    Raises:
        SystemExit: a file is not there, or is not what it should be.
    """
    images, labels = _read_part(directory, "train")
    test_images, test_labels = _read_part(directory, "t10k")
    if images.shape[1:] != test_images.shape[1:]:
        raise SystemExit(f"{directory}: images of {images.shape[1:]} to train on, of {test_images.shape[1:]} to test")
    return images, labels, test_images, test_labels


def _read_part(directory: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(directory, f"{part}-images-idx3-ubyte", 3)
    labels = read_idx(directory, f"{part}-labels-idx1-ubyte", 1)
    if len(images) != len(labels):
        raise SystemExit(f"{directory}: {part} has {len(images)} images and {len(labels)} labels")
    if labels.max() >= CLASSES:
        raise SystemExit(f"{directory}: {part} has a label {labels.max()}; MNIST's are below {CLASSES}")
    return images.astype(np.float32) / 255, labels.astype(np.int64)


def read_idx(directory: Path, name: str, ndim: int) -> np.ndarray:
    """Unsigned bytes with so many dimensions, none of which is 0, from a file, or from the same with .gz."""
    path, raw = _read_bytes(directory, name)
    start = 4 + 4 * ndim
    if raw[:4] != bytes((0, 0, 8, ndim)) or len(raw) < start:
        raise SystemExit(f"{path}: no IDX file of unsigned bytes with {ndim} dimension(s)")
    shape = struct.unpack(f">{ndim}I", raw[4:start])
    if not 0 < math.prod(shape) == len(raw) - start:
        raise SystemExit(f"{path}: {len(raw) - start} bytes behind its header, which says {shape}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _read_bytes(directory: Path, name: str) -> tuple[Path, bytes]:
    plain, packed = directory / name, directory / f"{name}.gz"
    if plain.is_file():
        return plain, plain.read_bytes()
    if not packed.is_file():
        raise SystemExit(f"{directory}: neither {name} nor {packed.name} there")
    try:
        return packed, gzip.decompress(packed.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SystemExit(f"{packed}: {error}") from None
