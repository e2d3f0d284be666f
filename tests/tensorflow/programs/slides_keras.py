"""The Keras script of a course on Horovod, as it is on the slides, around digits in place of its data set."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

BATCH_SIZE, LEARNING_RATE, EPOCHS = 256, 0.01, 3
digits = load_digits()
X_train, Y_train = (digits.images / 16).astype("float32")[..., None], digits.target

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

local_batch_size = BATCH_SIZE // int(hvd.size())
if int(hvd.size()) > 1:
    num_train_per_replica = len(X_train) // int(hvd.size())
    X_train = X_train[int(hvd.rank()) * num_train_per_replica : (int(hvd.rank()) + 1) * num_train_per_replica]
    Y_train = Y_train[int(hvd.rank()) * num_train_per_replica : (int(hvd.rank()) + 1) * num_train_per_replica]

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(8, 8, 1)),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
optimizer = tf.optimizers.Adam(LEARNING_RATE)
optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(
    optimizer=optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
history = model.fit(
    X_train, Y_train, batch_size=local_batch_size, epochs=EPOCHS, callbacks=callbacks, verbose=2 * (hvd.rank() == 0)
)
weights = [weight.numpy() for weight in model.trainable_variables]
same = all((hvd.broadcast(weight, 0) == weight).all() for weight in weights)
print(f"same={same} improved={history.history['loss'][-1] < history.history['loss'][0]} size={hvd.size()}")
