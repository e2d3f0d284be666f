"""Ranks with unequal amounts of data, in `fit`: `KERAS_BACKEND=jax reigen run -np 4 python examples/keras/join.py`.

Rank 0 has the fewest images, the last rank the most, and every rank trains on all of its images in each epoch. When
its `fit` ends, a rank calls `hvd.join()`, which contributes zeros to the other ranks' allreduces until the last rank is
done; then all ranks get the last rank's weights. Gradients are sums over images, and each image is weighted by 1 / (the
images of all ranks in that step), so the zeros have no effect. Any backend will do: tensorflow, jax or torch.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import keras
import numpy as np
from common import Show, choose_device
from progress import Progress
from sklearn.datasets import load_digits

import reigen.keras as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    return parser.parse_args()


def share(count: int, rank: int) -> slice:
    """A rank's part of so many images: rank r of n gets r + 1 parts of 1 + 2 + ... + n."""
    parts = hvd.size() * (hvd.size() + 1) // 2
    return slice(count * (rank * (rank + 1) // 2) // parts, count * ((rank + 1) * (rank + 2) // 2) // parts)


class Batches(keras.utils.PyDataset):
    """This rank's batches, each image with its weight in the step; the last batch may be smaller."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, train: np.ndarray, batch: int, epoch: int) -> None:
        super().__init__()
        self._images, self._labels, self._batch = images, labels, batch
        self._mine = np.random.default_rng(epoch).permutation(train[share(len(train), hvd.rank())])
        everybody = [len(train[share(len(train), rank)]) for rank in range(hvd.size())]
        #: images of each step, on all ranks together
        self.together = [
            sum(min(batch, max(0, length - first)) for length in everybody)
            for first in range(0, len(self._mine), batch)
        ]

    def __len__(self) -> int:
        return len(self.together)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers = self._mine[index * self._batch :][: self._batch]
        weights = np.full(len(numbers), 1 / self.together[index], np.float32)
        return self._images[numbers], self._labels[numbers], weights


def main() -> int:
    options = parse()
    hvd.init()
    choose_device(hvd.local_rank())
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(options.lr, momentum=0.9), op=hvd.Sum)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    mean = keras.metrics.SparseCategoricalCrossentropy("mean", from_logits=True)  # of this rank's images
    model.compile(optimizer=optimizer, loss=loss, metrics=[mean])
    optimizer.build(model.trainable_variables)
    state = [*model.variables, *optimizer.variables]
    hvd.broadcast_variables(state, root_rank=0)
    steps, is_last = 0, hvd.rank() == hvd.size() - 1
    progress = Progress(options.epochs * len(train), is_shown=is_last)
    for epoch in range(options.epochs):
        batches = Batches(images, labels, train, options.batch, epoch)
        model.fit(batches, verbose=0, shuffle=False, callbacks=[Show(progress, batches.together, "mean")])
        steps += len(batches)
        hvd.broadcast_variables(state, root_rank=hvd.join())
    accuracy = float((model.predict(images[test], verbose=0).argmax(1) == labels[test]).mean())
    digest = hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()
    took = hvd.allgather_object((steps, digest))
    identical = len({digest for _, digest in took}) == 1
    if hvd.rank() == 0:
        print(f"steps of each rank: {[steps for steps, _ in took]}")
        print(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}")
        how = f"{keras.backend.backend()}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}")
    hvd.shutdown()
    return 0 if identical and accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
