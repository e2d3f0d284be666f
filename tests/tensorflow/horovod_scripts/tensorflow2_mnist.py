"""A loop of one's own with a distributed gradient tape, as Horovod's users write it: nothing in it knows of Reigen."""

import argparse
import os
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--use-mixed-precision", action="store_true")
args = parser.parse_args()

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
if args.use_mixed_precision:
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
tf.random.set_seed(hvd.rank())  # different on purpose: the broadcast makes them equal

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
labels = labels.astype(np.int64)
dataset = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(500).batch(args.batch_size)

mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax", dtype="float32"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.001 * hvd.size())
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables, strict=True))

    # The broadcast comes after the first step, when the optimizer's variables are there.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)

    return loss_value


first = last = None
for batch, (some_images, some_labels) in enumerate(dataset.take(args.steps // hvd.size())):
    loss_value = training_step(some_images, some_labels, batch == 0)
    first, last = (float(loss_value) if first is None else first), float(loss_value)
    if batch % 10 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

# Checkpoints only on worker 0.
if hvd.rank() == 0:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save(os.path.join(directory, "ckpt"))  # noqa: PTH118
        assert tf.train.latest_checkpoint(directory)

accuracy = np.mean(np.argmax(mnist_model.predict(images[1440:], verbose=0), 1) == labels[1440:])
accuracy = hvd.allreduce(tf.constant(accuracy), name="accuracy")
everyones = hvd.allgather_object([v.numpy().tobytes() for v in mnist_model.trainable_variables])
print(f"done rank={hvd.rank()} same={all(w == everyones[0] for w in everyones)} improved={last < first}", flush=True)
if hvd.rank() == 0:
    print(f"accuracy {float(accuracy):.3f}", flush=True)
