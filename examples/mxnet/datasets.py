"""Small data sets in the formats of the large ones: MNIST's IDX files, CIFAR-10's binaries, RecordIO.

The examples read files. Where nobody names some, they read those that are drawn here: in a few seconds, always the
same, and easy enough that a network learns them in seconds, too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import mxnet as mx
import numpy as np

CLASSES = 10
#: Seven lines of five pixels for each digit.
_GLYPHS = """
01110 00100 01110 01110 00010 11111 00110 11111 01110 01110
10001 01100 10001 10001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00010 00110 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
"""


def draw_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits of 15 x 21 pixels somewhere in images of 28 x 28, with noise: uint8 (count, 28, 28), labels (count,)."""
    lines = [[[int(pixel) for pixel in cell] for cell in line.split()] for line in _GLYPHS.split("\n") if line]
    glyphs = np.kron(np.array(lines).transpose(1, 0, 2), np.ones((1, 3, 3)))
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=count).astype(np.uint8)
    images = random.uniform(0, 60, size=(count, 28, 28))
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(1, 7), random.integers(1, 13)
        image[top : top + 21, left : left + 15] += glyphs[label] * random.uniform(100, 190)
    return images.astype(np.uint8), labels


def draw_pictures(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Stripes whose direction and colour say the class: uint8 (count, 3, size, size), labels (count,)."""
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=count).astype(np.uint8)
    angle = (np.pi * labels / CLASSES)[:, None, None]
    y, x = np.mgrid[0:size, 0:size] / size
    phase, waves = random.uniform(0, 2 * np.pi, (count, 1, 1)), random.uniform(3, 5, (count, 1, 1))
    stripes = np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + phase)[:, None]
    hue = 2 * np.pi * (labels[:, None] / CLASSES + np.arange(3) / 3)
    colour = 128 + 50 * np.cos(hue)[:, :, None, None]
    images = colour + 40 * stripes + random.normal(0, 15, (count, 3, size, size))
    return np.clip(images, 0, 255).astype(np.uint8), labels


# -- MNIST: read by mx.io.MNISTIter ------------------------------------------------------------------------------------


def write_mnist(directory: Path, train: int, test: int) -> None:
    """MNIST's four files, not compressed."""
    for name, count, seed in (("train", train, 1), ("t10k", test, 2)):
        images, labels = draw_digits(count, seed)
        _write_idx(directory / f"{name}-images-idx3-ubyte", images)
        _write_idx(directory / f"{name}-labels-idx1-ubyte", labels)


def _write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)  # 8: unsigned bytes
    path.write_bytes(header + array.tobytes())


# -- CIFAR-10 ----------------------------------------------------------------------------------------------------------

_CIFAR10_SHAPE = (3, 32, 32)


def write_cifar10(directory: Path, train: int, test: int) -> None:
    """Two of CIFAR-10's files."""
    for name, count, seed in (("data_batch_1.bin", train, 1), ("test_batch.bin", test, 2)):
        images, labels = draw_pictures(count, 32, seed)
        (directory / name).write_bytes(np.hstack([labels[:, None], images.reshape(count, -1)]).tobytes())


def read_cifar10(directory: Path, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """The images of all files that ``pattern`` (``data_batch_*.bin``) means, as float32 in [0, 1], and their labels.

    A record is a byte that is the label, and 3072 bytes: 32 lines of 32 pixels of red, then green, then blue.
    """
    length = 1 + int(np.prod(_CIFAR10_SHAPE))
    raw = b"".join(path.read_bytes() for path in sorted(directory.glob(pattern)))
    if not raw or len(raw) % length:
        raise ValueError(f"{directory}/{pattern}: {len(raw)} bytes; CIFAR-10 has {length} for each image")
    records = np.frombuffer(raw, np.uint8).reshape(-1, length)
    return records[:, 1:].reshape(-1, *_CIFAR10_SHAPE).astype(np.float32) / 255, records[:, 0].astype(np.float32)


# -- RecordIO: read by mx.io.ImageRecordIter ---------------------------------------------------------------------------


def write_records(prefix: Path, count: int, size: int, seed: int) -> None:
    """``prefix.rec`` and ``prefix.idx`` with PNG images, as im2rec writes them."""
    images, labels = draw_pictures(count, size, seed)
    writer = mx.recordio.MXIndexedRecordIO(f"{prefix}.idx", f"{prefix}.rec", "w")
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        header = mx.recordio.IRHeader(0, float(label), number, 0)
        writer.write_idx(number, mx.recordio.pack(header, _png(image.transpose(1, 2, 0))))
    writer.close()


def _png(image: np.ndarray) -> bytes:
    """A PNG file, from (height, width, 3) of uint8."""
    height, width, _ = image.shape
    lines = np.hstack([np.zeros((height, 1), np.uint8), image.reshape(height, -1)])  # 0: this line has no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a colour, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunks(chunks))


def _png_chunks(chunks: tuple[tuple[bytes, bytes], ...]) -> Iterator[bytes]:
    for kind, content in chunks:
        yield struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
