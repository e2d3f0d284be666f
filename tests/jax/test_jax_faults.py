"""Ranks that die while a program waits, several devices of one process, and JAX without XLA's foreign functions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import reigen.jax as rj
from reigen.errors import DeadlineError, MismatchError, PeerLostError
from reigen.jax import native
from reigen.testing import RankError
from tests.jax.test_jax_transformations import check_other_collectives, check_programs
from tests.multiprocess.launcher import until


def die_while_the_others_wait() -> tuple[int, ...]:
    step = jax.jit(lambda x: rj.allreduce(x, op=rj.Sum))
    jax.block_until_ready(step(jnp.ones(100_000)))
    if rj.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"rank\(s\) 1 died"):
        jax.block_until_ready([step(jnp.ones(100_000)) for _ in range(5)])
    with pytest.raises(PeerLostError) as caught, rj.collective_errors():
        jax.block_until_ready(step(jnp.ones(100_000)))
    return caught.value.ranks


def executions_and_a_late_rank(directory: str) -> None:
    """A program that fails because rank 2 is late is not executed again: it would meet rank 2's first execution."""
    step = jax.jit(lambda x: rj.allreduce(x, op=rj.Sum))

    def execute(value: float) -> None:
        with pytest.raises(DeadlineError, match=r"rank\(s\) 2 did not submit it"), rj.collective_errors():
            jax.block_until_ready(step(jnp.full(2, value)))

    if rj.rank() == 2:
        until(lambda: {"0", "1"} <= set(os.listdir(directory)))
    else:
        execute(1.0)
        Path(directory, str(rj.rank())).touch()
    execute(2.0)


def check_without_native() -> None:
    native.get_handler.cache_clear()
    jax.clear_caches()
    try:
        assert native.get_handler() is None
        for check in (check_programs, check_other_collectives):
            check()
        with pytest.raises(MismatchError), rj.collective_errors():
            jax.block_until_ready(jax.jit(lambda x: rj.allreduce(x, name="other shapes"))(jnp.ones(3 + rj.rank())))
    finally:
        native.get_handler.cache_clear()
        jax.clear_caches()


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, reigen.jax as rj
rj.init()
assert len(jax.devices()) == 2
mesh = jax.make_mesh((2,), ("x",))
spec = jax.sharding.PartitionSpec("x")
sharded = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, spec))
each = jax.jit(jax.shard_map(lambda x: rj.allreduce(x, op=rj.Sum), mesh=mesh, in_specs=spec, out_specs=spec))
assert each(sharded).tolist() == [0.0, 1.0, 2.0, 3.0]
whole = rj.allreduce(sharded, op=rj.Sum)
assert whole.sharding == sharded.sharding and whole.tolist() == [0.0, 1.0, 2.0, 3.0]
second = jax.device_put(jnp.ones(3), jax.devices()[1])
assert rj.allreduce(second).devices() == {jax.devices()[1]}
unwaited = jax.jit(lambda x: rj.allreduce(x))(jnp.ones((500, 500)))
print("passed")
"""


def test_a_rank_that_dies_while_programs_wait(rank_pool) -> None:
    with pytest.raises(RankError) as caught:
        rank_pool(3).run(die_while_the_others_wait, init=True)
    assert {failure.rank for failure in caught.value.failures} == {1}, str(caught.value)


def test_a_late_rank_meets_no_other_execution(rank_pool, tmp_path) -> None:
    rank_pool(3).run(executions_and_a_late_rank, str(tmp_path), init=True, env={"REIGEN_DEADLINE": "1"})


def test_host_callbacks(rank_pool) -> None:
    rank_pool(2).run(check_without_native, init=True, env={"REIGEN_JAX_NATIVE": "0"})


def test_several_local_devices_and_the_end_of_a_script() -> None:
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "passed"), done.stderr


def test_a_forked_child_does_not_wait_for_its_parents_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    drained = []
    monkeypatch.setattr(native, "drain", lambda: drained.append(os.getpid()))
    native._drain_at_exit(os.getpid())
    native._drain_at_exit(os.getppid())  # as if this process were its child
    assert drained == [os.getpid()]
