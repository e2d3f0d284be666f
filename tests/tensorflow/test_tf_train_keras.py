"""``import reigen.tensorflow.keras as hvd``: fit, callbacks, saved models; with Keras 3 and with the legacy one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from reigen.errors import ArgumentError
from reigen.testing import RankPool
from tests.tensorflow.tf_training import assert_identical_everywhere

ROWS, EPOCHS = 24, 3


@pytest.fixture(params=["keras 3", "legacy"])
def pool(request: pytest.FixtureRequest, legacy_pool: RankPool, rank_pool: Callable[[int], RankPool]) -> RankPool:
    """Two ranks."""
    return legacy_pool if request.param == "legacy" else rank_pool(2)


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    return random.standard_normal((ROWS, 5)), random.standard_normal((ROWS, 2))


def make_model(seed: int = 0, dtype: str = "float64") -> Any:
    tf.keras.utils.set_random_seed(seed)
    layers = [tf.keras.layers.Dense(8, activation="tanh", dtype=dtype), tf.keras.layers.Dense(2, dtype=dtype)]
    model = tf.keras.Sequential(layers)
    model.build((None, 5))
    return model


def optimizers() -> list[Callable[[], Any]]:
    found = [lambda: tf.optimizers.Adam(0.01), lambda: tf.optimizers.SGD(0.05, momentum=0.9)]
    if not tf.keras.Model.__module__.startswith("keras."):
        found.append(lambda: tf.keras.optimizers.legacy.Adam(0.01))
    return found


def fit(model: Any, optimizer: Any, x: Any, y: Any, batch: int, callbacks: Any = ()) -> Any:
    model.compile(loss=tf.keras.losses.MeanSquaredError(), optimizer=optimizer)
    return model.fit(x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks))


def interleaved(size: int, batch: int) -> tuple[Any, Any]:
    """All data, in such an order that batches of all ranks together are those of one process."""
    x, y = data()
    order = np.arange(ROWS).reshape(-1, size, batch).transpose(1, 0, 2).reshape(size, -1)
    return [x[part] for part in order], [y[part] for part in order]


def the_slides() -> None:
    """The script of the course, as typed, but for the data; each rank starts with other weights."""
    import reigen.tensorflow.keras as hvd

    hvd.init()
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    for make in optimizers():
        batch = 8 // int(hvd.size())
        xs, ys = interleaved(hvd.size(), batch)
        model = make_model(hvd.rank())
        optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=1, average_aggregated_gradients=True)
        assert type(optimizer).__name__ == type(make()).__name__
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        history = fit(model, optimizer, xs[hvd.rank()], ys[hvd.rank()], batch, callbacks)
        assert_identical_everywhere([each.numpy() for each in model.trainable_variables])
        truth = make_model(0)
        expected = fit(truth, make(), *data(), 8)
        for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    hvd.shutdown()


def test_the_slides_script_trains_as_one_process(pool):
    pool.run(the_slides)


def accumulates(average: bool) -> None:
    import reigen.tensorflow.keras as hvd

    for make in optimizers()[1:2]:  # Adam's iterations count the passes that only add up, too
        batch, passes = 2, 3
        xs, ys = interleaved(hvd.size(), batch)
        model = make_model()
        options = {"backward_passes_per_step": passes, "average_aggregated_gradients": average}
        fit(model, hvd.DistributedOptimizer(make(), **options), xs[hvd.rank()], ys[hvd.rank()], batch)
        assert_identical_everywhere(model.get_weights())
        truth = make_model()
        (x,), (y,) = interleaved(1, ROWS)
        plain = make()
        for _ in range(EPOCHS):
            for part in np.arange(ROWS).reshape(-1, batch * passes * hvd.size()):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(truth(x[part]) - y[part])) * (1 if average else passes)
                variables = truth.trainable_variables
                plain.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("average", [True, False])
def test_gradients_of_several_batches_are_added_up(pool, average):
    pool.run(accumulates, average, init=True)


def with_callbacks() -> None:
    import reigen.tensorflow.keras as hvd

    xs, ys = interleaved(2, 4)
    rates = []

    class Watch(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

    model = make_model()
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=1, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.2, multiplier=lambda epoch: 0.1**epoch, start_epoch=2),
        Watch(),
    ]
    optimizer = hvd.DistributedOptimizer(tf.optimizers.SGD(0.2, momentum=0.9))
    fit(model, optimizer, xs[hvd.rank()], ys[hvd.rank()], 4, callbacks)
    np.testing.assert_allclose(rates, [0.4 / 3, 0.5 / 3, 0.2, 0.2, 0.2, 0.2, 0.002, 0.002, 0.002], rtol=1e-5)
    assert_identical_everywhere(model.get_weights())


def test_the_learning_rate_warms_up(pool):
    pool.run(with_callbacks, init=True)


def save_and_load(directory: str, suffix: str) -> None:
    import reigen.tensorflow.keras as hvd

    xs, ys = interleaved(2, 4)
    for number, make in enumerate(optimizers()):
        path = str(Path(directory, f"best{number}{suffix}"))
        model = make_model()
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        best.filepath = path
        callbacks = [hvd.callbacks.MetricAverageCallback(), best]
        fit(model, hvd.DistributedOptimizer(make()), xs[hvd.rank()], ys[hvd.rank()], 4, callbacks)
        hvd.broadcast_object(None)
        assert Path(path).exists()
        loaded, plain = hvd.load_model(path), tf.keras.models.load_model(path)
        for one, other in zip(loaded.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        assert type(plain.optimizer).__name__ == type(make()).__name__
        steps = int(np.asarray(plain.optimizer.iterations))
        assert int(np.asarray(loaded.optimizer.iterations)) == steps
        if not steps:  # the older optimizers' state is not in files of Keras's own format
            assert "legacy" in type(plain.optimizer).__module__
            continue
        assert steps == ROWS // 8 * EPOCHS
        x, y = xs[hvd.rank()], ys[hvd.rank()]
        loaded.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert_identical_everywhere(loaded.get_weights())
        if suffix == ".h5" and not hvd.choice.IS_LEGACY:  # of which Keras 3 reads no state
            continue
        # The state has been kept: one more epoch of the first model does the same.
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_models_are_saved_and_loaded_with_their_optimizers_state(pool, suffix, tmp_path):
    pool.run(save_and_load, str(tmp_path), suffix, init=True)


def load_saved_models(directory: str) -> None:
    """The older Keras loads its optimizers without their state from a SavedModel."""
    import reigen.tensorflow.keras as hvd

    if not hvd.choice.IS_LEGACY:  # Keras 3 saves files
        return
    xs, ys = interleaved(2, 4)
    for number, make in enumerate(optimizers()):
        path = str(Path(directory, f"{hvd.rank()}.{number}"))
        model = make_model()
        fit(model, hvd.DistributedOptimizer(make()), xs[hvd.rank()], ys[hvd.rank()], 4, [])
        model.save(path)
        loaded = hvd.load_model(path)
        assert type(loaded.optimizer).__name__ == type(make()).__name__
        for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        loaded.fit(xs[hvd.rank()], ys[hvd.rank()], batch_size=4, shuffle=False, verbose=0)
        assert_identical_everywhere(loaded.get_weights())


def test_saved_models_are_loaded(pool, tmp_path):
    pool.run(load_saved_models, str(tmp_path), init=True)


def mixed_precision() -> None:
    """One rank's gradients overflow: all of them skip the step."""
    import reigen.tensorflow.keras as hvd

    for outside in (True, False):
        model = make_model(dtype="mixed_float16")
        optimizer = tf.optimizers.SGD(0.1)
        scaled = tf.keras.mixed_precision.LossScaleOptimizer
        wrapped = (
            hvd.DistributedOptimizer(scaled(optimizer)) if outside else scaled(hvd.DistributedOptimizer(optimizer))
        )
        x, y = (each[:4].astype(np.float32) * (1 + hvd.rank()) for each in data())
        before = model.get_weights()
        model.compile(loss="mse", optimizer=wrapped)
        model.fit(x, y * (1e30 if hvd.rank() else 1.0), batch_size=4, verbose=0)
        for one, other in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)
        for _ in range(20):  # the scale has to come down first
            model.fit(x, y, batch_size=4, verbose=0)
        assert_identical_everywhere(model.get_weights())
        assert any((one != other).any() for one, other in zip(model.get_weights(), before, strict=True))


def test_ranks_decide_alike_whether_gradients_are_finite(pool):
    pool.run(mixed_precision, init=True, timeout=60.0)


def partly() -> None:
    import reigen.tensorflow.keras as hvd

    xs, ys = interleaved(2, 4)
    for make in optimizers():
        model = make_model()
        optimizer = hvd.PartialDistributedOptimizer(make(), local_layers=[model.layers[0]])
        fit(model, optimizer, xs[hvd.rank()], ys[hvd.rank()], 4)
        weights = model.get_weights()
        assert_identical_everywhere(weights[2:])
        everywhere = hvd.allgather_object(weights[0])
        assert (everywhere[0] != everywhere[1]).any()


def test_local_layers_have_weights_of_their_own(pool):
    pool.run(partly, init=True)


def values_and_mistakes() -> None:
    import reigen.tensorflow as hvd_tf
    import reigen.tensorflow.keras as hvd

    rank = hvd.rank()
    assert hvd.allreduce(tf.constant([1.0 + rank, 2.0]), op=hvd.Sum).tolist() == [3.0, 4.0]
    assert hvd.allreduce(np.float32(rank)) == 0.5
    assert hvd.allgather(tf.constant([rank])).tolist() == [0, 1]
    assert hvd.broadcast(tf.constant([rank + 5]), 1).tolist() == [6]
    assert hvd.reducescatter(tf.constant([1.0, 2.0]), op=hvd.Sum).tolist() == [2.0 * (1 + rank)]
    for wrong in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"op": hvd.Sum, "gradient_predivide_factor": 2.0}):
        with pytest.raises(ValueError, match=r"Average|Adasum"):
            hvd.DistributedOptimizer(tf.optimizers.SGD(), **wrong)
    for wrong in ({"backward_passes_per_step": 0}, {"groups": "a"}):
        with pytest.raises(ValueError, match=r"backward_passes_per_step|groups"):
            hvd.DistributedOptimizer(tf.optimizers.SGD(), **wrong)
    with pytest.raises(ArgumentError):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(tf.optimizers.SGD()))
    with pytest.raises(ValueError, match="optimizer"):
        hvd.DistributedOptimizer(3)
    wrapped = hvd_tf.DistributedOptimizer(tf.optimizers.Adam(), groups=2)
    assert isinstance(wrapped, tf.optimizers.Adam)
    fit(make_model(), wrapped, *(each[:8] for each in data()), 4)


def test_functions_of_values_and_wrong_arguments(pool):
    pool.run(values_and_mistakes, init=True)
