"""The examples for TensorFlow, as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import LAUNCH, assert_same, run

pytestmark = pytest.mark.timeout(1800)


def test_resnet_goes_on_from_a_checkpoint_with_more_ranks_as_if_nothing_had_been(tmp_path: Path) -> None:
    """A small one, in float32: bfloat16 has three digits."""
    options = ["--layers", 10, "--dtype", "float32", "--num-images", 32, "--batch", 16, "--lr", 1, "--goal", 0]
    checkpoint = ["--checkpoint", tmp_path / "resnet"]
    run("imagenet_resnet50.py", *options, "--epochs", 1, *checkpoint, framework="tensorflow")
    assert_same(
        "last epoch's loss",
        1e-3,
        lambda: run("imagenet_resnet50.py", *options, "--epochs", 2, framework="tensorflow"),
        lambda: run("imagenet_resnet50.py", *options, "--epochs", 2, *checkpoint, framework="tensorflow", np=2),
    )


def test_resnet_in_mixed_precision_with_synthetic_images() -> None:
    options = ["--layers", 10, "--synthetic", "--num-images", 16, "--batch", 16, "--micro-batch", 4, "--epochs", 1]
    printed = run("imagenet_resnet50.py", *options, framework="tensorflow", np=2)
    assert "2 rank(s), ResNet-10, bfloat16" in printed


def test_resnet_reaches_a_goal_in_mixed_precision() -> None:
    """A tenth of the images are of each class."""
    options = ["--layers", 10, "--epochs", 3, "--drop-epochs", 2, "--micro-batch", 16, "--goal", 0.7]
    assert "2 rank(s), ResNet-10, bfloat16" in run("imagenet_resnet50.py", *options, framework="tensorflow", np=2)


def test_digits() -> None:
    assert "bit-identical on all ranks: yes" in run("digits.py", np=2, framework="tensorflow")


def test_recommender() -> None:
    options = ["--num-ratings", 12_000, "--batch", 256, "--goal", 0.7]  # 1.10 is the error of the mean alone
    assert_same(
        "test error",
        1e-3,
        lambda: run("recommender.py", *options, framework="tensorflow", servers=1),
        lambda: run("recommender.py", *options, framework="tensorflow", np=4, servers=2, launcher=LAUNCH),
    )


def test_sync_batch_norm() -> None:
    options = ["--epochs", 2, "--goal", 0.9]
    assert_same(
        "test loss",
        1e-3,
        lambda: run("sync_batch_norm.py", *options, framework="tensorflow"),
        lambda: run("sync_batch_norm.py", *options, framework="tensorflow", np=4),
    )


def test_adasum() -> None:
    assert "Adasum, 2 rank(s)" in run("adasum.py", framework="tensorflow", np=2)


def test_join() -> None:
    printed = run("join.py", framework="tensorflow", np=2)
    assert "steps of each rank: [180, 360]" in printed
    assert "bit-identical on all ranks: yes" in printed
