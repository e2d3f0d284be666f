"""MNIST with Horovod's interface: `reigen run -np 2 python examples/mxnet/mxnet_mnist.py`.

    mpirun -np 2 -H localhost:2 -bind-to none -map-by slot python examples/mxnet/mxnet_mnist.py

Lines that make it distributed are marked with (*); without a launcher the same script trains alone. It reads MNIST's
four files from --data-dir, and draws some digits if there is none. Twice as many ranks, each with half the batch and
half the rate, train the same weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import mnist_data
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import reigen.mxnet as hvd  # (*)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="where train-images-idx3-ubyte and the others are")
    parser.add_argument("--images", type=int, default=4000, help="how many digits to draw (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="of one rank; times their number (default: %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9, help="default: %(default)s")
    parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines (default: %(default)s)")
    parser.add_argument("--no-cuda", action="store_true", help="train on the processor although there are GPUs")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    return parser.parse_args()


class Batches:
    """This rank's part of each batch of an epoch, in an order that is the same on every rank."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int) -> None:
        self._images, self._labels = images, labels
        self._together = min(batch_size, len(labels) // hvd.size()) * hvd.size()  # (*)

    def __len__(self) -> int:
        return len(self._labels) // self._together

    def of(self, epoch: int) -> Iterator[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        order = np.random.default_rng(epoch).permutation(len(self._labels))
        for number in range(len(self)):
            batch = order[number * self._together :][: self._together]
            mine = batch[hvd.rank() :: hvd.size()]  # (*)
            yield mx.nd.array(self._images[mine]), mx.nd.array(self._labels[mine], dtype="float32")


def make_net() -> gluon.nn.HybridSequential:
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(channels=20, kernel_size=5, activation="relu"),
        gluon.nn.MaxPool2D(pool_size=2, strides=2),
        gluon.nn.Conv2D(channels=50, kernel_size=5, activation="relu"),
        gluon.nn.MaxPool2D(pool_size=2, strides=2),
        gluon.nn.Flatten(),
        gluon.nn.Dense(512, activation="relu"),
        gluon.nn.Dense(10),
    )
    return net


def evaluate(net: gluon.Block, images: np.ndarray, labels: np.ndarray, context: mx.Context) -> float:
    """Each rank looks at its part of the images; the counts are added up."""
    mine, right = slice(hvd.rank(), None, hvd.size()), 0  # (*)
    for start in range(0, len(labels[mine]), 256):
        some = slice(start, start + 256)
        guesses = net(mx.nd.array(images[mine][some], ctx=context)).argmax(axis=1).asnumpy()
        right += int(np.sum(guesses == labels[mine][some]))
    return float(hvd.allreduce(mx.nd.array([right]), op=hvd.Sum, name="right").asscalar() / len(labels))  # (*)


def main() -> int:
    options = parse()
    hvd.init()  # (*)
    gpus = 0 if options.no_cuda else mx.context.num_gpus()
    context = mx.gpu(hvd.local_rank() % gpus) if gpus else mx.cpu()  # (*)
    with tempfile.TemporaryDirectory() as made:
        if options.data_dir is None:
            datasets.write_mnist(Path(made), options.images, options.images // 5)
        images, labels, test_images, test_labels = mnist_data.read(options.data_dir or Path(made))
    train = Batches(images[:, None], labels, options.batch_size)

    mx.random.seed(hvd.rank())  # the ranks' weights differ ...
    net = make_net()
    net.initialize(mx.init.Xavier(), ctx=context)
    net.hybridize()
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)  # (*) ... until they are made, in the first step
    sgd = mx.optimizer.create("sgd", learning_rate=options.lr * hvd.size(), momentum=options.momentum)  # (*)
    trainer = gluon.Trainer(params, hvd.DistributedOptimizer(sgd), kvstore=None)  # (*)
    loss_of, metric = gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy()

    accuracy = 0.0
    for epoch in range(options.epochs):
        metric.reset()
        start = time.perf_counter()
        for step, batch in enumerate(train.of(epoch), start=1):
            images, labels = (each.as_in_context(context) for each in batch)
            with autograd.record():
                outputs = net(images)
                loss = loss_of(outputs, labels)
            loss.backward()
            trainer.step(len(labels))
            metric.update([labels], [outputs])
            if step % options.log_interval == 0:
                mean = hvd.allreduce(loss.mean(), name="loss").asscalar()  # (*)
                took = time.perf_counter() - start
                rate = step * len(labels) * hvd.size() / took
                left = ((options.epochs - epoch) * len(train) - step) / step * took
                seen = f"loss={mean:.4f} accuracy={metric.get()[1]:.4f}  ETA {left:.0f} s"
                if hvd.rank() == 0:  # (*)
                    print(f"Epoch[{epoch}] Batch [{step}] Speed: {rate:.2f} samples/sec  {seen}", flush=True)
        accuracy = evaluate(net, test_images[:, None], test_labels, context)
        if hvd.rank() == 0:  # (*)
            print(f"Epoch[{epoch}] Validation-accuracy={accuracy:.4f}", flush=True)
    hvd.shutdown()  # (*)
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
