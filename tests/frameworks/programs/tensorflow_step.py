"""Two steps of a linear model with reigen.tensorflow; prints a digest of the weights."""

import hashlib

import numpy as np
import tensorflow as tf

import reigen.tensorflow as hvd

hvd.init()
weights = tf.Variable(tf.fill([3, 2], float(hvd.rank())))
hvd.broadcast_variables([weights], root_rank=1)
inputs = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(8, 3)), tf.float32)


@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((inputs @ weights) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    weights.assign_sub(0.1 * tape.gradient(loss, [weights])[0])


for _ in range(2):
    step()
assert float(hvd.allreduce(tf.constant(float(hvd.rank())), op=hvd.Sum)) == 1.0
print("digest", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
