"""Long training in parts: warm-up, a schedule, checkpoints on worker 0, and all continue from the last of them."""

import argparse
import math
import os

import horovod.tensorflow.keras as hvd
import numpy as np
from sklearn.datasets import load_digits
from tensorflow import keras

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
suffix = "keras" if hasattr(keras, "ops") else "h5"
checkpoint_format = os.path.join(args.directory, "checkpoint-{epoch}." + suffix)  # noqa: PTH118

# Only worker 0 may see the checkpoints: it tells the others where to go on.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if hvd.rank() == 0 and os.path.exists(checkpoint_format.format(epoch=try_epoch)):  # noqa: PTH110
        resume_from_epoch = try_epoch
        break
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))
verbose = 2 if hvd.rank() == 0 else 0

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype(np.float32)
share = np.arange(1440)[hvd.rank() :: hvd.size()]
x_train, y_train, x_test, y_test = images[share], labels[share], images[1440:], labels[1440:]
steps_per_epoch = math.ceil(len(share) / args.batch_size)

compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
initial_lr = args.base_lr * hvd.size()
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(checkpoint_format.format(epoch=resume_from_epoch), compression=compression)
else:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, kernel_regularizer=keras.regularizers.l2(5e-5)),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    opt = keras.optimizers.SGD(initial_lr, momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, compression=compression)
    model.compile(loss=keras.losses.sparse_categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=initial_lr, warmup_epochs=args.warmup_epochs, steps_per_epoch=steps_per_epoch, verbose=1
    ),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1.0, start_epoch=args.warmup_epochs, end_epoch=3
    ),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-1, start_epoch=3, end_epoch=6),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=initial_lr, multiplier=1e-2, start_epoch=6),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_format))

history = model.fit(
    x_train,
    y_train,
    batch_size=args.batch_size,
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=verbose,
    initial_epoch=resume_from_epoch,
    validation_data=(x_test, y_test),
).history

score = hvd.allreduce(model.evaluate(x_test, y_test, verbose=0), name="score")
everyones = hvd.allgather_object([v.numpy().tobytes() for v in model.trainable_variables])
same = all(w == everyones[0] for w in everyones)
rates = ",".join(f"{rate:.4f}" for rate in history["lr"])
print(f"done rank={hvd.rank()} same={same} from={resume_from_epoch} rates={rates}", flush=True)
if hvd.rank() == 0:
    print(f"accuracy {float(score[1]):.3f}", flush=True)
