"""The examples for Keras, as a user starts them, on each of its backends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.mnist_files import write_digits
from tests.examples.running import (
    DEADLINE_SECONDS,
    LAUNCH,
    ROOT,
    SMALL_RESNET,
    assert_same,
    example_environment,
    run,
    run_elastic_and_kill_rank_0,
    run_notebook,
)

pytestmark = pytest.mark.timeout(1800)


def test_digits() -> None:
    """Without dropout, which differs between the ranks. Two train to the end; the others see that they begin alike."""
    keras = {"framework": "keras", "backend": "torch"}
    short = ["--dropout", 0, "--epochs", 1, "--goal", 0]
    printed = run("digits.py", "--dropout", 0, np=2, **keras)
    assert "bit-identical on all ranks: yes" in printed
    alone, four = run("digits.py", *short, **keras), run("digits.py", *short, np=4, **keras)
    assert_same("epoch  1/.* mean loss", 1e-3, alone, printed, four)


def test_digits_reads_the_files_of_mnist(tmp_path: Path) -> None:
    """With dropout."""
    write_digits(tmp_path, 320, 100)
    options = ["--data", tmp_path, "--epochs", 6, "--goal", 0.8]
    assert "bit-identical on all ranks: yes" in run("digits.py", *options, np=2, framework="keras", backend="torch")


def test_vgg11_learns_the_same_alone_by_allreduce_and_by_servers() -> None:
    """Also where servers run the script, too: they do not train."""

    def trained(kvstore: str, **how: object) -> str:
        options = ["--num-images", 64, "--epochs", 1, "--goal", 0, "--kvstore", kvstore]
        printed = run("cifar10_vgg11.py", *options, framework="keras", backend="torch", **how)
        assert printed.count("test accuracy") == 1
        return printed

    assert_same(
        "norm of the weights",
        1e-4,
        trained("ring"),
        trained("ring", np=2, servers=1, launcher=LAUNCH),
        trained("ring", np=4),
        trained("dist_sync", np=2, servers=1),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_vgg11_on_other_backends(backend: str) -> None:
    printed = run("cifar10_vgg11.py", "--num-images", 320, framework="keras", backend=backend, np=2)
    assert f"{backend}, ring, 2 rank(s)" in printed


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_vgg11_by_servers_on_other_backends(backend: str) -> None:
    options = ["--num-images", 64, "--epochs", 1, "--goal", 0, "--kvstore", "dist_sync"]
    printed = run("cifar10_vgg11.py", *options, framework="keras", backend=backend, np=2, servers=1)
    assert f"{backend}, dist_sync, 2 rank(s)" in printed


def test_resnet_goes_on_from_a_checkpoint_with_more_ranks_as_if_nothing_had_been(tmp_path: Path) -> None:
    """A small one, in float32: bfloat16 has three digits."""
    checkpoint = ["--checkpoint", tmp_path / "resnet.npz"]
    keras = {"framework": "keras", "backend": "torch"}
    alone = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 2, **keras)
    begun = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 1, *checkpoint, **keras, np=2)
    assert_same("epoch 1/.* loss", 1e-3, alone, begun)
    ended = run("imagenet_resnet50.py", *SMALL_RESNET, "--epochs", 2, *checkpoint, **keras, np=4)
    assert_same("last epoch's loss", 1e-3, alone, ended)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_resnet_on_other_backends_in_mixed_precision_with_synthetic_images(backend: str) -> None:
    options = ["--layers", 10, "--synthetic", "--num-images", 16, "--batch", 16, "--micro-batch", 4, "--epochs", 1]
    printed = run("imagenet_resnet50.py", *options, framework="keras", backend=backend, np=2)
    assert f"{backend}, 2 rank(s), ResNet-10, bfloat16" in printed


def test_resnet_reaches_a_goal_in_mixed_precision() -> None:
    """A tenth of the images are of each class."""
    options = ["--layers", 10, "--epochs", 3, "--drop-epochs", 2, "--micro-batch", 16, "--goal", 0.7]
    printed = run("imagenet_resnet50.py", *options, framework="keras", backend="torch", np=2)
    assert "torch, 2 rank(s), ResNet-10, bfloat16" in printed


def test_gpt() -> None:
    options = ["--steps", 12, "--goal", 4.5]  # 5.5 is the loss of any byte being as likely as any other
    assert_same(
        "test loss",
        1e-3,
        run("gpt.py", *options, framework="keras", backend="jax"),
        run("gpt.py", *options, framework="keras", backend="jax", np=2),
        run("gpt.py", *options, framework="keras", backend="jax", np=4),
    )


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.nightly)])
def test_elastic_reaches_its_accuracy_though_a_process_dies(backend: str, tmp_path: Path) -> None:
    assert "test accuracy 0.9" in run_elastic_and_kill_rank_0(tmp_path, "keras", backend)


@pytest.mark.nightly
def test_elastic_learns_the_same_if_no_process_dies() -> None:
    options = ["--epochs", 5]
    assert_same(
        "loss",
        1e-3,
        run("elastic.py", *options, framework="keras", backend="jax"),
        run("elastic.py", *options, framework="keras", backend="jax", np=2),
        run("elastic.py", *options, framework="keras", backend="jax", np=4),
    )


def test_sync_batch_norm() -> None:
    options = ["--epochs", 1, "--goal", 0.85]
    assert_same(
        "test loss",
        1e-3,
        run("sync_batch_norm.py", *options, framework="keras", backend="tensorflow"),
        run("sync_batch_norm.py", *options, framework="keras", backend="tensorflow", np=2),
        run("sync_batch_norm.py", *options, framework="keras", backend="tensorflow", np=4),
    )


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.nightly), "jax"])
def test_adasum(backend: str) -> None:
    options = ["--epochs", 3, "--goal", 0.85]
    printed = run("adasum.py", *options, framework="keras", backend=backend, np=2)
    assert f"{backend}, Adasum, 2 rank(s)" in printed


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.nightly), "jax"])
def test_join(backend: str) -> None:
    """Its progress counts the images of all ranks, and ends at 100 %."""
    printed = run("join.py", "--epochs", 3, "--goal", 0.85, framework="keras", backend=backend, np=2)
    assert "steps of each rank: [90, 180]" in printed
    assert "100% " in printed
    assert "bit-identical on all ranks: yes" in printed


def test_sync_batch_norm_refuses_a_keras_without_the_hook() -> None:
    program = "import runpy, sys, keras; del keras.layers.BatchNormalization._moments; sys.path[0] = sys.argv[1]; "
    program += "sys.argv[1:] = []; runpy.run_path(sys.path[0] + '/sync_batch_norm.py', run_name='__main__')"
    environ = example_environment("jax")
    command = [sys.executable, "-c", program, str(ROOT / "examples" / "keras")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 2
    assert "has no BatchNormalization._moments" in done.stderr


def test_recommender() -> None:
    options = ["--num-ratings", 12_000, "--batch", 256, "--epochs", 3, "--lr", 0.05, "--goal", 0.8]
    assert_same(
        "test error",
        1e-3,
        run("recommender.py", *options, framework="keras", backend="jax", servers=1),
        run("recommender.py", *options, framework="keras", backend="jax", np=2, servers=1),
        run("recommender.py", *options, framework="keras", backend="jax", np=4, servers=1),
    )


def test_the_notebook() -> None:
    printed = run_notebook("keras", backend="torch")
    assert "epoch 10/10" in printed
    assert "test accuracy 0.9" in printed
