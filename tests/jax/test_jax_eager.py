"""Collectives of arrays outside of programs."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import reigen.jax as rj
from reigen.jax import collectives
from reigen.jax.adapter import empty_aligned


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    rj.init()
    yield
    rj.shutdown()


def test_large_results_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []

    def noted(shape: tuple[int, ...], storage: np.dtype) -> np.ndarray:
        made.append(empty_aligned(shape, storage))
        return made[-1]

    monkeypatch.setattr(collectives, "empty_aligned", noted)
    given = jnp.ones(1 << 16)
    for result in (rj.allreduce(given), rj.synchronize(rj.allreduce_async(given))):
        assert result.tolist() == given.tolist()
        assert result.unsafe_buffer_pointer() in [each.ctypes.data for each in made]
    assert len(made) == 2


@pytest.mark.parametrize("name", [None, "", "name"])
def test_an_array_may_have_the_names_that_a_pytree_may(name: str | None) -> None:
    given = jnp.arange(3.0)
    alone, in_tree = rj.allreduce(given, name=name), rj.allreduce({"x": given}, name=name)["x"]
    assert alone.tolist() == in_tree.tolist() == given.tolist()
