"""MNIST with Horovod's interface: `reigen run -np 2 python examples/mxnet/mxnet_mnist.py`.

    mpirun -np 2 -H localhost:2 -bind-to none -map-by slot python examples/mxnet/mxnet_mnist.py

Lines that make it distributed are marked with (*); without a launcher the same script trains alone. It reads MNIST's
four files, not compressed, from --data-dir, and draws some digits if there is none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import datasets
import mxnet as mx
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


def load(directory: Path, batch_size: int) -> tuple[mx.io.MNISTIter, mx.io.MNISTIter, int]:
    """What to train on, what to test with, and how many steps an epoch has: the same on every rank."""

    def over(name: str, *, shuffle: bool) -> tuple[mx.io.MNISTIter, int]:
        labels = directory / f"{name}-labels-idx1-ubyte"
        part = (labels.stat().st_size - 8) // hvd.size()  # (*) a byte for each image, behind the header
        batch = min(batch_size, part)
        iterator = mx.io.MNISTIter(
            image=str(directory / f"{name}-images-idx3-ubyte"),
            label=str(labels),
            input_shape=(1, 28, 28),
            batch_size=batch,
            shuffle=shuffle,
            flat=False,
            silent=True,
            num_parts=hvd.size(),  # (*)
            part_index=hvd.rank(),  # (*)
        )
        return iterator, part // batch

    train, steps = over("train", shuffle=True)
    return train, over("t10k", shuffle=False)[0], steps


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


def evaluate(net: gluon.Block, data: mx.io.DataIter, context: mx.Context) -> float:
    """Each rank looks at its part of the images; the counts are added up."""
    data.reset()
    counts = mx.nd.zeros(2, ctx=context)
    for batch in data:
        images, labels = batch.data[0].as_in_context(context), batch.label[0].as_in_context(context)
        right = (net(images).argmax(axis=1) == labels).sum()
        counts += mx.nd.concat(right, mx.nd.array([len(labels)], ctx=context), dim=0)
    right, seen = hvd.allreduce(counts, op=hvd.Sum, name="counts").asnumpy()  # (*)
    return float(right / seen)


def main() -> int:
    options = parse()
    hvd.init()  # (*)
    gpus = 0 if options.no_cuda else mx.context.num_gpus()
    context = mx.gpu(hvd.local_rank() % gpus) if gpus else mx.cpu()  # (*)
    with tempfile.TemporaryDirectory() as made:
        if options.data_dir is None:
            datasets.write_mnist(Path(made), options.images, options.images // 5)
        train, test, steps = load(options.data_dir or Path(made), options.batch_size)

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
        train.reset()
        metric.reset()
        start = time.perf_counter()
        for step, batch in enumerate(islice(train, steps), start=1):
            images, labels = batch.data[0].as_in_context(context), batch.label[0].as_in_context(context)
            with autograd.record():
                outputs = net(images)
                loss = loss_of(outputs, labels)
            loss.backward()
            trainer.step(len(labels))
            metric.update([labels], [outputs])
            if step % options.log_interval == 0 and hvd.rank() == 0:  # (*)
                rate = step * options.batch_size * hvd.size() / (time.perf_counter() - start)
                left = ((options.epochs - epoch) * steps - step) * options.batch_size * hvd.size() / rate
                seen = f"loss={loss.mean().asscalar():.4f} accuracy={metric.get()[1]:.4f}  ETA {left:.0f} s"
                print(f"Epoch[{epoch}] Batch [{step}] Speed: {rate:.2f} samples/sec  {seen}", flush=True)
        accuracy = evaluate(net, test, context)
        if hvd.rank() == 0:  # (*)
            print(f"Epoch[{epoch}] Validation-accuracy={accuracy:.4f}", flush=True)
    hvd.shutdown()  # (*)
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
