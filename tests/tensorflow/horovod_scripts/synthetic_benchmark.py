"""Images per second on made data, as Horovod's users measure it: nothing in it knows of Reigen."""

import argparse
import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--eager", action="store_true", default=False)
args = parser.parse_args()

hvd.init()

layers = tf.keras.layers
model = tf.keras.Sequential(
    [
        layers.Input((24, 24, 3)),
        layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.Conv2D(16, 1, strides=2),
        layers.GlobalAveragePooling2D(),
        layers.Dense(100, activation="softmax"),
    ]
)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([args.batch_size, 24, 24, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=99, dtype=tf.int64)


def benchmark_step(first_batch):
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.losses.sparse_categorical_crossentropy(target, probs)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)


if not args.eager:
    benchmark_step = tf.function(benchmark_step)


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


log(f"Batch size: {args.batch_size}, number of CPUs: {hvd.size()}")
with tf.device("CPU"):
    benchmark_step(first_batch=True)
    timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_warmup_batches)
    rates = []
    for each in range(args.num_iters):
        seconds = timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{each}: {rates[-1]:.1f} img/sec per CPU")
log(f"Img/sec per CPU: {np.mean(rates):.1f} +-{1.96 * np.std(rates):.1f}")
weights = hvd.allgather_object([v.numpy().tobytes() for v in model.trainable_variables])
print(f"done rank={hvd.rank()} same={all(w == weights[0] for w in weights)}", flush=True)
