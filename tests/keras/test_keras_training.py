"""``fit`` with several ranks: the same bits on all of them, and the curve of one process with their whole batch.

Single precision: both may differ by 2e-5, relative to weights of about one, for sums in another order.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import reigen.keras as hvd
from tests.keras import keras_models as models

TOLERANCE = 2e-5

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw, clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "each clipped": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.05),
    "moving average": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "Keras's accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.5),
}


def train(kind: str, **compile_options: Any) -> Any:
    shared, alone, (together, single) = models.fit_both(OPTIMIZERS[kind], **compile_options)
    assert type(shared.optimizer).__name__ == type(alone.optimizer).__name__
    assert together["loss"] == pytest.approx(single["loss"], rel=1e-4)
    assert together["mae"] == pytest.approx(single["mae"], rel=1e-4)
    return models.bits(shared), float(np.abs(models.flat(shared) - models.flat(alone)).max())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replicas_have_the_same_bits_and_train_as_one_process(keras_pools, kind):
    results = keras_pools(2).run(train, kind, init=True)
    assert len({bits for bits, _ in results}) == 1
    assert max(difference for _, difference in results) < TOLERANCE


def test_three_ranks_do_so(keras_pools):
    results = keras_pools(3).run(train, "adamw, clipped", init=True)
    assert len({bits for bits, _ in results}) == 1
    assert max(difference for _, difference in results) < TOLERANCE


def train_several_steps_at_once() -> Any:
    return train("momentum", steps_per_execution=3)


def train_eagerly() -> Any:
    return train("Keras's accumulation", run_eagerly=True)


@pytest.mark.parametrize("run", [train_several_steps_at_once, train_eagerly])
def test_other_ways_to_run_steps(keras_pools, keras_backend, run):
    if keras_backend == "torch" and run is train_several_steps_at_once:
        pytest.skip("Keras refuses steps_per_execution with PyTorch")
    results = keras_pools(2).run(run, init=True)
    assert len({bits for bits, _ in results}) == 1
    assert max(difference for _, difference in results) < TOLERANCE


def accumulate(passes: int, average: bool, keras_steps: int | None) -> Any:
    """Two passes of 2 rows make the step that plain Keras makes of 2 * size * passes rows."""
    x, y = models.make_data()
    factor = 1.0 if average else float(passes)
    shared, alone = models.make_model(1), models.make_model(1)
    all_passes = passes * (keras_steps or 1)
    alone.compile(optimizer=keras.optimizers.SGD(0.1 * factor), loss="mse")
    models.fit(alone, x, y, 2 * hvd.size() * all_passes)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=keras_steps),
        backward_passes_per_step=passes,
        average_aggregated_gradients=average,
    )
    shared.compile(optimizer=optimizer, loss="mse")
    models.fit(shared, *hvd.shard(x, y), 2)
    assert shared.optimizer.get_config()["gradient_accumulation_steps"] == keras_steps
    return models.bits(shared), float(np.abs(models.flat(shared) - models.flat(alone)).max())


@pytest.mark.parametrize(("passes", "average", "keras_steps"), [(2, False, None), (3, True, None), (2, False, 2)])
def test_backward_passes_are_added_up_before_they_are_reduced(keras_pools, passes, average, keras_steps):
    results = keras_pools(2).run(accumulate, passes, average, keras_steps, init=True)
    assert len({bits for bits, _ in results}) == 1
    assert max(difference for _, difference in results) < TOLERANCE


class CustomStep(keras.Model):
    """Its loss is computed here; a model of its own has no ``compute_loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.make_model(hvd.rank())

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x, training=training)

    def train_step(self, *given: Any) -> Any:
        if keras.backend.backend() == "jax":
            return self._jax_step(*given)
        ((x, y),) = given
        if keras.backend.backend() == "torch":
            self.zero_grad()
            loss = keras.ops.mean(keras.ops.abs(self(x, training=True) - y))
            loss.backward()
            gradients = [each.value.grad for each in self.trainable_weights]
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.abs(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"error": loss}

    def _jax_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer_variables, metrics = state
        x, y = data

        def compute(trainable: Any, others: Any) -> Any:
            y_pred, updated = self.stateless_call(trainable, others, x, training=True)
            return keras.ops.mean(keras.ops.abs(y_pred - y)), updated

        (loss, others), gradients = jax.value_and_grad(compute, has_aux=True)(trainable, others)
        trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        return {"error": loss}, (trainable, others, optimizer_variables, metrics)


def train_with_custom_step() -> tuple[bytes, list[float]]:
    x, y = models.make_data()
    model = CustomStep()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = models.fit(model, *hvd.shard(x, y), 4, epochs=4, callbacks=callbacks)
    return models.bits(model), history.history["error"]


def test_custom_train_step(keras_pools):
    (bits, losses), other = keras_pools(2).run(train_with_custom_step, init=True)
    assert (bits, losses) == other
    assert losses[-1] < losses[0]


def apply_before_the_optimizer_is_built() -> list[float]:
    variable = keras.Variable(np.ones(3, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.apply([keras.ops.convert_to_tensor(np.full(3, hvd.rank() + 1.0, np.float32))], [variable])
    return keras.ops.convert_to_numpy(variable).tolist()


def test_an_optimizer_that_is_applied_before_it_is_built(keras_pools):
    assert keras_pools(2).run(apply_before_the_optimizer_is_built, init=True) == [[-2.0] * 3] * 2


def reduce_with(options: dict[str, Any]) -> list[list[float]]:
    """Gradients of one step, as they change variables of zeros."""
    variables = [keras.Variable(np.zeros(2, np.float32), name=f"v{place}") for place in range(4)]
    if "groups" in options and isinstance(options["groups"], list):
        options["groups"] = [[variables[place] for place in group] for group in options["groups"]]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    gradients = [np.full(2, (hvd.rank() + 1) * 10.0**place, np.float32) for place in range(4)]
    optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients], variables)
    return [keras.ops.convert_to_numpy(each).tolist() for each in variables]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"num_groups": 3},
        {"groups": [[3, 0], [1]]},
        {"gradient_predivide_factor": 2.0},
        {"groups": 9},
    ],
)
def test_options_that_change_how_not_what(keras_pools, options):
    for values in keras_pools(2).run(reduce_with, options, init=True):
        assert values == [[-1.5 * 10.0**place] * 2 for place in range(4)]


def reduce_compressed(kind: str) -> list[list[float]]:
    return reduce_with({"compression": getattr(hvd.Compression, kind)})


@pytest.mark.parametrize(("kind", "expected"), [("fp16", 1.5), ("bf16", 1.5)])
def test_compression(keras_pools, kind, expected):
    for values in keras_pools(2).run(reduce_compressed, kind, init=True):
        assert values[0] == [-expected] * 2


def keep_local(partial: bool, scale: bool) -> tuple[list[float], list[float]]:
    layer, other = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    plain = keras.optimizers.SGD(1.0)
    if partial:
        optimizer = hvd.PartialDistributedOptimizer(plain, local_layers=layer, scale_local_gradients=scale)
    else:
        optimizer = hvd.DistributedOptimizer(plain, scale_local_gradients=scale)
    for each in (layer, other):
        each.build((None, 1))
        each.kernel.assign([[0.0]])
    if not partial:
        optimizer.register_local_var(layer.kernel)
    gradient = keras.ops.convert_to_tensor(np.full((1, 1), 2.0 * (hvd.rank() + 1), np.float32))
    optimizer.apply([gradient, gradient], [layer.kernel, other.kernel])
    return tuple(keras.ops.convert_to_numpy(each.kernel).ravel().tolist() for each in (layer, other))


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_local_variables_are_not_reduced(keras_pools, partial, scale):
    results = keras_pools(2).run(keep_local, partial, scale, init=True)
    local = [-1.0, -2.0] if scale else [-2.0, -4.0]
    assert results == [([local[rank]], [-3.0]) for rank in range(2)]


def apply_with_missing(missing: list[list[int]]) -> list[list[float]]:
    """Two steps; by rank, the places of variables that have no gradient."""
    variables = [keras.Variable(np.ones(1, np.float32), name=f"v{place}") for place in range(3)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5), op=hvd.Sum)
    for _ in range(2):
        gradients = [
            None if place in missing[hvd.rank()] else keras.ops.convert_to_tensor(np.ones(1, np.float32))
            for place in range(3)
        ]
        optimizer.apply(gradients, variables)
    return [keras.ops.convert_to_numpy(each).tolist() for each in variables]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_gradients_that_are_missing_on_some_ranks_are_zeros_and_on_all_are_left_out(keras_pools):
    results = keras_pools(2).run(apply_with_missing, [[0, 2], [2]], init=True)

    def after(gradient: float) -> float:
        value = 1.0
        for _ in range(2):
            value = value * 0.5 - gradient
        return value

    assert results == [[[after(1.0)], [after(2.0)], [1.0]]] * 2


def apply_different(rank_shapes: list[tuple[int, ...]]) -> str:
    variable = keras.Variable(np.zeros(rank_shapes[hvd.rank()], np.float32), name="weights")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    try:
        optimizer.apply([keras.ops.ones(variable.shape)], [variable])
    except hvd.HorovodInternalError as error:
        return str(error)
    return "no error"


def test_different_variables_are_an_error_on_all_ranks(keras_pools):
    for message in keras_pools(2).run(apply_different, [(2,), (3,)], init=True):
        assert "rank 0: variable 0: float32 (2,)" in message
        assert "rank 1: variable 0: float32 (3,)" in message


def make_wrongly() -> list[str]:
    plain = keras.optimizers.SGD(0.1)
    attempts = [
        lambda: hvd.DistributedOptimizer(plain, op=hvd.Min),
        lambda: hvd.DistributedOptimizer(plain, op=hvd.Adasum),
        lambda: hvd.DistributedOptimizer(plain, op=hvd.Sum, gradient_predivide_factor=2.0),
        lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain)),
        lambda: hvd.DistributedOptimizer("sgd"),
        lambda: hvd.DistributedOptimizer(plain, backward_passes_per_step=0),
        lambda: hvd.DistributedOptimizer(plain, backward_passes_per_step=2.5),
        lambda: hvd.DistributedOptimizer(plain, groups=-1),
        lambda: hvd.DistributedOptimizer(plain, compression={"type": "2bit"}),
        lambda: hvd.PartialDistributedOptimizer(plain, local_layers=["dense"]),
    ]
    return [_error_of(attempt) for attempt in attempts]


def _error_of(attempt: Any) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


def test_arguments_that_make_no_sense(keras_pools):
    messages = keras_pools(1).run(make_wrongly, init=True)[0]
    expected = ["Average or Sum", "Average or Sum", "only with op=Average", "already", "keras.optimizers"]
    expected += ["positive integer", "positive integer", "groups must be", "compression must be", "local_layers"]
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def train_compiled() -> Any:
    # What PyTorch's code generator does with the graphs that it gets is PyTorch's own, and takes a minute.
    with ExitStack() as stack:
        if keras.backend.backend() == "torch":
            import torch

            stack.enter_context(
                mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
            )
        return train("momentum", jit_compile=True)


def test_compiled_steps(keras_pools, keras_backend):
    if keras_backend == "tensorflow":
        pytest.importorskip("tensorflow", "2.21", "XLA of older TensorFlow does not call collectives")
    results = keras_pools(2).run(train_compiled, init=True)
    assert len({bits for bits, _ in results}) == 1
    assert max(difference for _, difference in results) < TOLERANCE


def train_embedding(**options: Any) -> Any:
    """TensorFlow's gradients of an embedding are sparse."""
    words = np.random.default_rng(3).integers(0, 10, (24, 3))
    targets = (words.sum(axis=1, keepdims=True) / 20).astype(np.float32)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), *layers])

    alone, shared = make(), make()
    alone.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    models.fit(alone, words, targets, 8)
    shared.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), **options), loss="mse")
    models.fit(shared, *hvd.shard(words, targets), 4)
    return models.bits(shared), float(np.abs(models.flat(shared) - models.flat(alone)).max())


def train_embedding_clipped() -> Any:
    words = np.random.default_rng(3).integers(0, 10, (24, 3))
    targets = (words.sum(axis=1, keepdims=True) / 20).astype(np.float32)
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    clipped = keras.optimizers.SGD(0.5, global_clipnorm=0.1)
    model.compile(optimizer=hvd.DistributedOptimizer(clipped, sparse_as_dense=True), loss="mse")
    models.fit(model, *hvd.shard(words, targets), 8 // hvd.size())
    return models.flat(model)


def test_dense_gradients_are_clipped_alike_on_any_number_of_ranks(keras_pools):
    [alone] = keras_pools(1).run(train_embedding_clipped, init=True)
    for weights in keras_pools(2).run(train_embedding_clipped, init=True):
        assert np.abs(weights - alone).max() < TOLERANCE


def train_embedding_as_dense() -> Any:
    return train_embedding(sparse_as_dense=True)


def train_embedding_predivided() -> Any:
    return train_embedding(gradient_predivide_factor=2.0)


@pytest.mark.parametrize("run", [train_embedding, train_embedding_as_dense, train_embedding_predivided])
def test_sparse_gradients(keras_pools, run):
    results = keras_pools(2).run(run, init=True)
    assert len({bits for bits, _ in results}) == 1
    assert max(difference for _, difference in results) < TOLERANCE
