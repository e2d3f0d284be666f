"""The examples for Keras, as a user starts them, on each of its backends."""

from __future__ import annotations

import pytest

from tests.examples.running import assert_same, run

pytestmark = pytest.mark.timeout(1800)


def test_digits() -> None:
    assert "bit-identical on all ranks: yes" in run("digits.py", np=2, framework="keras", backend="torch")


def test_vgg11_learns_the_same_alone_by_allreduce_and_by_servers() -> None:
    options = ["--num-images", 320]
    assert_same(
        "norm of the weights",
        1e-4,
        lambda: run("cifar10_vgg11.py", *options, framework="keras", backend="torch"),
        lambda: run("cifar10_vgg11.py", *options, framework="keras", backend="torch", np=2),
        lambda: run(
            "cifar10_vgg11.py", *options, "--kvstore", "dist_sync", framework="keras", backend="torch", np=2, servers=1
        ),
    )


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_vgg11_on_other_backends(backend: str) -> None:
    printed = run("cifar10_vgg11.py", "--num-images", 320, framework="keras", backend=backend, np=2)
    assert f"{backend}, ring, 2 rank(s)" in printed


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_vgg11_by_servers_on_other_backends(backend: str) -> None:
    options = ["--num-images", 64, "--epochs", 1, "--goal", 0, "--kvstore", "dist_sync"]
    printed = run("cifar10_vgg11.py", *options, framework="keras", backend=backend, np=2, servers=1)
    assert f"{backend}, dist_sync, 2 rank(s)" in printed
