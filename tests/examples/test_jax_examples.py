"""The examples for JAX, as a user starts them; they fail where the goal is missed, or the ranks' parameters differ."""

from __future__ import annotations

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
