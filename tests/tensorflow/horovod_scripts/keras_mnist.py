"""fit() of Keras, as Horovod's users write it for horovod.keras: nothing in it knows of Reigen."""

import math
import os
import tempfile

import horovod.keras as hvd
import keras
import numpy as np
from keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.models import Sequential
from sklearn.datasets import load_digits

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # different on purpose: the broadcast makes them equal

batch_size = 32
num_classes = 10
epochs = math.ceil(12 / hvd.size())  # the number of epochs goes down with the number of processes

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
x_train, x_test = images[:1440], images[1440:]
y_train = keras.utils.to_categorical(labels[:1440], num_classes)
y_test = keras.utils.to_categorical(labels[1440:], num_classes)

model = Sequential()
model.add(keras.Input((8, 8, 1)))
model.add(Conv2D(16, kernel_size=(3, 3), activation="relu"))
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Flatten())
model.add(Dense(64, activation="relu"))
model.add(Dropout(0.2))
model.add(Dense(num_classes, activation="softmax"))

opt = keras.optimizers.Adadelta(1.0 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
with tempfile.TemporaryDirectory() as directory:
    # Checkpoints only on worker 0.
    if hvd.rank() == 0:
        path = os.path.join(directory, "checkpoint-{epoch}.keras")  # noqa: PTH118
        callbacks.append(keras.callbacks.ModelCheckpoint(path))
    history = model.fit(
        x_train,
        y_train,
        batch_size=batch_size,
        callbacks=callbacks,
        epochs=epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        validation_data=(x_test, y_test),
    ).history
score = model.evaluate(x_test, y_test, verbose=0)
score = hvd.allreduce(np.array(score), name="score")
everyones = hvd.allgather_object([np.asarray(w).tobytes() for w in model.get_weights()])
same = all(w == everyones[0] for w in everyones)
print(f"done rank={hvd.rank()} same={same} improved={history['loss'][-1] < history['loss'][0]}", flush=True)
if hvd.rank() == 0:
    print("Test loss:", score[0])
    print(f"accuracy {float(score[1]):.3f}", flush=True)
