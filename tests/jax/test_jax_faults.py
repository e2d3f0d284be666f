"""Ranks that die while a program waits, several devices of one process, and JAX without XLA's foreign functions."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import jaxlib
import pytest

import reigen.jax as rj
from reigen.errors import DeadlineError, MismatchError, PeerLostError
from reigen.jax import native, primitive, self_test, tracing
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
        until(lambda: len(list(Path(directory).iterdir())) == 2)
    else:
        execute(1.0)
        Path(directory, str(rj.rank())).touch()
    execute(2.0)


def check_host_callbacks(cache: str) -> None:
    """They take the place of XLA's operations where these are not wanted, do not work, or JAX has changed."""
    made = functools.cache(native.get_handler.__wrapped__)
    failing = dataclasses.replace(native.self_test(), module="reigen.jax.missing", tested_versions=())
    reasons = []
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=cache),
        mock.patch.object(native, "get_handler", made),
        mock.patch.object(primitive, "get_handler", made),
        mock.patch.object(native._log, "warning", lambda text, reason: reasons.append(reason)),
    ):
        with mock.patch.object(native, "self_test", return_value=failing):
            check_programs_by_callbacks()
        made.cache_clear()
        tracing.find_difference.cache_clear()
        with mock.patch.object(tracing, "_import_error", "no name 'tokens'"):
            check_programs_by_callbacks()
    tracing.find_difference.cache_clear()
    jax.clear_caches()
    assert [reason.partition("with JAX")[2] or reason.partition("versions")[2] for reason in reasons] == [
        f"'s XLA {jaxlib.__version__} ended with exit code 1: {sys.executable}: No module named reigen.jax.missing",
        ": no name 'tokens'",
    ]


def check_programs_by_callbacks() -> None:
    jax.clear_caches()
    assert native.get_handler() is None
    for check in (check_programs, check_other_collectives):
        check()
    with pytest.raises(MismatchError), rj.collective_errors():
        jax.block_until_ready(jax.jit(lambda x: rj.allreduce(x, name="other shapes"))(jnp.ones(3 + rj.rank())))


OTHER_JAX = """
import types, jax, jax._src, jax.extend.core, jax.experimental
jax._src.effects = types.ModuleType("jax._src.effects")  # JAX itself has the names that it needs
from jax.extend.core import Primitive
del jax._src.core.Primitive
import reigen.jax as rj
jax._src.core.Primitive = Primitive
rj.init()
print(jax.jit(lambda x: rj.allgather(rj.allreduce(x)))(jax.numpy.arange(3.0)).tolist())
"""


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, reigen.errors, reigen.jax as rj
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
with jax.default_device(jax.devices()[1]):
    assert rj.allgather(jax.device_put(jnp.ones(3), jax.devices()[0])).devices() == {jax.devices()[0]}
try:
    jax.jit(lambda x: rj.allreduce(x))(sharded)
except reigen.errors.UnsupportedError as error:
    assert "jax.shard_map" in str(error)
else:
    raise AssertionError("a sharded array in jit")
unwaited = jax.jit(lambda x: rj.allreduce(x))(jnp.ones((500, 500)))
print("passed")
"""


def test_a_rank_that_dies_while_programs_wait(rank_pool) -> None:
    with pytest.raises(RankError) as caught:
        rank_pool(3).run(die_while_the_others_wait, init=True)
    assert {failure.rank for failure in caught.value.failures} == {1}, str(caught.value)


def test_a_late_rank_meets_no_other_execution(rank_pool, tmp_path) -> None:
    rank_pool(3).run(executions_and_a_late_rank, str(tmp_path), init=True, env={"REIGEN_DEADLINE": "1"})


def test_host_callbacks(rank_pool, tmp_path) -> None:
    rank_pool(2).run(check_host_callbacks, str(tmp_path), init=True)


def test_a_jax_without_a_name_that_it_does_not_promise() -> None:
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_JAX], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[0.0, 1.0, 2.0]"), done.stderr
    assert done.stderr.count("take longer") == 1
    assert "has no attribute 'Effect'" in done.stderr


def test_an_import_leaves_out_what_few_programs_use() -> None:
    code = "import sys, reigen.jax as rj; print({'jax.extend', 'reigen.jax.elastic', 'optax'} & set(sys.modules)); "
    code += "print(rj.elastic.JaxState.__module__); from reigen.jax import *; print(elastic is rj.elastic)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["set()", "reigen.jax.elastic", "True"], done.stderr


def run_the_self_test() -> tuple[int, bool]:
    return self_test.main(), importlib.util.find_spec(native.self_test().module) is not None


def test_the_self_test_succeeds_with_this_version(rank_pool) -> None:
    assert jaxlib.__version__ in native.TESTED_VERSIONS
    assert rank_pool(1).run(run_the_self_test, init=True) == [(0, True)]


def test_the_self_test_does_not_join_the_job_that_it_is_in() -> None:
    environ = os.environ | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", native.self_test().module]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


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
