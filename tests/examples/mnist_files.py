"""scikit-learn's digits as MNIST's files: images of 28 x 28 pixels, half of the files compressed."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def idx(array: np.ndarray) -> bytes:
    """The bytes of a file with unsigned bytes: big-endian lengths behind 0, 0, 8 and the number of dimensions."""
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.astype(np.uint8).tobytes()


def write_digits(directory: Path, train: int, test: int) -> None:
    """Write the four files: the first digits to train on, the last ones to test with."""
    digits = load_digits()
    pixels = np.kron(digits.images * 255 / 16, np.ones((1, 3, 3)))
    images = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))
    for name, part in (("train", slice(train)), ("t10k", slice(-test, None))):
        (directory / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[part]), 1))
        (directory / f"{name}-labels-idx1-ubyte").write_bytes(idx(digits.target[part]))
