"""DistributedOptimizer of optimizers of tf.compat.v1.train: sessions, hooks, accumulated gradients, Adasum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from reigen.errors import ArgumentError
from tests.tensorflow.tf_training import (
    LR,
    Net,
    alone,
    assert_close,
    assert_identical_everywhere,
    batches,
    loss_of,
    mine,
)

v1 = tf.compat.v1
STEPS = 4


def in_a_session(refs: bool) -> None:
    """A script of TensorFlow 1: a graph, a hook that broadcasts, a monitored session."""
    values = [(each.name[:-2], each.numpy()) for each in Net().all[:3]]
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.int32, [None]), v1.placeholder(tf.float64, [None, 2])
        table, inner, outer = (
            v1.Variable(value + hvd.rank(), use_resource=not refs, name=name) for name, value in values
        )
        prediction = tf.tanh(v1.nn.embedding_lookup(table, x) @ inner) @ outer
        loss = tf.reduce_mean(tf.square(prediction - y))
        step = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(LR))
        train = optimizer.minimize(loss, global_step=step)
        with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
            for rows, targets in batches(STEPS):
                session.run(train, {x: mine(rows), y: mine(targets)})
            found = session.run([table, inner, outer])
            assert session.run(step) == STEPS
    assert_identical_everywhere(found)
    for one, other in zip(found, alone(STEPS).all, strict=False):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("refs", [False, True])
def test_a_session_with_the_hook_trains_as_one_process(rank_pool, refs):
    rank_pool(2).run(in_a_session, refs, init=True)


def eagerly(how: str) -> None:
    model = Net()
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(LR), sparse_as_dense=True)
    assert isinstance(optimizer, v1.train.Optimizer)

    def step(x: Any, y: Any) -> None:
        optimizer.minimize(lambda: loss_of(model, x, y), var_list=model.all)

    run = step if how == "eager" else tf.function(step)
    for x, y in batches(STEPS):
        run(tf.constant(mine(x)), tf.constant(mine(y)))
    assert_identical_everywhere(model.all)
    assert_close(model.all, alone(STEPS).all)


@pytest.mark.parametrize("how", ["eager", "function"])
def test_eager_code_and_functions_train_as_one_process(rank_pool, how):
    rank_pool(2).run(eagerly, how, init=True)


def accumulate(how: str, average: bool) -> None:
    """Three passes of a step; each rank sees its part of each batch."""
    passes, steps = 3, 2
    data = list(batches(passes * steps))
    truth = Net()
    for index in range(steps):
        part = data[index * passes : (index + 1) * passes]
        with tf.GradientTape() as tape:
            loss = sum(loss_of(truth, x, y) for x, y in part) / (passes if average else 1)
        for variable, gradient in zip(truth.dense, tape.gradient(loss, truth.dense), strict=True):
            variable.assign_sub(LR * (gradient + 0.875 * getattr(variable, "moment", 0)))
            variable.moment = gradient + 0.875 * getattr(variable, "moment", 0)
    make = hvd.DistributedOptimizer
    options = {"backward_passes_per_step": passes, "average_aggregated_gradients": average}
    optimizer = v1.train.MomentumOptimizer(LR, 0.875)
    if how == "session":
        with tf.Graph().as_default():
            model = Net()
            x, y = v1.placeholder(tf.int32, [None]), v1.placeholder(tf.float64, [None, 2])
            step = v1.train.get_or_create_global_step()
            train = make(optimizer, **options).minimize(loss_of(model, x, y), global_step=step, var_list=model.dense)
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for rows, targets in data:
                    session.run(train, {x: mine(rows), y: mine(targets)})
                found = session.run(model.dense)
                assert session.run(step) == len(data)
    else:
        model, wrapped = Net(), make(optimizer, **options)

        def run(rows: Any, targets: Any) -> None:
            wrapped.minimize(lambda: loss_of(model, rows, targets), var_list=model.dense)

        run = tf.function(run) if how == "function" else run
        for index, (rows, targets) in enumerate(data):
            before = model.inner.numpy()
            run(tf.constant(mine(rows)), tf.constant(mine(targets)))
            assert (model.inner.numpy() == before).all() == ((index + 1) % passes != 0)
        found = [each.numpy() for each in model.dense]
    assert_identical_everywhere(found)
    for one, other in zip(found, truth.dense, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("how", ["eager", "function", "session"])
def test_gradients_of_several_passes_are_added_up(rank_pool, how, average):
    rank_pool(2).run(accumulate, how, average, init=True)


def adasum_of(a: Any, b: Any) -> Any:
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def adasum(how: str, passes: int) -> None:
    """What each rank's own steps did to the variables is combined."""
    data = list(batches(2 * passes))
    truth = Net()
    for index in range(2):
        changes = []
        for rank in range(2):
            own = Net()
            for one, other in zip(own.dense, truth.dense, strict=True):
                one.assign(other)
            for batch in data[index * passes : (index + 1) * passes]:
                x, y = (np.array_split(each, 2)[rank] for each in batch)
                with tf.GradientTape() as tape:
                    loss = loss_of(own, x, y)
                for variable, gradient in zip(own.dense, tape.gradient(loss, own.dense), strict=True):
                    variable.assign_sub(LR * gradient)
            changes.append([(one - other).numpy() for one, other in zip(own.dense, truth.dense, strict=True)])
        for variable, *pair in zip(truth.dense, *changes, strict=True):
            variable.assign_add(adasum_of(*pair))
    options = {"op": hvd.Adasum, "backward_passes_per_step": passes}
    optimizer = v1.train.GradientDescentOptimizer(LR)
    if how == "session":
        with tf.Graph().as_default():
            model = Net()
            x, y = v1.placeholder(tf.int32, [None]), v1.placeholder(tf.float64, [None, 2])
            train = hvd.DistributedOptimizer(optimizer, **options).minimize(loss_of(model, x, y), var_list=model.dense)
            with v1.train.MonitoredTrainingSession() as session:
                for rows, targets in data:
                    session.run(train, {x: mine(rows), y: mine(targets)})
                found = session.run(model.dense)
    else:
        model, wrapped = Net(), hvd.DistributedOptimizer(optimizer, **options)

        def run(rows: Any, targets: Any) -> None:
            wrapped.minimize(lambda: loss_of(model, rows, targets), var_list=model.dense)

        run = tf.function(run) if how == "function" else run
        for rows, targets in data:
            run(tf.constant(mine(rows)), tf.constant(mine(targets)))
        found = [each.numpy() for each in model.dense]
    assert_identical_everywhere(found)
    for one, other in zip(found, truth.dense, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", ["eager", "function", "session"])
def test_adasum_combines_what_the_steps_did(rank_pool, how, passes):
    rank_pool(2).run(adasum, how, passes, init=True)


def local_and_wrong() -> None:
    model = Net()
    optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.1))
    optimizer.register_local_var(model.inner)
    x, y = next(batches(1))
    with tf.GradientTape() as tape:
        loss = loss_of(model, mine(x), mine(y))
    own = tape.gradient(loss, model.dense)
    pairs = optimizer.compute_gradients(lambda: loss_of(model, mine(x), mine(y)), model.dense)
    np.testing.assert_allclose(pairs[0][0], own[0] / 2, rtol=1e-12)
    np.testing.assert_allclose(pairs[1][0], hvd.allreduce(own[1]), rtol=1e-12)
    optimizer.apply_gradients(pairs)
    assert optimizer.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(model.inner, "m") is not None
    assert len(optimizer.variables()) == 6
    for wrong in (3, None, "adam", optimizer):
        with pytest.raises(ValueError, match="optimizer"):
            hvd.DistributedOptimizer(wrong)
    for passes in (0, -1, 1.5, True):
        with pytest.raises(ArgumentError, match="backward_passes_per_step"):
            hvd.DistributedOptimizer(v1.train.AdamOptimizer(), backward_passes_per_step=passes)
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(tf.keras.optimizers.Adam(), op=hvd.Adasum)
    with pytest.raises(ValueError, match="predivide"):
        hvd.DistributedOptimizer(v1.train.AdamOptimizer(), op=hvd.Sum, gradient_predivide_factor=2.0)


def test_local_variables_slots_and_wrong_arguments(rank_pool):
    rank_pool(2).run(local_and_wrong, init=True)
