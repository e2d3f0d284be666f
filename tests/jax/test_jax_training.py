"""Training with optax: replicas with the same bits, and the curve of one process with the global batch."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reigen.jax as rj
from reigen.errors import ArgumentError, MismatchError

BATCH, STEPS = 12, 15


def make_data():
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS, BATCH, 5)).astype(np.float32)
    return x, np.tanh(x @ random.normal(size=(5, 2)).astype(np.float32))


def make_params(seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "in": {"w": jax.random.normal(keys[0], (5, 16)) * 0.3, "b": jnp.zeros(16)},
        "out": {"w": jax.random.normal(keys[1], (16, 2)) * 0.3},
    }


def loss_of(params, x, y):
    return ((jnp.tanh(x @ params["in"]["w"] + params["in"]["b"]) @ params["out"]["w"] - y) ** 2).mean()


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def train_alone() -> list[float]:
    params, transformation = make_params(0), optimizer()
    state, losses = transformation.init(params), []
    for x, y in zip(*make_data(), strict=True):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = transformation.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def train(compiled: bool, wrapper: str) -> tuple[list[float], str]:
    rank, size = rj.rank(), rj.size()
    params = rj.broadcast_parameters(make_params(rank), root_rank=0)
    transformation = rj.distributed(optimizer()) if wrapper == "distributed" else optimizer()
    differentiate = rj.value_and_grad if wrapper == "value_and_grad" else jax.value_and_grad

    def step(params, state, x, y):
        loss, gradients = differentiate(loss_of)(params, x, y)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, rj.allreduce(loss)

    step = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    state, losses = transformation.init(params), []
    for x, y in zip(*make_data(), strict=True):
        params, state, loss = step(params, state, x[rank::size], y[rank::size])
        losses.append(float(loss))
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state)))
    return losses, hashlib.sha256(bits).hexdigest()


def accumulate() -> list[list[float]]:
    transformation = rj.distributed(optax.sgd(1.0), backward_passes_per_step=2, op=rj.Sum)
    params = {"w": jnp.zeros(2)}
    state, found = transformation.init(params), []
    update = jax.jit(transformation.update)
    for index in range(4):
        updates, state = update({"w": jnp.full(2, 1.0 + index + 10 * rj.rank())}, state, params)
        found.append(updates["w"].tolist())
    return found


def different_parameters() -> str:
    params = {"w": jnp.ones(2 + rj.rank(), jnp.float32)}
    with pytest.raises(MismatchError) as caught:
        rj.broadcast_parameters(params)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "compiled", "wrapper"),
    [(1, True, "distributed"), (2, True, "distributed"), (3, False, "distributed"), (2, True, "value_and_grad")],
)
def test_the_curve_of_one_process(size: int, compiled: bool, wrapper: str, rank_pool) -> None:
    results = rank_pool(size).run(train, compiled, wrapper, init=True)
    alone = rank_pool(1).run(train_alone, init=True)[0]
    assert len({digest for _, digest in results}) == 1
    np.testing.assert_allclose(results[0][0], alone, rtol=2e-5)
    assert alone[-1] < alone[0]


def test_several_passes_make_one_step(rank_pool) -> None:
    expected = [[0.0, 0.0], [-26.0, -26.0], [0.0, 0.0], [-34.0, -34.0]]
    assert rank_pool(2).run(accumulate, init=True) == [expected, expected]


def test_parameters_that_differ_are_an_error_on_all_ranks(rank_pool) -> None:
    for text in rank_pool(2).run(different_parameters, init=True):
        assert "rank 1: ['w']: (3,) float32" in text


def test_wrong_arguments() -> None:
    for passes in (0, 2.5, "2", True):
        with pytest.raises(ArgumentError, match="must be a positive integer"):
            rj.distributed(optax.sgd(1.0), backward_passes_per_step=passes)
    with pytest.raises(ArgumentError, match="only with op=Average"):
        rj.distributed(optax.sgd(1.0), op=rj.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ArgumentError, match=r"optax\.GradientTransformation is needed, got str"):
        rj.distributed("adam")


def reduce_trees_without_leaves() -> None:
    state = optax.identity().init(jnp.ones(3))
    assert rj.broadcast_parameters(state) == state
    for empty in ({}, None, (), state):
        assert rj.allreduce(empty) == rj.broadcast(empty, 0) == empty
        assert jax.jit(lambda x, tree=empty: (rj.allreduce(tree), x))(1.0)[0] == empty


def test_trees_without_leaves(rank_pool) -> None:
    rank_pool(2).run(reduce_trees_without_leaves, init=True)
