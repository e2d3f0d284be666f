"""examples/torch/mnist_data.py, which all digits.py share, reads MNIST's files, and says what is wrong with others."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.examples.mnist_files import idx
from tests.examples.running import ROOT

RANDOM = np.random.default_rng(0)
IMAGES, LABELS = RANDOM.integers(0, 256, (5, 4, 3)), np.array([0, 9, 3, 3, 1])
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def load_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_data", ROOT / "examples" / "torch" / "mnist_data.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mnist_data = load_module()


def write(directory: Path, **others: bytes) -> None:
    """Write five images to train on and two to test with, or other bytes instead."""
    contents = [idx(IMAGES), idx(LABELS), idx(IMAGES[3:]), idx(LABELS[3:])]
    for name, content in zip(NAMES, contents, strict=True):
        (directory / name).write_bytes(others.get(name.partition("-idx")[0].replace("-", "_"), content))


def test_images_become_numbers_from_0_to_1(tmp_path: Path) -> None:
    write(tmp_path)
    images, labels, test_images, test_labels = mnist_data.read(tmp_path)
    assert (images.dtype, labels.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(np.rint(images * 255), IMAGES)
    np.testing.assert_array_equal(labels, LABELS)
    np.testing.assert_array_equal(test_images, images[3:])
    np.testing.assert_array_equal(test_labels, labels[3:])


def test_compressed_files_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "compressed").mkdir()
    write(tmp_path)
    for name in NAMES:
        (tmp_path / "compressed" / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    for plain, unpacked in zip(mnist_data.read(tmp_path), mnist_data.read(tmp_path / "compressed"), strict=True):
        np.testing.assert_array_equal(plain, unpacked)


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("train_images", b"", "no IDX file of unsigned bytes with 3 dimension"),
        ("train_images", idx(IMAGES)[:15], "no IDX file of unsigned bytes with 3 dimension"),  # half a header
        ("train_images", idx(LABELS), "no IDX file of unsigned bytes with 3 dimension"),
        ("train_images", bytes([0, 0, 13, 3]) + idx(IMAGES)[4:], "no IDX file of unsigned bytes"),  # 13: float32
        ("train_images", idx(IMAGES)[:-1], r"59 bytes behind its header, which says \(5, 4, 3\)"),
        ("train_images", idx(IMAGES) + b"\0", "61 bytes behind its header"),
        ("train_images", bytes([0, 0, 8, 3]) + b"\xff" * 12, r"0 bytes behind its header, which says \(4294967295,"),
        ("train_images", idx(IMAGES[:0]), "0 bytes behind its header"),
        ("train_labels", idx(LABELS[:4]), "train has 5 images and 4 labels"),
        ("t10k_labels", idx(np.array([2, 10])), "t10k has a label 10; MNIST's are below 10"),
        ("t10k_images", idx(IMAGES[3:, :3]), r"images of \(4, 3\) to train on, of \(3, 3\) to test"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, part: str, content: bytes, message: str) -> None:
    write(tmp_path, **{part: content})
    with pytest.raises(SystemExit, match=message):
        mnist_data.read(tmp_path)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    message = "neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz there"
    with pytest.raises(SystemExit, match=message):
        mnist_data.read(tmp_path)


@pytest.mark.parametrize("fault", [lambda packed: packed[:20], lambda packed: b"?" * 20, lambda packed: packed[:-8]])
def test_damaged_archives_are_named(tmp_path: Path, fault: object) -> None:
    assert callable(fault)
    write(tmp_path)
    path = tmp_path / NAMES[0]
    path.with_name(f"{NAMES[0]}.gz").write_bytes(fault(gzip.compress(path.read_bytes())))
    path.unlink()
    with pytest.raises(SystemExit, match=rf"{NAMES[0]}\.gz: "):
        mnist_data.read(tmp_path)
