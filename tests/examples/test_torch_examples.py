"""The examples for PyTorch: each reaches its goal, or fails, and the number of ranks does not matter for the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.examples.running import ROOT, figure, run

pytestmark = pytest.mark.timeout(600)


def assert_same(name: str, tolerance: float, *runs: Callable[[], str]) -> None:
    """Compare a figure of several runs: sums of floating-point numbers differ by their order alone."""
    figures = [figure(each(), name) for each in runs]
    assert figures == pytest.approx([figures[0]] * len(figures), rel=tolerance), figures


def test_vgg11_learns_the_same_by_servers_by_allreduce_and_alone() -> None:
    def options(kvstore: str) -> list[object]:
        return ["--kvstore", kvstore, "--num-images", 320]

    assert_same(
        "norm of the weights",
        1e-6,
        lambda: run("cifar10_vgg11.py", *options("local")),
        lambda: run("cifar10_vgg11.py", *options("ring"), np=2),
        lambda: run("cifar10_vgg11.py", *options("dist_sync"), np=2, servers=1),
    )


def test_gpt() -> None:
    options = ["--steps", 40, "--goal", 2.9]  # log 256 = 5.5 before
    assert_same(
        "test loss",
        1e-3,
        lambda: run("gpt.py", *options),
        lambda: run("gpt.py", *options, np=2),
    )


def test_recommender() -> None:
    options = ["--num-ratings", 12_000, "--batch", 256, "--goal", 0.7]  # 1.10 is the error of the mean alone
    assert_same(
        "test error",
        1e-3,
        lambda: run("recommender.py", *options, servers=1),
        lambda: run("recommender.py", *options, np=2, servers=1),
    )


def test_sync_batch_norm() -> None:
    options = ["--epochs", 2, "--goal", 0.9]
    assert_same(
        "test loss",
        1e-3,
        lambda: run("sync_batch_norm.py", *options),
        lambda: run("sync_batch_norm.py", *options, np=2),
    )


def test_adasum() -> None:
    assert "Adasum, 2 rank(s)" in run("adasum.py", np=2)


def test_join() -> None:
    printed = run("join.py", np=2)
    assert "steps of each rank: [180, 360]" in printed
    assert "bit-identical on all ranks: yes" in printed


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "examples" / "torch").glob("*.py")))
def test_examples_are_short(script: str) -> None:
    assert len((ROOT / "examples" / "torch" / script).read_text().splitlines()) <= 150
