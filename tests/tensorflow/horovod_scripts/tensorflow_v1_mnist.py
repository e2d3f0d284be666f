"""Training in a session of TensorFlow 1, as Horovod's users wrote it: nothing in it knows of Reigen."""

import argparse
import os
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

tf.compat.v1.disable_eager_execution()
v1 = tf.compat.v1
v1.logging.set_verbosity(v1.logging.ERROR)

parser = argparse.ArgumentParser()
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--backward-passes-per-step", type=int, default=1)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()


def dense(name, x, num_outputs, activation=None):
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [x.shape[1], num_outputs], initializer=v1.glorot_uniform_initializer())
        bias = v1.get_variable("bias", [num_outputs], initializer=v1.zeros_initializer())
    y = tf.matmul(x, kernel) + bias
    return activation(y) if activation else y


def model(feature, target, is_training):
    """Logits and loss of a small convolutional network."""
    with v1.variable_scope("model", reuse=v1.AUTO_REUSE):
        kernel = v1.get_variable("conv/kernel", [3, 3, 1, 8])
        h = tf.nn.relu(tf.nn.conv2d(tf.reshape(feature, [-1, 8, 8, 1]), kernel, 1, "SAME"))
        h = tf.nn.max_pool2d(h, 2, 2, "SAME")
        h = dense("hidden", tf.reshape(h, [-1, 4 * 4 * 8]), 64, tf.nn.relu)
        h = v1.nn.dropout(h, rate=0.1) if is_training else h
        logits = dense("logits", h, 10)
    loss = v1.losses.softmax_cross_entropy(tf.one_hot(target, 10), logits)
    return tf.argmax(logits, 1), loss


def batches(images, labels, batch_size):
    generator = np.random.RandomState(hvd.rank())
    while True:
        index = generator.randint(0, len(images), batch_size)
        yield images[index], labels[index]


hvd.init()
v1.set_random_seed(hvd.rank())  # different on purpose: the broadcast makes them equal
images, labels = load_digits(return_X_y=True)
images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)

image = v1.placeholder(tf.float32, [None, 64], name="input_image")
label = v1.placeholder(tf.int64, [None], name="input_label")
_, loss = model(image, label, is_training=True)
predicted, _ = model(image, label, is_training=False)

lr_scaler = hvd.size()
if args.use_adasum:
    lr_scaler = hvd.local_size() if hvd.nccl_built() else 1
opt = v1.train.AdamOptimizer(0.001 * lr_scaler)
opt = hvd.DistributedOptimizer(
    opt,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
    backward_passes_per_step=args.backward_passes_per_step,
)
global_step = v1.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=global_step)

hooks = [
    # Initial variables go from rank 0 to all others, also after a restore from a checkpoint.
    hvd.BroadcastGlobalVariablesHook(0),
    v1.train.StopAtStepHook(last_step=args.steps // hvd.size()),
    v1.train.LoggingTensorHook(tensors={"step": global_step, "loss": loss}, every_n_iter=10),
]
config = v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())

with tempfile.TemporaryDirectory() as directory:
    # Checkpoints only on worker 0.
    checkpoint_dir = os.path.join(directory, "checkpoints") if hvd.rank() == 0 else None  # noqa: PTH118
    training_batches = batches(images[:1440], labels[:1440], 32)
    losses = []
    held_out, looked_at = {image: images[1440:], label: labels[1440:]}, [v1.trainable_variables(), predicted]
    with v1.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as session:
        while not session.should_stop():
            some_images, some_labels = next(training_batches)
            value, _ = session.run([loss, train_op], feed_dict={image: some_images, label: some_labels})
            losses.append(value)
            if not session.should_stop():
                weights, found = session.run_step_fn(lambda step_context: step_context.session.run(looked_at, held_out))
    assert checkpoint_dir is None or v1.train.latest_checkpoint(checkpoint_dir)

everyones = hvd.allgather_object([w.tobytes() for w in weights])
improved = np.mean(losses[-10:]) < np.mean(losses[:10])
print(f"done rank={hvd.rank()} same={all(w == everyones[0] for w in everyones)} improved={improved}", flush=True)
if hvd.rank() == 0:
    print(f"accuracy {np.mean(found == labels[1440:]):.3f}", flush=True)
