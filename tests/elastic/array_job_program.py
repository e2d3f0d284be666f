"""A linear regression in an `elastic.Job` of JAX, TensorFlow or Keras (``FRAMEWORK``), whose steps are written down.

It dies by its own hand where ``DIES_AT`` says, ``POINT:NUMBER`` of the step: ``forward``, ``before`` the gradients are
averaged, ``between`` that and the update, ``within`` the update, when half of the weights have been changed, ``after``
it, and ``change``, in the next change of members.

Lines as for `tests.elastic.step_ledger`, and ``DONE rank size digest undone weights``. Arguments: epochs, samples.
"""

import contextlib
import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import reigen.elastic_job
import reigen.engine_factory  # noqa: F401  as the frameworks: loaded later otherwise, by each process
from reigen import context
from reigen.elastic import Cursor
from reigen.elastic import job as jobs
from tests.elastic.job_death import Death

FRAMEWORK = os.environ.get("FRAMEWORK", "jax")
PACKAGES = {"jax": ["jax", "optax"], "tensorflow": ["tensorflow", "keras"], "keras": ["keras"]}
if os.environ.get("KERAS_BACKEND") == "torch":
    PACKAGES["keras"] += ["torch._dynamo.trace_rules"]
for package in PACKAGES[FRAMEWORK]:
    importlib.import_module(package)
hvd = importlib.import_module(f"reigen.{FRAMEWORK}")
importlib.import_module(f"reigen.{FRAMEWORK}.elastic")

RATE, MOMENTUM, INPUTS = 0.05, 0.9, 8


def make_data(num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(5).standard_normal((num_samples, INPUTS)).astype(np.float32)
    return inputs, inputs.sum(1, keepdims=True) + 1


class JaxProgram:
    """Pytrees, a compiled gradient, and optax."""

    def __init__(self, value: float, width: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        params = {"w": jnp.full((width, 1), value), "b": jnp.full((1,), value)}
        self.optimizer = optax.sgd(RATE, momentum=MOMENTUM)
        self.trees = {"params": params, "moments": self.optimizer.init(params), "key": jax.random.key(int(value))}

        @jax.jit
        def slope(params: dict, inputs: np.ndarray, targets: np.ndarray) -> dict:
            return jax.grad(lambda p: jnp.square(inputs @ p["w"] + p["b"] - targets).mean())(params)

        self.slope, self.apply_updates, self.split = slope, optax.apply_updates, jax.random.split

    def make_job(self, **options: object) -> object:
        self.job = hvd.elastic.Job(**self.trees, **options)
        return self.job

    def gradients(self, inputs: np.ndarray, targets: np.ndarray) -> object:
        return self.slope(self.job.params, inputs, targets)

    def apply(self, averaged: object, death: Death) -> None:
        updates, moments = self.optimizer.update(averaged, self.job.moments, self.job.params)
        params = self.apply_updates(self.job.params, updates)
        death.at("within", self.job.number)
        self.job.apply(params=params, moments=moments, key=self.split(self.job.key)[0])

    def weights(self) -> list[np.ndarray]:
        import jax

        return [*map(np.asarray, jax.tree.leaves((self.job.params, self.job.moments)))]


class KerasProgram:
    """A model of Keras; on TensorFlow with a compiled gradient."""

    def __init__(self, value: float, width: int) -> None:
        import keras

        make = keras.initializers.Constant(value)
        layers = [keras.layers.Dense(1, kernel_initializer=make, bias_initializer=make)]
        if os.environ.get("KIND") == "norm dropout":
            layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1), *layers]
        self.model = keras.Sequential([keras.Input((width,)), *layers])
        self.optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        self.backend = keras.backend.backend()
        if self.backend == "tensorflow":
            import tensorflow as tf

            self.compiled = tf.function(self.tape_gradients, reduce_retracing=True)
        if self.backend == "jax":
            import jax

            self.compiled = jax.jit(jax.value_and_grad(self.stateless_loss, has_aux=True))

    def make_job(self, **options: object) -> object:
        if FRAMEWORK == "tensorflow":
            trained = self.model.trainable_variables
            values = [variable.value for variable in trained]
            self.job = hvd.elastic.Job(values, data=options.pop("data"), others=self.slots(values), **options)
        else:
            self.job = hvd.elastic.Job(self.model, self.optimizer, **options)
        return self.job

    def slots(self, values: list) -> list:
        import tensorflow as tf

        self.values, self.velocities = values, [tf.Variable(tf.zeros_like(value)) for value in values]
        return self.velocities

    def tape_gradients(self, inputs: object, targets: object) -> list:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(inputs, training=True) - targets))
        return tape.gradient(loss, [variable.value for variable in self.model.trainable_variables])

    def stateless_loss(self, trained: list, others: list, inputs: object, targets: object) -> tuple:
        outputs, others = self.model.stateless_call(trained, others, inputs, training=True)
        return ((outputs - targets) ** 2).mean(), others

    def gradients(self, inputs: np.ndarray, targets: np.ndarray) -> list:
        if self.backend == "tensorflow":
            return self.compiled(inputs, targets)
        if self.backend == "torch":
            import torch

            self.model.zero_grad()
            (self.model(torch.from_numpy(inputs), training=True) - torch.from_numpy(targets)).square().mean().backward()
            return [variable.value.grad for variable in self.model.trainable_variables]
        import jax.numpy as jnp

        def loss_of(trained: list, others: list) -> tuple:
            outputs, others = self.model.stateless_call(trained, others, inputs, training=True)
            return jnp.square(outputs - targets).mean(), others

        values = (
            [v.value for v in each] for each in (self.model.trainable_variables, self.model.non_trainable_variables)
        )
        (_, others), gradients = self.compiled(*values, inputs, targets)
        for variable, value in zip(self.model.non_trainable_variables, others, strict=True):
            variable.assign(value)
        return gradients

    def apply(self, averaged: list, death: Death) -> None:
        if self.backend == "torch":
            import torch

            quiet: contextlib.AbstractContextManager = torch.no_grad()
        else:
            quiet = contextlib.nullcontext()
        with self.job.update(), quiet:
            if FRAMEWORK == "tensorflow":
                for value, velocity, gradient in zip(self.values, self.velocities, averaged, strict=True):
                    velocity.assign(MOMENTUM * velocity - RATE * gradient)
                    value.assign_add(velocity)
                    death.at("within", self.job.number)
            elif os.environ.get("DIES_AT", "").startswith("within") and self.job.number == death.number:
                self.model.trainable_variables[0].assign(0 * averaged[0])
                death.at("within", self.job.number)
            else:
                self.optimizer.apply(averaged, self.model.trainable_variables)

    def weights(self) -> list[np.ndarray]:
        from keras import ops

        own = self.velocities if FRAMEWORK == "tensorflow" else self.optimizer.variables
        return [np.array(ops.convert_to_numpy(each)) for each in [*self.model.trainable_variables, *own]]


def digest(weights: list[np.ndarray]) -> str:
    found = hashlib.sha256()
    for each in weights:
        found.update(each.tobytes())
    return found.hexdigest()[:16]


def train(job: Any, program: Any, num_epochs: int, inputs: np.ndarray, targets: np.ndarray) -> None:
    """Train so many epochs, and more until there are ``SIZE`` ranks, and the file ``FINISH`` if there is one."""
    death, size = Death(), int(os.environ.get("SIZE", "0"))
    death.watch_changes(jobs, job)
    epochs = max(num_epochs, job.data.epoch + 1)
    until, every = int(os.environ.get("UNTIL", "-1")), int(os.environ.get("EVERY", "0"))
    while True:
        for step in job.steps(epochs):
            if step.number == until:
                return
            run(step, job, program, death, inputs, targets)
            if every and job.number % every == 0:
                job.checkpoint(Path(os.environ["CHECKPOINTS"]) / f"{job.number}.npz")
        if hvd.size() >= size and program.is_over:
            return
        epochs += 1


def run(step: Any, job: Any, program: Any, death: Death, inputs: np.ndarray, targets: np.ndarray) -> None:
    elastic = context.elastic_job()
    place = f"{step.number} {elastic.epoch if elastic else 0} {hvd.rank()} {hvd.size()}"
    with step:
        indices = [index for part in step.parts[:] for index in part.indices.tolist()]
        print(f"TRY {place} {step.epoch} {json.dumps(indices)}", flush=True)
        death.at("forward", step.number)
        gradients = [program.gradients(inputs[part.indices], targets[part.indices]) for part in step.parts]
        death.at("before", step.number)
        if step.is_last and (path := os.environ.get("FINISH")):  # whoever applies the step knows, and all the same
            program.is_over = hvd.broadcast_object(Path(path).exists(), 0, name="finish")
        averaged = job.average(gradients)
        death.at("between", step.number)
        program.apply(averaged, death)
        print(f"STEP {place} {digest(program.weights())} {time.monotonic()}", flush=True)
        death.at("after", step.number)


def main() -> None:
    num_epochs, num_samples = int(sys.argv[1]), int(sys.argv[2])
    print("IMPORTED", flush=True)
    while (path := os.environ.get("WAITS_FOR")) and not Path(path).exists():
        time.sleep(0.01)
    hvd.init()
    inputs, targets = make_data(num_samples)
    # ranks begin with different weights, and get those of rank 0
    value = 0.0 if os.environ.get("REIGEN_RANK") == "0" else 1.0
    program = (JaxProgram if FRAMEWORK == "jax" else KerasProgram)(value, int(os.environ.get("WIDTH", INPUTS)))
    program.is_over = "FINISH" not in os.environ
    data = Cursor(num_samples, global_batch=16, seed=3)
    resume = os.environ.get("RESUME")
    with program.make_job(data=data, min_size=int(os.environ.get("MIN", "1")), resume=resume) as job:
        train(job, program, num_epochs, inputs, targets)
    weights = program.weights()
    flat = [float(each) for weight in weights[:2] for each in weight.ravel()]
    print(f"DONE {hvd.rank()} {hvd.size()} {digest(weights)} {job.num_undone} {json.dumps(flat)}", flush=True)


if __name__ == "__main__":
    main()
