"""hvd.elastic with TensorFlow: a function that was traced with one rank goes on with two, and after an error."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from reigen import context
from reigen.api import job
from reigen.elastic import membership
from reigen.errors import ArgumentError
from tests.tensorflow.tf_training import LR, Net, alone, assert_close, batches, loss_of, mine
from tests.torch.elastic_membership import WrittenViews

STEPS = 8


def trains() -> tuple[list[int], int]:
    place = int(os.environ["REIGEN_RANK"])
    member = WrittenViews(place, [[0], [0, 1], [1, 0]], [2, None, None]).begin()
    model = Net(seed=place)
    sizes, traces = [], []

    def step(x: Any, y: Any) -> None:
        traces.append(hvd.size())
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.all)
        for variable, gradient in zip(model.all, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(LR * tf.convert_to_tensor(gradient))

    data = list(batches(STEPS))
    shapes = [tf.TensorSpec([None, *each.shape[1:]], tf.as_dtype(each.dtype)) for each in data[0]]
    run = tf.function(step, input_signature=shapes)
    state = hvd.elastic.TensorFlowState(model.all, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        sizes.append(hvd.size())
        while state.step < STEPS:
            x, y = data[state.step]
            if member.number == 1 and state.step == 5 and hvd.rank() == 1:
                context.current().give_up(ValueError("on purpose"))
            run(tf.constant(mine(x)), tf.constant(mine(y)))  # in the graph, the others' collective fails
            state.step += 1
            state.commit()

    try:
        train(state)
        assert_close(model.all, alone(STEPS).all)
        return sizes, len(traces)
    finally:
        hvd.shutdown()
        membership.use(None)


def test_one_trace_for_all_views(rank_pool):
    assert rank_pool(2).run(trains) == [([1, 2, 2], 1), ([2, 2], 1)]


def other_errors() -> None:
    """All other errors leave, as what they are."""
    hvd.init()
    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)], step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        tf.debugging.assert_equal(1, 2)

    membership.use(WrittenViews(0, [[0]], [None], number=0))
    try:
        with pytest.raises(tf.errors.InvalidArgumentError):
            train(state)
    finally:
        membership.use(None)
    with pytest.raises(ValueError, match="needs variables"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(ValueError, match="no variables yet"):
        hvd.elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=2.0)
        session.run(tf.compat.v1.global_variables_initializer())
        graph_state = hvd.elastic.TensorFlowState(session=session, batch=3)
        session.run(variable.assign(5.0))
        graph_state.batch = 4
        graph_state.restore()
        assert (session.run(variable), graph_state.batch) == (2.0, 3)
        session.run(variable.assign(6.0))
        graph_state.sync()
        session.run(variable.assign(7.0))
        graph_state.restore()
        assert session.run(variable) == 6.0


def test_other_errors_and_sessions(rank_pool):
    rank_pool(1).run(other_errors)


def legacy() -> int:
    """The legacy Keras: a state, and its callbacks in fit."""
    hvd.init()
    import reigen.tensorflow.keras as hk

    try:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
        model.compile(hk.DistributedOptimizer(tf.keras.optimizers.Adam(0.1)), "mse")
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)
        callbacks = [
            hk.elastic.UpdateBatchStateCallback(state),
            hk.elastic.UpdateEpochStateCallback(state),
            hk.elastic.CommitStateCallback(state, batches_per_commit=2),
        ]

        @hk.elastic.run
        def train(state: Any) -> int:
            x = tf.random.normal((8, 2), seed=hvd.rank())
            model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
            return state.num_commits

        commits = train(state)
        weights = model.get_weights()
        model.set_weights([0 * each for each in weights])
        state.restore()
        assert all((one == other).all() for one, other in zip(model.get_weights(), weights, strict=True))
        assert (state.epoch, state.batch) == (2, 0)
        return commits
    finally:
        hvd.shutdown()


def test_the_legacy_keras(legacy_pool):
    assert legacy_pool.run(legacy) == [6, 6]


def candidate_traces() -> None:
    """A candidate that traces its training step, as many do before they train, does not become a member by it."""
    hvd.init()
    joined: list[None] = []
    weights = tf.Variable([1.0, 2.0])

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * weights)
        return hvd.DistributedGradientTape(tape).gradient(loss, [weights])[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "is_candidate", lambda: True)
        patch.setattr(context, "elastic_job", lambda: SimpleNamespace(has_warm_spares=False))
        patch.setattr(job, "change_view", lambda: joined.append(None))
        assert step().numpy().tolist() == [2.0, 4.0]
        graph = tf.function(step).get_concrete_function().graph
    assert joined == []
    assert any("size" in node.name.lower() or "reigen" in node.name.lower() for node in graph.get_operations())
    hvd.shutdown()


def test_a_candidate_that_traces_its_step_stays_one(rank_pool):
    rank_pool(1).run(candidate_traces)


def test_a_plain_loop_with_warm_spares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "elastic_job", lambda: SimpleNamespace(has_warm_spares=True, step_state=None))
    variable = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = variable * 2.0
    with pytest.raises(ArgumentError, match=r"Start this job with --spares N: its spares get the state when"):
        hvd.DistributedGradientTape(tape).gradient(loss, [variable])
