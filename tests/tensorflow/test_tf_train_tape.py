"""DistributedGradientTape: on every rank the gradients of the whole batch, in eager code and in functions."""

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

STEPS = 4


def train(how: str, **options: Any) -> None:
    model = Net()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(loss, model.all)
        assert gradients[3] is None
        assert isinstance(gradients[0], tf.IndexedSlices) is not options.get("sparse_as_dense", False)
        for variable, gradient in zip(model.all, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(LR * tf.convert_to_tensor(gradient))
        return loss

    run = step if how == "eager" else tf.function(step)
    for x, y in batches(STEPS):
        run(tf.constant(mine(x)), tf.constant(mine(y)))
    assert_identical_everywhere(model.all)
    assert_close(model.all, alone(STEPS).all)


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("size", [2, 3])
def test_training_is_that_of_one_process_with_the_whole_batch(rank_pool, size, how):
    rank_pool(size).run(train, how, init=True)


def with_options(how: str) -> None:
    train(how, sparse_as_dense=True)
    train(how, gradient_predivide_factor=2.0, sparse_as_dense=True)
    train(how, groups=2)
    train(how, groups=1000, sparse_as_dense=True)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        train(how, num_groups=1)


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("size", [1, 2])
def test_options_change_nothing_of_the_result(rank_pool, size, how):
    rank_pool(size).run(with_options, how, init=True)


def traced_in_other_orders() -> None:
    """Two networks of one shape: each has its own gradients, although rank 1 traces the second one first."""
    nets = [Net(0), Net(5)]
    steps = []
    for net in nets:

        @tf.function
        def step(x: Any, y: Any, net: Net = net) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(net, x, y)
            return hvd.DistributedGradientTape(tape).gradient(loss, net.dense)

        steps.append(step)
    x, y = next(batches(1))
    for step in steps[:: 1 - 2 * hvd.rank()]:
        step.get_concrete_function(tf.constant(mine(x)), tf.constant(mine(y)))
    for net, step in zip(nets, steps, strict=True):
        gradients = step(tf.constant(mine(x)), tf.constant(mine(y)))
        with tf.GradientTape() as tape:
            loss = loss_of(net, x, y)
        assert_close(gradients, tape.gradient(loss, net.dense))


def test_ranks_may_trace_in_different_orders(rank_pool):
    rank_pool(2).run(traced_in_other_orders, init=True)


def adversaries(how: str) -> None:
    """Two losses and two lists of variables in one step, by a persistent tape and by another inside of it."""
    first, second = Net(0), Net(1)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape, tf.GradientTape() as other:
            one = loss_of(first, x, y)
            two = loss_of(second, x, first(x))
        tape, other = hvd.DistributedGradientTape(tape), hvd.DistributedGradientTape(other)
        return [
            *tape.gradient(one, first.dense),
            *tape.gradient(two, first.dense),
            *other.gradient(two, {"b": second.dense, "a": [second.outer]})["b"],
            *tf.nest.flatten(tape.gradient(two, second.outer)),
        ]

    x, y = next(batches(1))
    run = step if how == "eager" else tf.function(step)
    gradients = run(tf.constant(mine(x)), tf.constant(mine(y)))
    assert_identical_everywhere(gradients)
    with tf.GradientTape(persistent=True) as tape:
        one = loss_of(first, x, y)
        two = loss_of(second, x, first(x))
    expected = [*tape.gradient(one, first.dense), *tape.gradient(two, first.dense), *tape.gradient(two, second.dense)]
    assert_close(gradients, [*expected, tape.gradient(two, second.outer)])


@pytest.mark.parametrize("how", ["eager", "function"])
def test_persistent_tapes_several_tapes_and_structures_of_sources(rank_pool, how):
    rank_pool(2).run(adversaries, how, init=True)


def around_and_inside() -> None:
    """The tape may be wrapped inside its block, be the outer one of two, and watch tensors."""
    x = tf.constant([1.0, 2.0, 3.0]) * (hvd.rank() + 1)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True, watch_accessed_variables=False)) as tape:
        tape.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            cube = tf.reduce_sum(x**3)
        slope = inner.gradient(cube, x)
        square = x**2
    size = hvd.size()
    mean = sum(range(1, size + 1)) / size
    np.testing.assert_allclose(tape.gradient(slope, x), 6 * mean * np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(tape.jacobian(square, x), np.diag(2 * x.numpy()))
    assert isinstance(tape, tf.GradientTape)
    v = tf.Variable(2.0 + hvd.rank())
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = v**3
        slope = hvd.DistributedGradientTape(tape).gradient(loss, v)
    np.testing.assert_allclose(slope, np.mean([3 * (2.0 + rank) ** 2 for rank in range(size)]))
    # The gradient of an average is the average of the gradients: of each rank's second derivative.
    np.testing.assert_allclose(outer.gradient(slope, v), 6 * (2.0 + hvd.rank()), rtol=1e-6)
    with pytest.raises(ArgumentError, match="not distributed yet"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))
    for groups in (0, "a", [1]):
        with pytest.raises(ArgumentError, match="groups should be"):
            hvd.DistributedGradientTape(tf.GradientTape(), groups=groups)
    with pytest.raises(ArgumentError, match="one of the groups only"):
        hvd.DistributedGradientTape(tf.GradientTape(), groups=[[v], [v]])


def test_it_is_a_tape(rank_pool):
    rank_pool(2).run(around_and_inside, init=True)


def local_sources(scale: bool) -> None:
    model = Net()
    x, y = next(batches(1))
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(model, mine(x), mine(y))
    own = tape.gradient(loss, model.dense)
    distributed = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
    distributed.register_local_source(model.inner)
    gradients = distributed.gradient(loss, model.dense)
    np.testing.assert_array_equal(gradients[0], own[0] / hvd.size() if scale else own[0])
    np.testing.assert_allclose(gradients[1], hvd.allreduce(own[1]), rtol=1e-12)
    local, shared = distributed.get_local_and_global_gradients(gradients, model.dense)
    assert [id(variable) for _, variable in local] == [id(model.inner)]
    assert [id(variable) for _, variable in shared] == [id(model.outer)]


@pytest.mark.parametrize("scale", [True, False])
def test_gradients_of_local_sources_are_left_alone(rank_pool, scale):
    rank_pool(2).run(local_sources, scale, init=True)


def partial() -> None:
    import keras

    layer, other = keras.layers.Dense(3), keras.layers.Dense(2)
    model = keras.Sequential([layer, other])
    x = tf.ones((2, 4)) * (hvd.rank() + 1)
    model(x)
    hvd.broadcast_variables(model.variables, 0)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(model(x))
    own = tape.gradient(loss, model.trainable_variables)
    distributed = hvd.PartialDistributedGradientTape(tape, local_layers=[layer], scale_local_gradients=False)
    gradients = distributed.gradient(loss, model.trainable_variables)
    for index in (0, 1):
        np.testing.assert_array_equal(gradients[index], own[index])
    assert_identical_everywhere(gradients[2:])
    assert (own[2].numpy() != gradients[2].numpy()).any()
    with pytest.raises(ArgumentError, match="local_layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def test_variables_of_local_layers_are_left_alone(rank_pool):
    rank_pool(2).run(partial, init=True)


def other_operators() -> None:
    model = Net()
    x, y = next(batches(1))
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(model, mine(x), mine(y))
    own = tape.gradient(loss, model.inner)
    everywhere = [np.asarray(each) for each in hvd.allgather_object(own.numpy())]
    a, b = everywhere
    dot = (a * b).sum()
    adasum = (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
    for op, expected in ((hvd.Sum, a + b), (hvd.Max, np.maximum(a, b)), (hvd.Adasum, adasum)):
        found = hvd.DistributedGradientTape(tape, op=op).gradient(loss, [model.inner, model.unused])
        np.testing.assert_allclose(found[0], expected, rtol=1e-10)
        assert found[1] is None
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.DistributedGradientTape(tape, op=hvd.Max).gradient(loss, [model.table])
    compressed = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16).gradient(loss, model.all)
    assert compressed[1].dtype == compressed[0].dtype == tf.float64
    np.testing.assert_allclose(compressed[1], (a + b) / 2, rtol=1e-2, atol=1e-3)
    with pytest.raises(ArgumentError, match="predivide"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)


def test_operators_and_compression(rank_pool):
    rank_pool(2).run(other_operators, init=True)


def disagree(how: str) -> None:
    """Every rank learns of the difference, by the variable's name, and goes on."""
    rank = hvd.rank()
    v, w = tf.Variable([1.0, 2.0], name="v"), tf.Variable([3.0, 4.0], name="layer_3/w" if rank else "layer/w")
    shape = tf.Variable(np.ones(2 + rank, np.float32), name="s")
    dtype = tf.Variable(np.ones(2), dtype=tf.float64 if rank else tf.float32, name="d")
    table = tf.Variable(np.ones((4, 2), np.float32), name="table")

    def of_some() -> Any:
        return tf.reduce_sum(v * w if rank else v)

    def of_others() -> Any:
        return tf.reduce_sum(v if rank else w)

    def of_rows() -> Any:
        return tf.reduce_sum(table if rank else tf.gather(table, [1, 1]))

    cases = [
        (of_some, [v, w], r"member 1 of the group(.|\n)*rank 0: layer/w \(no gradient\)(.|\n)*rank 1: layer/w"),
        (of_others, [v, w], r"rank 0: v \(no gradient\)"),
        (lambda: tf.reduce_sum(shape), [shape], r"the shapes differ in member 0"),
        (lambda: tf.reduce_sum(dtype), [dtype], r"the data types differ in member 0"),
        (of_rows, [table], r"rank 0: table \(sparse gradient\)"),
        (of_some, [v, w][: 1 + rank], r"rank 0: no tensor"),
    ]
    for function, sources, message in cases:

        def gradients(function: Any = function, sources: Any = sources) -> Any:
            with tf.GradientTape() as tape:
                loss = function()
            return hvd.DistributedGradientTape(tape).gradient(loss, sources)

        # A function of Python that TensorFlow calls, where there are no native operations, can only fail as "unknown".
        kinds = (tf.errors.FailedPreconditionError, *[tf.errors.UnknownError] * (how != "eager"))
        with pytest.raises(kinds, match=message):
            (gradients if how == "eager" else tf.function(gradients))()
    with tf.GradientTape() as tape:
        loss = of_some()
    found = hvd.DistributedGradientTape(tape).gradient(loss, [v, w], unconnected_gradients=tf.UnconnectedGradients.ZERO)
    np.testing.assert_array_equal(found[1], [0.5, 1.0])


@pytest.mark.parametrize("how", ["eager", "function"])
def test_ranks_that_disagree_all_get_an_error_that_names_the_variable(rank_pool, how):
    rank_pool(2).run(disagree, how, init=True, timeout=60.0)


def in_a_process_set() -> None:
    some = hvd.add_process_set([0, 2])
    v = tf.Variable([1.0 + hvd.rank()])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * v)
    gradient = hvd.DistributedGradientTape(tape, process_set=some).gradient(loss, v)
    np.testing.assert_array_equal(gradient, [4.0] if hvd.rank() in (0, 2) else [2.0 * (1 + hvd.rank())])
    hvd.broadcast_object(None)  # a rank that is not in the set stays until it is done


def test_the_ranks_of_a_process_set_average_among_themselves(rank_pool):
    rank_pool(3).run(in_a_process_set, init=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def alone_in_the_job() -> None:
    model = Net()
    x, y = next(batches(1))
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(model, x, y)
    found = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16).gradient(loss, model.all)
    for one, other in zip(found[1:3], tape.gradient(loss, model.dense), strict=True):
        np.testing.assert_array_equal(one, other)
    assert isinstance(found[0], tf.IndexedSlices)


def test_alone_it_is_the_users_tape(rank_pool):
    rank_pool(1).run(alone_in_the_job, init=True)
