"""jax.Arrays pass the suite of adapters."""

from __future__ import annotations

import pytest

from reigen.jax.adapter import JaxAdapter
from reigen.testing import RankPool, check_adapter


def make() -> JaxAdapter:
    import jax

    jax.config.update("jax_enable_x64", True)
    return JaxAdapter()


def differentiate(function, tensors, weights):
    import jax

    def total(arguments):
        return sum((weight * result).sum() for weight, result in zip(weights, function(list(arguments)), strict=True))

    return jax.grad(total)(tensors)


@pytest.mark.parametrize("size", [1, 3])
def test_jax_arrays(size: int, rank_pool) -> None:
    pool: RankPool = rank_pool(size)
    names = check_adapter(make, pool, differentiate=differentiate)
    assert {"float16", "float32", "float64", "int64", "bool", "uint8"} <= set(names)
