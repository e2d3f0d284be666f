"""rj.elastic: ranks come, and a failure inside of a compiled program goes back to the last commit."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reigen.jax as rj
from reigen import context
from reigen.elastic import membership
from reigen.errors import ArgumentError
from tests.multiprocess.launcher import until
from tests.torch.elastic_membership import WrittenViews

STEPS = 8


def trains() -> list[int]:
    place = int(os.environ["REIGEN_RANK"])
    member = WrittenViews(place, [[0], [0, 1], [1, 0]], [2, None, None]).begin()
    sizes: list[int] = []

    @jax.jit
    def step(params: Any, x: Any) -> Any:
        slope = jax.grad(lambda p: jnp.square(p["w"] * x - 1).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * rj.allreduce(g, name="g"), params, slope)

    def data(number: int) -> Any:
        rows = jnp.arange(4, dtype=jnp.float32).reshape(4, 1) / 4 + number / 8 + jnp.ones(3)
        return rows[rj.rank() * 4 // rj.size() : (rj.rank() + 1) * 4 // rj.size()]

    state = rj.elastic.JaxState(params={"w": jnp.full(3, float(place))}, step=0)

    @rj.elastic.run
    def train(state: Any) -> None:
        sizes.append(rj.size())
        while state.step < STEPS:
            if member.number == 1 and state.step == 5 and rj.rank() == 1:
                context.current().give_up(ValueError("on purpose"))
            state.params = step(state.params, data(state.step))
            state.step += 1
            state.commit()

    try:
        train(state)
    finally:
        rj.shutdown()
        membership.use(None)
    weights = np.zeros(3)
    for number in range(STEPS):
        rows = np.arange(4).reshape(4, 1) / 4 + number / 8 + np.ones(3)
        weights = weights - 0.1 * (2 * (weights * rows - 1) * rows).mean(0) / 3
    np.testing.assert_allclose(state.params["w"], weights, rtol=1e-5)
    return sizes


def test_ranks_come_and_an_error_goes_back(rank_pool):
    assert rank_pool(2).run(trains) == [[1, 2, 2], [2, 2]]


def commits_what_fails(directory: str) -> float:
    dispatched = Path(directory) / "dispatched"
    state = rj.elastic.JaxState(w=jnp.ones(100_000))
    if rj.rank() == 1:
        until(dispatched.exists)
        context.current().give_up(ValueError("on purpose"))
        return 1.0
    state.w = jax.jit(lambda x: 5 * rj.allreduce(x, name="late"))(state.w)
    dispatched.touch()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="on purpose"):
        state.commit()
    state.restore()
    return float(state.w.mean())


def test_a_commit_keeps_no_array_whose_program_fails(rank_pool, tmp_path):
    """JAX copies an array whose program is still running into another one that will fail, too."""
    assert rank_pool(2).run(commits_what_fails, str(tmp_path), init=True) == [1.0, 1.0]


def test_a_plain_loop_with_warm_spares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "elastic_job", lambda: SimpleNamespace(has_warm_spares=True, step_state=None))
    optimizer = rj.distributed(optax.sgd(0.1))
    ones = jnp.ones(3)
    for step in (lambda: rj.grad(jnp.sum)(ones), lambda: optimizer.update(ones, optimizer.init(ones), ones)):
        with pytest.raises(ArgumentError, match=r"Start this job with --spares N: its spares get the state when"):
            step()
