"""The examples for TensorFlow, as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.mnist_files import write_digits
from tests.examples.running import LAUNCH, SMALL_RESNET, assert_same, run, run_elastic_and_kill_rank_0

pytestmark = pytest.mark.timeout(1800)


def test_resnet_goes_on_from_a_checkpoint_with_more_ranks_as_if_nothing_had_been(tmp_path: Path) -> None:
    """A small one, in float32: bfloat16 has three digits."""
    checkpoint = ["--checkpoint", tmp_path / "resnet"]
    alone = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 2, framework="tensorflow")
    begun = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 1, *checkpoint, framework="tensorflow", np=2)
    assert_same("epoch 1/.* loss", 1e-3, alone, begun)
    ended = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 2, *checkpoint, framework="tensorflow", np=4)
    assert_same("last epoch's loss", 1e-3, alone, ended)


def test_resnet_in_mixed_precision_with_synthetic_images() -> None:
    options = ["--layers", 10, "--synthetic", "--num-images", 16, "--batch", 16, "--micro-batch", 4, "--epochs", 1]
    assert "1 rank(s), ResNet-10, bfloat16" in run("imagenet_resnet50.py", *options, framework="tensorflow")


@pytest.mark.nightly
def test_resnet_reaches_a_goal_in_mixed_precision() -> None:
    """A tenth of the images are of each class."""
    options = ["--layers", 10, "--epochs", 3, "--drop-epochs", 2, "--micro-batch", 16, "--goal", 0.7]
    assert "2 rank(s), ResNet-10, bfloat16" in run("imagenet_resnet50.py", *options, framework="tensorflow", np=2)


def test_digits() -> None:
    """Without dropout, which differs between the ranks. Two train to the end; the others see that they begin alike."""
    short = ["--dropout", 0, "--epochs", 1, "--goal", 0]
    printed = run("digits.py", "--dropout", 0, np=2, framework="tensorflow")
    assert "bit-identical on all ranks: yes" in printed
    assert_same(
        "epoch  1/.* loss",
        1e-3,
        run("digits.py", *short, framework="tensorflow"),
        printed,
        run("digits.py", *short, np=4, framework="tensorflow"),
    )


def test_digits_reads_the_files_of_mnist(tmp_path: Path) -> None:
    """With dropout."""
    write_digits(tmp_path, 320, 100)
    options = ["--data", tmp_path, "--epochs", 6, "--goal", 0.8]
    assert "bit-identical on all ranks: yes" in run("digits.py", *options, np=2, framework="tensorflow")


def test_vgg11_learns_the_same_by_servers_by_allreduce_and_alone() -> None:
    def options(kvstore: str) -> list[object]:
        return ["--kvstore", kvstore, "--num-images", 64, "--epochs", 1, "--goal", 0]

    assert_same(
        "norm of the weights",
        1e-5,
        run("cifar10_vgg11.py", *options("local"), framework="tensorflow"),
        run("cifar10_vgg11.py", *options("ring"), framework="tensorflow", np=2),
        run("cifar10_vgg11.py", *options("ring"), framework="tensorflow", np=4),
        run("cifar10_vgg11.py", *options("dist_sync"), framework="tensorflow", np=2, servers=1, launcher=LAUNCH),
    )


def test_vgg11_reaches_its_goal() -> None:
    assert "ring, 2 worker(s)" in run("cifar10_vgg11.py", "--num-images", 320, framework="tensorflow", np=2)


def test_a_store_within_a_process_is_refused_where_there_are_several() -> None:
    printed = run("cifar10_vgg11.py", "--kvstore", "local", framework="tensorflow", np=2, code=2)
    assert "error: --kvstore local is for one process: the 2 ranks would train a model each" in printed


def test_gpt() -> None:
    options = ["--steps", 12, "--goal", 4.5]  # 5.5 is the loss of any byte being as likely as any other
    assert_same(
        "test loss",
        1e-3,
        run("gpt.py", *options, framework="tensorflow"),
        run("gpt.py", *options, np=2, framework="tensorflow"),
        run("gpt.py", *options, np=4, framework="tensorflow"),
    )


@pytest.mark.nightly
def test_elastic_learns_the_same_if_no_process_dies() -> None:
    options = ["--epochs", 5]
    assert_same(
        "loss",
        1e-3,
        run("elastic.py", *options, framework="tensorflow"),
        run("elastic.py", *options, framework="tensorflow", np=2),
        run("elastic.py", *options, framework="tensorflow", np=4),
    )


def test_elastic_reaches_its_accuracy_though_a_process_dies(tmp_path: Path) -> None:
    assert "test accuracy 0.9" in run_elastic_and_kill_rank_0(tmp_path, "tensorflow")


def test_recommender() -> None:
    options = ["--num-ratings", 12_000, "--batch", 256, "--goal", 0.7]  # 1.10 is the error of the mean alone
    assert_same(
        "test error",
        1e-3,
        run("recommender.py", *options, framework="tensorflow", servers=1),
        run("recommender.py", *options, framework="tensorflow", np=2, servers=1, launcher=LAUNCH),
        run("recommender.py", *options, framework="tensorflow", np=4, servers=2),
    )


def test_sync_batch_norm() -> None:
    options = ["--epochs", 1, "--goal", 0.85]
    assert_same(
        "test loss",
        1e-3,
        run("sync_batch_norm.py", *options, framework="tensorflow"),
        run("sync_batch_norm.py", *options, framework="tensorflow", np=2),
        run("sync_batch_norm.py", *options, framework="tensorflow", np=4),
    )


def test_adasum() -> None:
    assert "Adasum, 2 rank(s)" in run("adasum.py", framework="tensorflow", np=2)


def test_join() -> None:
    printed = run("join.py", framework="tensorflow", np=2)
    assert "steps of each rank: [180, 360]" in printed
    assert "bit-identical on all ranks: yes" in printed
