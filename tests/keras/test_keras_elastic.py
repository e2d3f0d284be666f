"""hvd.elastic with Keras: ranks come, and an error goes back to the last commit, on each backend."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import reigen.keras as hvd
from reigen import context
from reigen.elastic import membership
from reigen.errors import ArgumentError, CollectiveError
from tests.keras import keras_models as models
from tests.torch.elastic_membership import WrittenViews

EPOCHS, BATCHES = 3, 4
VIEWS = [[0], [0, 1], [1, 0]]


class Fails(keras.callbacks.Callback):
    """One rank gives up before a batch, once; the others find out inside of the program."""

    def __init__(self, member: WrittenViews) -> None:
        super().__init__()
        self.member, self.batches = member, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.member.number == 1 and self.batches == 4 and hvd.rank() == 1:
            context.current().give_up(ValueError("on purpose"))
            raise CollectiveError("on purpose")


class Batches(keras.callbacks.Callback):
    """Notes what was trained on."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.seen.append((self.state.epoch, self.state.batch))


def trains() -> Any:
    """The same batches on all ranks, so that the number of ranks makes no difference."""
    place = int(os.environ["REIGEN_RANK"])
    member = WrittenViews(place, VIEWS, [3, None, None]).begin()
    x, y = (each[:16] for each in models.make_data())
    model = models.make_model(seed=1 + place)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, seen=[])

    @hvd.elastic.run
    def train(state: Any) -> None:
        first = state.batch * 4  # the rest of an epoch
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Batches(state),
            Fails(member),
            hvd.elastic.CommitStateCallback(state),
        ]
        if 0 < first < len(x):
            models.fit(model, x[first:], y[first:], 4, epochs=1, callbacks=callbacks)
        models.fit(model, x, y, 4, epochs=EPOCHS - state.epoch, callbacks=callbacks)

    try:
        train(state)
        assert member.number == 2
    finally:
        hvd.shutdown()
        membership.use(None)
    alone = models.make_model(seed=1)
    alone.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    models.fit(alone, x, y, 4, epochs=EPOCHS)
    np.testing.assert_allclose(models.flat(model), models.flat(alone), rtol=1e-4, atol=1e-5)
    return state.seen


def test_ranks_come_and_an_error_goes_back(keras_pools):
    every = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(1, BATCHES + 1)]
    assert keras_pools(2).run(trains) == [every, every]


def restores_seeds() -> bool:
    """After a program that was interrupted: JAX's `fit` has taken the variables' values, and given none back."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    x, y = np.ones((8, 4)), np.ones((8, 1))
    state = hvd.elastic.KerasState(model)
    model.fit(x, y, batch_size=4, verbose=0)
    state.save()
    (seed,) = [variable for variable in model.variables if "seed" in variable.path]
    before = keras.ops.convert_to_numpy(seed).tolist()
    model.fit(x, y, batch_size=4, verbose=0)
    changed = keras.ops.convert_to_numpy(seed).tolist() != before
    if keras.backend.backend() == "jax":
        seed._value = None
    state.restore()
    assert keras.ops.convert_to_numpy(seed).tolist() == before
    model.fit(x, y, batch_size=4, verbose=0)
    return changed or keras.backend.backend() == "torch"  # whose Dropout uses PyTorch's generator


def test_seeds_of_layers_go_back_too(keras_pools):
    assert keras_pools(1).run(restores_seeds, init=True) == [True]


def test_a_plain_loop_with_warm_spares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.init()
    try:
        variable, optimizer = keras.Variable([1.0]), hvd.DistributedOptimizer(keras.optimizers.SGD())
        monkeypatch.setattr(context, "elastic_job", lambda: SimpleNamespace(has_warm_spares=True, step_state=None))
        with pytest.raises(ArgumentError, match=r"Start this job with --spares N: its spares get the state when"):
            optimizer.apply([variable.value], [variable])
    finally:
        monkeypatch.undo()
        hvd.shutdown()
