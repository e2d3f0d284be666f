"""fit() of tf.keras, as Horovod's users write it: nothing in it knows of Reigen."""

import os
import tempfile

import horovod
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
tf.keras.utils.set_random_seed(hvd.rank())  # different on purpose: the broadcast makes them equal

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440].astype(np.int64)))
dataset = dataset.repeat().shuffle(1440).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.001 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
with tempfile.TemporaryDirectory() as directory:
    # Checkpoints only on worker 0.
    if hvd.rank() == 0:
        path = os.path.join(directory, "checkpoint-{epoch}.h5")  # noqa: PTH118
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(path))
    verbose = 2 if hvd.rank() == 0 else 0
    history = model.fit(
        dataset, steps_per_epoch=60 // hvd.size(), callbacks=callbacks, epochs=4, verbose=verbose
    ).history
    written = len(list(os.scandir(directory)))

_, accuracy = model.evaluate(images[1440:], labels[1440:], verbose=0)
accuracy = hvd.allreduce(accuracy, name="accuracy")
everyones = hvd.allgather_object([w.tobytes() for w in model.get_weights()])
same = all(w == everyones[0] for w in everyones)
print(
    f"done rank={hvd.rank()} same={same} improved={history['loss'][-1] < history['loss'][0]} "
    f"rate={history['lr'][-1]:.4f} version={horovod.__version__[:6]}",
    flush=True,
)
if hvd.rank() == 0:
    assert written == 4
    print(f"accuracy {float(accuracy):.3f}", flush=True)
