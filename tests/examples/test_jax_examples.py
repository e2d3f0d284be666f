"""The examples for JAX, as a user starts them; they fail where the goal is missed, or the ranks' parameters differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import assert_same, run

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("name", ["digits.py", "flax_digits.py"])
def test_digits(name: str) -> None:
    assert "bit-identical on all ranks: yes" in run(name, np=2, framework="jax")


def test_gpt() -> None:
    options = ["--steps", 12, "--goal", 4.5]  # 5.5 is the loss of any byte being as likely as any other
    assert_same(
        "test loss",
        1e-3,
        lambda: run("gpt.py", *options, framework="jax"),
        lambda: run("gpt.py", *options, np=2, framework="jax"),
    )


def test_resnet_goes_on_from_a_checkpoint_with_more_ranks_as_if_nothing_had_been(tmp_path: Path) -> None:
    """A small one, in float32: bfloat16 has three digits."""
    options = ["--layers", 10, "--dtype", "float32", "--num-images", 32, "--batch", 16, "--lr", 1, "--goal", 0]
    checkpoint = ["--checkpoint", tmp_path / "resnet.msgpack"]
    run("imagenet_resnet50.py", *options, "--epochs", 1, *checkpoint, framework="jax")
    assert_same(
        "last epoch's loss",
        1e-3,
        lambda: run("imagenet_resnet50.py", *options, "--epochs", 2, framework="jax"),
        lambda: run("imagenet_resnet50.py", *options, "--epochs", 2, *checkpoint, framework="jax", np=2),
    )
