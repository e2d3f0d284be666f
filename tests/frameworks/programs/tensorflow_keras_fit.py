"""An epoch of `fit` of the Keras that belongs to TensorFlow; prints a digest of the weights."""

import hashlib

import numpy as np
import tensorflow as tf

import reigen.tensorflow.keras as hvd

keras = tf.keras
hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
data = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(data, data.sum(1), batch_size=8, epochs=1, callbacks=callbacks, verbose=0)
print(
    "digest", hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())).hexdigest()
)
