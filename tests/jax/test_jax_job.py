"""`rj.elastic.Job`: whoever is killed, no sample is lost or taken twice, and all replicas are equal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reigen.jax as rj
from reigen.errors import ArgumentError, StepOrderError
from tests.elastic import array_jobs as checks
from tests.elastic.fork_server import ForkServer

VARIABLES = {"FRAMEWORK": "jax", "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts processes of the program."""
    server = ForkServer("tests.elastic.array_job_program", **VARIABLES)
    yield server
    server.close()


@pytest.fixture
def alone() -> Iterator[None]:
    rj.init()
    yield
    rj.shutdown()


def make(**options: object) -> rj.elastic.Job:
    trees = {"params": {"w": jnp.ones(3), "b": 2.0}, "key": jax.random.key(3), "table": np.arange(2)}
    return rj.elastic.Job(data=rj.elastic.Cursor(10, global_batch=4, seed=1), **trees, **options)


def train(job: rj.elastic.Job) -> list[list[int]]:
    """Weights lose the mean of the samples' numbers in each step."""
    taken = []
    for step in job.steps(1):
        with step:
            gradients = [{"w": jnp.full(3, part.indices.mean()), "b": jnp.ones(())} for part in step.parts]
            mean = job.average(gradients)
            key, _ = jax.random.split(job.key)
            job.apply(params={"w": job.params["w"] - mean["w"], "b": job.params["b"] - 1.0}, key=key)
        taken.append([index for part in step.parts[:] for index in part.indices.tolist()])
    return taken


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_is_gone_on_from(tmp_path: Path):
    path = tmp_path / "job.npz"
    with make(resume=path) as job:
        taken = train(job)
        job.checkpoint(path)
        assert sorted(index for indices in taken for index in indices) == list(range(10))
        means = [np.mean(indices) for indices in taken]
        np.testing.assert_allclose(job.params["w"], 1 - np.sum(means), rtol=1e-6)
    with make(resume=path) as again:
        assert (again.number, again.data.position) == (3, 10)
        assert isinstance(again.params["b"], float)
        np.testing.assert_array_equal(again.params["w"], job.params["w"])
        assert jax.random.key_data(again.key).tolist() == jax.random.key_data(job.key).tolist()
    other = rj.elastic.Job(data=rj.elastic.Cursor(10, global_batch=4), params=jnp.ones(4))
    with pytest.raises(ArgumentError, match="has not the arrays of this model"):
        other.load(path)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "job.npz"
    with make() as job:
        job.checkpoint(path)
    whole = path.read_bytes()
    other = io.BytesIO()
    np.savez(other, weights=np.zeros(2))
    broken = whole.replace(b"header", b"HEADER")
    for content in (b"", b"no checkpoint", whole[: len(whole) // 2], whole[:-10], other.getvalue(), broken):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=r"job\.npz cannot be read as the checkpoint of a job: .*start over"):
            make().load(path)
    path.write_bytes(whole)
    assert make().load(path)


@pytest.mark.usefixtures("alone")
def test_steps_and_samples_are_counted() -> None:
    before = rj.metrics()
    with make() as job:
        dealt = train(job)
    after = rj.metrics()
    num_steps, num_samples = len(dealt), sum(map(len, dealt))
    assert after["reigen_steps_total"] - before["reigen_steps_total"] == num_steps
    assert after["reigen_samples_total"] - before["reigen_samples_total"] == num_samples
    assert after["reigen_goal_steps"] == after["reigen_steps_total"]


@pytest.mark.usefixtures("alone")
def test_wrong_use_is_refused():
    with pytest.raises(ArgumentError, match="needs pytrees"):
        rj.elastic.Job(data=rj.elastic.Cursor(10, global_batch=4))
    with pytest.raises(ArgumentError, match="steps means something else"):
        make(steps=jnp.ones(1))
    with pytest.raises(StepOrderError, match="within the `with step:` block"), make() as job:
        job.average([])
    with make() as job:
        with pytest.raises(AttributeError, match="no moments"):
            _ = job.moments
        with next(iter(job.steps(1))):
            for gradients in ([], [job.params] * 2):
                with pytest.raises(ArgumentError, match="gradients of 1 part"):
                    job.average(gradients)
            with pytest.raises(ArgumentError, match="no moments, only params, key, table"):
                job.apply(moments=1)
            with pytest.raises(ArgumentError, match="other leaves, shapes or dtypes"):
                job.apply(params={"w": jnp.ones(4), "b": 2.0})
            job.apply(params=job.params)
            with pytest.raises(StepOrderError, match="called twice"):
                job.apply(params=job.params)


@pytest.mark.usefixtures("alone")
def test_donated_arrays_are_refused():
    """A step could not be undone without the weights of its beginning."""
    step = jax.jit(lambda params: jax.tree.map(lambda each: each + 1, params), donate_argnums=0)
    with make() as job, next(iter(job.steps(1))):
        params = {"w": job.params["w"], "b": 2.0}
        params["w"] = step(params["w"])
        if not job.params["w"].is_deleted():
            pytest.skip("this version of JAX donates nothing on CPUs")
        with pytest.raises(ArgumentError, match="were donated to a program"):
            job.apply(params=params)


@pytest.mark.slow
def test_deaths_at_each_point(server: ForkServer):
    checks.check_deaths_at_each_point(server, **VARIABLES)


@pytest.mark.skipif("REIGEN_TEST_KILLS" not in os.environ, reason="a long one: REIGEN_TEST_KILLS=50")
@pytest.mark.slow
def test_random_deaths_and_newcomers(server: ForkServer, tmp_path: Path):
    checks.check_random_deaths_and_newcomers(server, tmp_path, **VARIABLES)


@pytest.mark.slow
def test_same_bits_from_checkpoints(server: ForkServer, tmp_path: Path):
    checks.check_same_bits_from_checkpoints(server, tmp_path, **VARIABLES)


@pytest.mark.slow
def test_another_model_is_refused(server: ForkServer):
    checks.check_another_model_is_refused(server, **VARIABLES)
