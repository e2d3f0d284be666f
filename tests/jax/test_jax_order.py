"""Many computations in flight, of ranks that dispatch at different speeds: none deadlocks, none mixes up two sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import reigen.jax as rj
from reigen.testing import RankPool

COMPUTATIONS, COLLECTIVES = 40, 6
#: elements of a sum that takes longer than a call holds its thread
LARGE = 1 << 21


def compute(x, step):
    """Sums that do not depend on each other, behind computations that take different times."""
    results = []
    for index in range(COLLECTIVES):
        slow = x
        for _ in range(index % 3):
            slow = jnp.tanh(slow @ slow)
        results.append(rj.allreduce(jnp.full(200, step + index) + 0 * slow[0, 0], op=rj.Sum))
    return results


def dispatch(same_name: bool) -> None:
    """Sizes of the matrices differ between ranks and computations, and so does the time until a sum begins."""
    sized = [jnp.ones((50 * (1 + (step * (rj.rank() + 1)) % 3),) * 2) / 100 for step in range(3)]
    scale = np.arange(rj.size()).sum()

    def program(x, step):
        if same_name:
            return [rj.allreduce(jnp.full(200, step) + 0 * jnp.tanh(x @ x)[0, 0], op=rj.Sum, name="one")]
        return compute(x, step)

    run = jax.jit(program)
    found = [run(sized[step % 3], 1.0 * step + rj.rank()) for step in range(COMPUTATIONS)]
    for step, results in enumerate(found):
        for index, result in enumerate(results):
            assert set(result.tolist()) == {rj.size() * (step + index) + scale}, (step, index)


def in_loops_and_calls() -> None:
    """A function that is compiled once and stands in a program many times has its sums in the program's order."""
    layer = jax.jit(lambda x: rj.allreduce(x, op=rj.Sum))

    @jax.jit
    def program(x):
        calls = [layer(jnp.full(300, 1.0 * index) * x) for index in range(12)]
        looped = jax.lax.scan(lambda c, k: (c, layer(k * x)), 0.0, jnp.arange(8.0))[1]
        return calls, looped

    for _ in range(10):
        calls, looped = program(1.0)
        assert [float(each[0]) for each in calls] == [index * rj.size() for index in range(12)]
        assert looped.tolist() == [index * rj.size() for index in range(8)]


def traced_in_different_orders() -> list[float]:
    first = jax.jit(lambda x: rj.allreduce(x, op=rj.Sum))
    second = jax.jit(lambda x: rj.allreduce(2 * x, op=rj.Sum))
    for each in (first, second)[:: 1 - 2 * (rj.rank() % 2)]:
        each.lower(jnp.ones(3))
    return [float(second(jnp.ones(3))[0]), float(first(jnp.ones(3))[0])]


def sum_behind_a_sum() -> None:
    """The rest of a program runs on the thread that completes a sum, and that may need another sum."""
    total = float(rj.size())

    def add(value):
        return np.float32(rj.allreduce(np.float32(value), op=rj.Sum, name="called back"))

    @jax.jit
    def program(x):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        return io_callback(add, scalar, rj.allreduce(x, op=rj.Sum)[0], ordered=True)

    assert [float(program(jnp.ones(LARGE))) for _ in range(3)] == [total * total] * 3


def sum_over_devices_behind_a_sum() -> None:
    devices = jax.local_device_count()
    assert devices == 2
    program = jax.pmap(lambda x: jax.lax.psum(rj.allreduce(x, op=rj.Sum), "devices"), axis_name="devices")
    for _ in range(3):
        assert set(np.unique(program(jnp.ones((devices, LARGE))))) == {devices * rj.size()}


def test_more_computations_than_threads(rank_pool) -> None:
    rank_pool(2).run(dispatch, False, init=True)
    rank_pool(3).run(dispatch, False, init=True)


def test_executions_of_one_program_keep_their_order(rank_pool) -> None:
    rank_pool(3).run(dispatch, True, init=True)


def test_functions_that_stand_in_a_program_several_times(rank_pool) -> None:
    rank_pool(2).run(in_loops_and_calls, init=True)


def test_ranks_may_trace_in_different_orders(rank_pool) -> None:
    assert rank_pool(3).run(traced_in_different_orders, init=True) == [[6.0, 3.0]] * 3


def test_a_callback_behind_a_sum_may_sum(rank_pool) -> None:
    rank_pool(2).run(sum_behind_a_sum, init=True, env={"REIGEN_DEADLINE": "20"})


def test_devices_meet_behind_a_sum() -> None:
    with RankPool(2, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}) as pool:
        pool.run(sum_over_devices_behind_a_sum, init=True)
