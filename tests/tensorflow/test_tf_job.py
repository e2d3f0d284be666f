"""`hvd.elastic.Job` with variables and a `tf.function`: whoever is killed, no sample is lost or taken twice."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from reigen import elastic
from reigen.errors import ArgumentError, CollectiveError, StepOrderError
from tests.elastic import array_jobs as checks
from tests.elastic.fork_server import ForkServer

VARIABLES = {"FRAMEWORK": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts processes of the program."""
    server = ForkServer("tests.elastic.array_job_program", **VARIABLES)
    yield server
    server.close()


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def make_data() -> elastic.Cursor:
    return hvd.elastic.Cursor(9, global_batch=4, seed=1)


@pytest.mark.usefixtures("alone")
def test_sparse_gradients_and_variables_without_any(tmp_path):
    table, unused = tf.Variable(tf.ones((9, 2))), tf.Variable(3.0)
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.1)  # which changes what has a gradient, of zeros even
    with hvd.elastic.Job([table, unused], optimizer, data=make_data()) as job:
        for step in job.steps(1):
            with step:
                gradients = []
                for part in step.parts:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(tf.gather(table, part.indices))
                    gradients.append(tape.gradient(loss, [table, unused]))
                assert isinstance(gradients[0][0], tf.IndexedSlices)
                assert gradients[0][1] is None
                job.apply(gradients)
        job.checkpoint(tmp_path / "job.npz")
    assert float(unused) == 3.0
    rows = np.full((9, 2), 1.0)
    cursor = make_data()
    for _ in range(3):
        interval = cursor.next_interval(1)
        rows *= 1 - 0.5 * 0.1
        rows[cursor.deal(interval, 0, 1)[0].indices] -= 0.5
        cursor.move_behind(interval)
    np.testing.assert_allclose(table.numpy(), rows, rtol=1e-5)
    other = tf.Variable(tf.zeros((9, 2)))
    with hvd.elastic.Job(
        [other, unused], keras.optimizers.SGD(0.5), data=make_data(), resume=tmp_path / "job.npz"
    ) as again:
        assert again.number == 3
        np.testing.assert_array_equal(other.numpy(), table.numpy())


@pytest.mark.usefixtures("alone")
def test_wrong_use_is_refused():
    variable = tf.Variable(1.0)
    with pytest.raises(ArgumentError, match="needs variables"):
        hvd.elastic.Job([], data=make_data())
    with pytest.raises(ArgumentError, match="takes a plain optimizer of Keras"):
        hvd.elastic.Job([variable], hvd.DistributedOptimizer(keras.optimizers.SGD()), data=make_data())
    with hvd.elastic.Job([variable], data=make_data()) as job, next(iter(job.steps(1))):
        with pytest.raises(ArgumentError, match="without an optimizer"):
            job.apply([[tf.constant(1.0)]])
        with pytest.raises(ArgumentError, match="gradients of 1 variables"):
            job.average([[None, tf.constant(1.0)]])
        assert job.average([[None]]) == [None]
        with pytest.raises(StepOrderError, match="failed within the update of the weights"), job.update():
            raise CollectiveError("on purpose")
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ArgumentError, match="no variables yet"):
        elastic.Job(model, keras.optimizers.SGD(), data=make_data())


@pytest.mark.slow
def test_deaths_at_each_point(server: ForkServer):
    """Also within an update, when half of the variables are changed."""
    checks.check_deaths_at_each_point(server, **VARIABLES)
