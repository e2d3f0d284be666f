"""What the pages about JAX leave to their reader, and what their programs must have done."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import reigen.jax as rj

Names = dict[str, Any]
IMAGES = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
WEIGHTS = np.arange(4, dtype=np.float32)


def loss_of(params: Names, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] - y) ** 2)


def given_jax() -> Names:
    rj.init()
    return {"params": {"w": jnp.full(4, float(rj.rank()))}, "loss_of": loss_of}


def check_jax(names: Names) -> None:
    params, state = names["params"], names["state"]
    assert params["w"].tolist() == [0.0] * 4  # those of rank 0
    mine = IMAGES[rj.rank() :: rj.size()]
    losses = []
    for _ in range(3):
        params, state, loss = names["step"](params, state, mine, mine @ WEIGHTS)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert np.array_equal(rj.allgather(params["w"][None]), [params["w"]] * rj.size())


def given_elastic() -> Names:
    rj.init()
    params = {"w": jnp.zeros(4)}

    def gradient_of(params: Names, images: np.ndarray[Any, Any]) -> Names:
        return jax.grad(loss_of)(params, images, images @ WEIGHTS)  # type: ignore[no-any-return]

    names = {"params": params, "optimizer": optax.sgd(0.1), "key": jax.random.key(0), "optax": optax}
    data = rj.elastic.Cursor(len(IMAGES), global_batch=64, seed=1)
    return {**names, "data": data, "images": IMAGES, "gradient_of": gradient_of}


def check_elastic(names: Names) -> None:
    assert np.allclose(names["job"].params["w"], WEIGHTS, atol=0.1)
