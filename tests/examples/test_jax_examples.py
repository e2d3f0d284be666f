"""The examples for JAX, as a user starts them; they fail where the goal is missed, or the ranks' parameters differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.mnist_files import write_digits
from tests.examples.running import (
    LAUNCH,
    SMALL_RESNET,
    assert_same,
    run,
    run_elastic_and_kill_rank_0,
    run_notebook,
)

pytestmark = pytest.mark.timeout(1800)


def test_digits() -> None:
    assert_same(
        "loss",
        1e-2,
        run("digits.py", framework="jax"),
        run("digits.py", framework="jax", np=2),
        run("digits.py", framework="jax", np=4),
    )


def test_digits_reads_the_files_of_mnist(tmp_path: Path) -> None:
    write_digits(tmp_path, 320, 100)
    options = ["--data", tmp_path, "--epochs", 15, "--goal", 0.8]
    assert "bit-identical on all ranks: yes" in run("digits.py", *options, framework="jax")


def test_digits_with_flax() -> None:
    """One rank trains to the end, and reaches the goal; the others see that they begin alike."""
    short = ["--epochs", 1, "--goal", 0]
    assert_same(
        "epoch 1/.* loss",
        1e-3,
        run("flax_digits.py", framework="jax"),
        run("flax_digits.py", *short, framework="jax", np=2),
        run("flax_digits.py", *short, framework="jax", np=4),
    )


def test_gpt() -> None:
    options = ["--steps", 12, "--goal", 4.5]  # 5.5 is the loss of any byte being as likely as any other
    assert_same(
        "test loss",
        1e-3,
        run("gpt.py", *options, framework="jax"),
        run("gpt.py", *options, np=2, framework="jax"),
        run("gpt.py", *options, np=4, framework="jax"),
    )


def test_resnet_goes_on_from_a_checkpoint_with_more_ranks_as_if_nothing_had_been(tmp_path: Path) -> None:
    """A small one, in float32: bfloat16 has three digits."""
    checkpoint = ["--checkpoint", tmp_path / "resnet.msgpack"]
    alone = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 2, framework="jax")
    begun = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 1, *checkpoint, framework="jax", np=2)
    assert_same("epoch 1/.* loss", 1e-3, alone, begun)
    ended = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 2, *checkpoint, framework="jax", np=4)
    assert_same("last epoch's loss", 1e-3, alone, ended)


def test_vgg11_learns_the_same_by_servers_by_allreduce_and_alone() -> None:
    def options(kvstore: str) -> list[object]:
        return ["--kvstore", kvstore, "--num-images", 64, "--epochs", 1, "--goal", 0]

    assert_same(
        "norm of the weights",
        1e-5,
        run("cifar10_vgg11.py", *options("local"), framework="jax"),
        run("cifar10_vgg11.py", *options("ring"), framework="jax", np=2),
        run("cifar10_vgg11.py", *options("ring"), framework="jax", np=4),
        run("cifar10_vgg11.py", *options("dist_sync"), framework="jax", np=2, servers=1),
    )


@pytest.mark.nightly
def test_vgg11_reaches_its_goal() -> None:
    assert "ring, 2 worker(s)" in run("cifar10_vgg11.py", "--num-images", 320, framework="jax", np=2)


def test_a_store_within_a_process_is_refused_where_there_are_several() -> None:
    printed = run("cifar10_vgg11.py", "--kvstore", "local", framework="jax", np=2, code=2)
    assert "error: --kvstore local is for one process: the 2 ranks would train a model each" in printed


def test_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    printed = run("imagenet_resnet50.py", "--data", tmp_path, "--layers", 10, framework="jax", code=1)
    assert printed.splitlines()[-1] == f"{tmp_path}: no train/CLASS/ and val/CLASS/ there"


def test_sync_batch_norm() -> None:
    options = ["--epochs", 1, "--goal", 0.85]
    assert_same(
        "test loss",
        1e-3,
        run("sync_batch_norm.py", *options, framework="jax"),
        run("sync_batch_norm.py", *options, framework="jax", np=2),
        run("sync_batch_norm.py", *options, framework="jax", np=4),
    )


def test_adasum() -> None:
    assert "Adasum, 2 rank(s)" in run("adasum.py", framework="jax", np=2)


def test_join() -> None:
    printed = run("join.py", framework="jax", np=2)
    assert "steps of each rank: [180, 360]" in printed
    assert "bit-identical on all ranks: yes" in printed


@pytest.mark.nightly
def test_elastic_learns_the_same_if_no_process_dies() -> None:
    options = ["--epochs", 5]
    assert_same(
        "loss",
        1e-3,
        run("elastic.py", *options, framework="jax"),
        run("elastic.py", *options, framework="jax", np=2),
        run("elastic.py", *options, framework="jax", np=4),
    )


def test_elastic_reaches_its_accuracy_though_a_process_dies(tmp_path: Path) -> None:
    assert "test accuracy 0.9" in run_elastic_and_kill_rank_0(tmp_path, "jax")


def test_recommender() -> None:
    options = ["--num-ratings", 12_000, "--batch", 256, "--goal", 0.7]  # 1.10 is the error of the mean alone
    assert_same(
        "test error",
        1e-3,
        run("recommender.py", *options, framework="jax", servers=1),
        run("recommender.py", *options, framework="jax", np=2, servers=1, launcher=LAUNCH),
        run("recommender.py", *options, framework="jax", np=4, servers=2),
    )


def test_the_notebook() -> None:
    printed = run_notebook("jax")
    assert "epoch 10/10" in printed
    assert "test accuracy 0.9" in printed
