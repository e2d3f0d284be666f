"""A test suite as people write them for Horovod with tf.keras: of the Keras that Horovod knew, and of today's.

Run it in several processes: reigen run --as-horovod -np 2 python suite_keras.py
"""
# ruff: noqa: I001, PT009, PT027

import itertools
import math
import os
import tempfile
import unittest
import warnings

import numpy as np
import tensorflow as tf
from tensorflow import keras

import horovod.tensorflow.keras as hvd
from horovod.tensorflow.keras import callbacks as hvd_callbacks

LEGACY = not hasattr(keras, "ops")
CALLBACKS = """
    BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
    BestModelCheckpoint
"""
SUFFIX = ".h5" if LEGACY else ".keras"


class Schedule(keras.callbacks.Callback):
    """Writes down the learning rate of each epoch's last batch."""

    def __init__(self):
        super().__init__()
        self.rates, self.logged = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.current = float(self.model.optimizer.learning_rate)

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(self.current)
        self.logged.append((logs or {}).get("lr"))


class KerasTests(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore")
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        keras.utils.set_random_seed(1234 + self.rank)  # different on purpose: the broadcast makes them equal
        self.mean = (self.size + 1) / 2

    def data(self, rows=16):
        generator = np.random.RandomState(self.rank)
        x = generator.uniform(size=[rows, 3]).astype(np.float32)
        return x, (x @ np.array([[1.0], [-2.0], [3.0]])).astype(np.float32)

    def model(self, optimizer, layers=2, **options):
        hidden = [keras.layers.Dense(4, activation="tanh") for _ in range(layers - 1)]
        model = keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(1)])
        model.compile(optimizer, loss="mean_squared_error", metrics=["mean_absolute_error"], **options)
        return model

    def fit(self, model, epochs=2, callbacks=(), **options):
        x, y = self.data()
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
        return model.fit(x, y, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0, **options)

    def assert_same_everywhere(self, arrays):
        everyones = hvd.allgather_object([np.asarray(a).tobytes() for a in arrays])
        self.assertTrue(all(theirs == everyones[0] for theirs in everyones))

    def value(self, variable):
        return np.asarray(keras.backend.get_value(variable) if LEGACY else variable)

    # -- collectives on values

    def test_collectives_on_values(self):
        self.assertAlmostEqual(float(hvd.allreduce(self.rank + 1.0, name="a")), self.mean)
        self.assertAlmostEqual(float(hvd.allreduce(self.rank + 1.0, op=hvd.Sum)), self.mean * self.size)
        self.assertEqual(np.asarray(hvd.allreduce([1.0, 2.0], name="a_list")).tolist(), [1.0, 2.0])
        gathered = np.asarray(hvd.allgather([[float(self.rank)] * 2], name="g"))
        self.assertEqual(gathered.tolist(), [[float(r)] * 2 for r in range(self.size)])
        self.assertEqual(int(hvd.broadcast(self.rank + 5, 0, name="b")), 5)
        part = hvd.reducescatter(np.ones([2 * self.size, 2], np.float32), name="r", op=hvd.Sum)
        self.assertEqual(np.asarray(part).tolist(), [[float(self.size)] * 2] * 2)
        self.assertEqual(hvd.broadcast_object({"r": self.rank}, 0), {"r": 0})

    # -- the optimizer

    def test_class(self):
        opt = keras.optimizers.RMSprop(0.01, rho=0.8)
        wrapped = hvd.DistributedOptimizer(opt)
        self.assertIsInstance(wrapped, keras.optimizers.RMSprop)
        self.assertEqual(type(wrapped).__name__, "RMSprop")
        config = wrapped.get_config()
        self.assertEqual(config, opt.get_config())
        self.assertEqual(wrapped.from_config(config).get_config(), config)
        self.assertEqual(type(wrapped).from_config(config).get_config(), config)

    def test_refuses(self):
        for options in (
            {"op": hvd.Min},
            {"op": hvd.Adasum},
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        ):
            with self.assertRaises(ValueError):
                hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)

    def test_apply_gradients(self):
        for op, compression, predivide in itertools.product(
            [hvd.Average, hvd.Sum], [hvd.Compression.none, hvd.Compression.fp16], [1.0, 2.0]
        ):
            if op == hvd.Sum and predivide != 1.0:
                continue
            options = {"op": op, "compression": compression, "gradient_predivide_factor": predivide}
            opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
            one, two = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])
            gradients = [tf.fill([2], self.rank + 1.0), tf.fill([1, 1], 2.0 * (self.rank + 1))]
            opt.apply_gradients(list(zip(gradients, [one, two], strict=True)))
            factor = self.mean * (self.size if op == hvd.Sum else 1)
            self.assertTrue(np.allclose(self.value(one), [1 - factor, 2 - factor]), options)
            self.assertTrue(np.allclose(self.value(two), [[3 - 2 * factor]]), options)

    def test_apply_gradients_of_groups(self):
        for groups in ({"num_groups": 2}, {"groups": 2}, {"groups": "pairs"}):
            variables = [tf.Variable(tf.zeros([2, i + 1]), name=f"v{i}") for i in range(4)]
            options = {"groups": [variables[:2], variables[2:]]} if groups == {"groups": "pairs"} else groups
            opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
            gradients = [tf.ones_like(v) * float(self.rank + 1) for v in variables]
            opt.apply_gradients(list(zip(gradients, variables, strict=True)))
            for variable in variables:
                self.assertTrue(np.allclose(self.value(variable), -self.mean))

    def test_gradient_aggregation(self):
        for averaged, compiled in itertools.product([False, True], [False, True]):
            opt = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=averaged
            )
            variable = tf.Variable([10.0])

            def apply(gradient, opt=opt, variable=variable):
                opt.apply_gradients([(gradient, variable)])

            opt.build([variable])
            call = tf.function(apply) if compiled else apply
            values = []
            for i in range(4):
                call(tf.constant([float(self.rank + i)]))
                values.append(float(self.value(variable)[0]))
            mean, divisor = (self.size - 1) / 2, 2 if averaged else 1
            first, second = 10 - (2 * mean + 1) / divisor, 10 - (4 * mean + 6) / divisor
            self.assertTrue(np.allclose(values, [10, first, first, second]), (averaged, compiled, values))

    def test_local_variables(self):
        for scaled in (True, False):
            opt = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scaled)
            local, shared = tf.Variable([0.0], name="local"), tf.Variable([0.0], name="shared")
            opt.register_local_var(local)
            gradient = tf.fill([1], self.rank + 1.0)
            opt.apply_gradients([(gradient, local), (gradient, shared)])
            self.assertAlmostEqual(float(self.value(shared)[0]), -self.mean, 6)
            self.assertAlmostEqual(float(self.value(local)[0]), -(self.rank + 1) / (self.size if scaled else 1), 6)

    def test_partial_optimizer(self):
        layers = [keras.layers.Dense(1, kernel_initializer="ones", use_bias=False) for _ in range(2)]
        keras.Sequential([keras.Input((1,)), *layers])
        for local, scaled in itertools.product([layers[0], [layers[0]]], [True, False]):
            opt = hvd.PartialDistributedOptimizer(
                keras.optimizers.SGD(1.0), local_layers=local, scale_local_gradients=scaled
            )
            for layer in layers:
                layer.set_weights([np.zeros([1, 1])])
            variables = [layer.trainable_variables[0] for layer in layers]
            opt.apply_gradients([(tf.fill([1, 1], self.rank + 1.0), variable) for variable in variables])
            mine, everyones = (float(self.value(v)[0, 0]) for v in variables)
            self.assertAlmostEqual(mine, -(self.rank + 1) / (self.size if scaled else 1), 6)
            self.assertAlmostEqual(everyones, -self.mean, 6)

    # -- training

    def test_fit(self):
        for optimizer, options in (
            (keras.optimizers.SGD(0.05, momentum=0.9), {}),
            (keras.optimizers.RMSprop(0.01), {"compression": hvd.Compression.fp16}),
            (keras.optimizers.Adam(0.01), {"op": hvd.Sum}),
            (keras.optimizers.Adam(0.01), {"backward_passes_per_step": 2}),
            (keras.optimizers.SGD(0.05), {"gradient_predivide_factor": 2.0, "num_groups": 1}),
        ):
            model = self.model(hvd.DistributedOptimizer(optimizer, **options))
            losses = self.fit(model, epochs=4).history["loss"]
            self.assertLess(losses[-1], losses[0], options)
            self.assert_same_everywhere(model.get_weights())

    def test_fit_eagerly_and_in_several_steps(self):
        for options in ({"run_eagerly": True}, {"steps_per_execution": 2}):
            model = self.model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), **options)
            self.fit(model)
            self.assert_same_everywhere(model.get_weights())

    def test_fit_with_a_train_step_of_its_own(self):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x):
                return self.dense(x)

            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
                return {"own_loss": loss}

        model = Model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)))
        losses = self.fit(model, epochs=4).history["own_loss"]
        self.assertLess(losses[-1], losses[0])
        self.assert_same_everywhere(model.get_weights())

    def test_fit_of_an_embedding(self):
        for sparse_as_dense in (True, False):
            opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sparse_as_dense=sparse_as_dense)
            model = keras.Sequential(
                [keras.Input((2,)), keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
            )
            model.compile(opt, loss="mean_squared_error")
            x = np.random.RandomState(self.rank).randint(0, 50, [32, 2])
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            model.fit(x, np.ones([32, 1]), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
            self.assert_same_everywhere(model.get_weights())

    def test_fit_in_mixed_precision(self):
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            for wrap in (lambda o: o, keras.mixed_precision.LossScaleOptimizer):
                model = self.model(hvd.DistributedOptimizer(wrap(keras.optimizers.SGD(0.05))))
                self.fit(model)
                self.assert_same_everywhere(model.get_weights())
                self.assertTrue(all(np.isfinite(w).all() for w in model.get_weights()))
        finally:
            keras.mixed_precision.set_global_policy("float32")

    def test_same_curve_as_one_process(self):
        """Ranks with a share of the batch each do what one process does with all of it."""
        x = np.random.RandomState(7).uniform(size=[6 * 8, 3]).astype(np.float32)
        y = x.sum(1, keepdims=True)

        def trained(optimizer, x, y, batch_size):
            model = self.model(optimizer, layers=1)
            model.set_weights([np.full([3, 1], 0.5), np.zeros(1)])
            model.fit(x, y, batch_size=batch_size, epochs=3, shuffle=False, verbose=0)
            return model.get_weights()

        rows = [i for i in range(len(x)) if i % self.size == self.rank]
        distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        mine = trained(distributed, x[rows], y[rows], 6 * 2 // self.size)
        truth = trained(keras.optimizers.SGD(0.1, momentum=0.9), x, y, 6 * 2)
        for one, other in zip(mine, truth, strict=True):
            self.assertTrue(np.allclose(one, other, atol=1e-5), (one, other))

    # -- callbacks

    def test_broadcast(self):
        model = self.model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.0)))
        start = hvd.broadcast_object(model.get_weights(), 0)
        self.fit(model, epochs=1)
        for mine, roots in zip(model.get_weights(), start, strict=True):
            self.assertTrue(np.array_equal(mine, roots))

    def test_broadcast_leaves_local_variables(self):
        model = self.model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
        local = model.layers[0].trainable_variables
        for variable in local:
            variable.assign(tf.fill(variable.shape, float(self.rank)))
            model.optimizer.register_local_var(variable)
        x, y = self.data()
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
        for variable in local:
            self.assertTrue((self.value(variable) == self.rank).all())
        self.assert_same_everywhere(model.layers[-1].get_weights())

    def test_metric_average(self):
        model = self.model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
        own = []
        look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(dict(logs)))
        x, y = self.data()
        y = y + self.rank
        history = self.fit(model, 2, [look, hvd.callbacks.MetricAverageCallback()], validation_data=(x, y)).history
        for name in ("loss", "mean_absolute_error", "val_loss", "val_mean_absolute_error"):
            for epoch in range(2):
                values = hvd.allgather_object(float(own[epoch][name]))
                self.assertAlmostEqual(float(history[name][epoch]), sum(values) / len(values), 4)
            everyones = hvd.allgather_object([float(v) for v in history[name]])
            self.assertTrue(all(theirs == everyones[0] for theirs in everyones))

    def test_warmup(self):
        for momentum in (0.0, 0.9):
            model = self.model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=momentum)))
            schedule = Schedule()
            warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=3, verbose=0)
            self.fit(model, 4, [warmup, schedule])
            rates = [0.4 / self.size * (min(e + 1, 3) * (self.size - 1) / 3 + 1) for e in range(4)]
            self.assertTrue(np.allclose(schedule.rates, rates, rtol=1e-5), (schedule.rates, rates))
            self.assertTrue(np.allclose(schedule.logged, rates, rtol=1e-5), schedule.logged)
            if momentum:
                self.assertAlmostEqual(float(np.asarray(model.optimizer.momentum)), 0.9, 6)

    def test_schedule(self):
        for callbacks, rates in (
            (
                [
                    hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=1.0, end_epoch=2),
                    hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=0.1, start_epoch=2, end_epoch=3),
                    hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=0.01, start_epoch=3),
                ],
                [0.1, 0.1, 0.01, 0.001],
            ),
            (
                [hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5**epoch)],
                [0.1, 0.05, 0.025, 0.0125],
            ),
            (
                [
                    hvd.callbacks.LearningRateScheduleCallback(
                        0.1, multiplier=lambda epoch: math.exp(-epoch), staircase=False, steps_per_epoch=4
                    )
                ],
                [0.1 * math.exp(-e - 0.75) for e in range(4)],
            ),
        ):
            model = self.model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)))
            schedule = Schedule()
            self.fit(model, 4, [*callbacks, schedule])
            self.assertTrue(np.allclose(schedule.rates, rates, rtol=1e-5), (schedule.rates, rates))

    def test_names_of_callbacks(self):
        for name in CALLBACKS.split():
            self.assertIs(getattr(hvd.callbacks, name), getattr(hvd_callbacks, name))

    def test_best_model(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "best" + SUFFIX)  # noqa: PTH118
            best = hvd.callbacks.BestModelCheckpoint(monitor="loss", mode="min")
            best.filepath = path
            model = self.model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
            self.fit(model, 2, [hvd.callbacks.MetricAverageCallback(), best])
            if self.rank == 0:
                loaded = hvd.load_model(path)
                self.assertEqual([w.shape for w in loaded.get_weights()], [w.shape for w in model.get_weights()])

    # -- saved models

    def saved(self, directory, model, name="model"):
        path = os.path.join(directory, name + SUFFIX)  # noqa: PTH118
        model.save(path)
        return path

    def test_load_model(self):
        with tempfile.TemporaryDirectory() as directory:
            opt = keras.optimizers.RMSprop(0.003, rho=0.7)
            plain = self.model(opt)
            wrapped = self.model(hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.003, rho=0.7)))
            for model in (plain, wrapped):
                x, y = self.data()
                model.fit(x, y, verbose=0)
                loaded = hvd.load_model(self.saved(directory, model))
                found = loaded.optimizer
                self.assertEqual(type(found).__name__, "RMSprop")
                self.assertTrue(hasattr(found, "register_local_var"))
                self.assertAlmostEqual(float(found.learning_rate), 0.003, 6)
                self.assertAlmostEqual(float(found.rho), 0.7, 6)
                for one, other in zip(found.variables, model.optimizer.variables, strict=True):
                    self.assertTrue(np.allclose(self.value(one), self.value(other)))
                for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
                    self.assertTrue(np.array_equal(one, other))
                self.fit(loaded)
                self.assert_same_everywhere(loaded.get_weights())

    def test_a_saved_model_needs_no_horovod(self):
        with tempfile.TemporaryDirectory() as directory:
            model = self.model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
            self.fit(model)
            loaded = keras.models.load_model(self.saved(directory, model))
            self.assertIs(type(loaded.optimizer), keras.optimizers.Adam)
            for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
                self.assertTrue(np.array_equal(one, other))

    def test_load_model_with_objects_of_its_own(self):
        class OwnOptimizer(keras.optimizers.SGD):
            pass

        def own_activation(x):
            return tf.square(x)

        # the Keras of then cannot read such a function from its own file
        activation = "tanh" if LEGACY else own_activation
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation=activation)])
        model.compile(OwnOptimizer(learning_rate=0.02), loss="mean_squared_error")
        x, y = self.data()
        model.fit(x, y, verbose=0)
        with tempfile.TemporaryDirectory() as directory:
            path = self.saved(directory, model)
            by_function = {
                "own_activation": own_activation,
                "OwnOptimizer": lambda **kwargs: hvd.DistributedOptimizer(OwnOptimizer(**kwargs)),
            }
            for options in (
                {"custom_optimizers": [OwnOptimizer], "custom_objects": {"own_activation": own_activation}},
                {"custom_objects": by_function},
            ):
                loaded = hvd.load_model(path, **options)
                self.assertEqual(type(loaded.optimizer).__name__, "OwnOptimizer")
                self.assertAlmostEqual(float(loaded.optimizer.learning_rate), 0.02, 6)

    def test_load_model_on_one_rank_and_broadcast(self):
        with tempfile.TemporaryDirectory() as directory:
            if self.rank == 0:
                model = self.model(keras.optimizers.Adam(0.01))
                x, y = self.data()
                model.fit(x, y, verbose=0)
                model = hvd.load_model(self.saved(directory, model))
                steps = int(self.value(model.optimizer.iterations))
            else:
                model = self.model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
                steps = 0
            steps = hvd.broadcast_object(steps, 0)
            x, y = self.data(8)
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
            self.assertEqual(int(self.value(model.optimizer.iterations)), steps + 1)
            self.assert_same_everywhere(model.get_weights())
            self.assert_same_everywhere([self.value(v) for v in model.optimizer.variables])


if __name__ == "__main__":
    unittest.main()
