"""VGG-11 on CIFAR-10 through a key-value store: a script for MXNet's KVStore, which knows nothing of Reigen.

    reigen run -np 2 -s 1 --as-mxnet python examples/mxnet/image_classification.py --kvstore dist_sync
    reigen launch -n 3 -s 3 -H hosts --as-mxnet python image_classification.py --epochs 1 --kvstore dist_async

Without `--as-mxnet`, `reigen launch` runs it with MXNet's own servers. CIFAR-10's binary files (``data_batch_1.bin``
and so on, from https://www.cs.toronto.edu/~kriz/cifar.html) are read from ``--data-dir``; without it, small pictures
are drawn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import datasets
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=["cifar10"], default="cifar10", help="default: %(default)s")
    parser.add_argument("--data-dir", type=Path, help="where data_batch_1.bin and the others are")
    parser.add_argument("--num-images", type=int, default=1600, help="how many pictures to draw (default: %(default)s)")
    parser.add_argument("--model", default="vgg11", help="one of Gluon's model zoo (default: %(default)s)")
    parser.add_argument("--kvstore", default="device", help="dist_sync, dist_async, ... (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and worker (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.5, help="if the model has any (default: %(default)s)")
    parser.add_argument("--optimizer", default="adam", help="SGD takes VGG-11 some epochs to begin (default: adam)")
    parser.add_argument("--lr", type=float, default=3e-4, help="default: %(default)s")
    parser.add_argument("--wd", type=float, default=1e-4, help="decay of the weights (default: %(default)s)")
    parser.add_argument("--gpus", default="", help="numbers, with commas; the processor if there are none")
    parser.add_argument("--compression", action="store_true", help="gradients travel as 2 bits")
    parser.add_argument("--threshold", type=float, default=0.5, help="of the 2 bits (default: %(default)s)")
    parser.add_argument("--update-in-worker", action="store_true", help="the store adds up, workers update the weights")
    parser.add_argument("--log-interval", type=int, default=5, help="steps between two lines (default: %(default)s)")
    parser.add_argument("--goal", type=float, help="exit with 1 below this accuracy (default: 0.2, without --data-dir)")
    options = parser.parse_args()
    if options.goal is None:
        options.goal = 0.0 if options.data_dir else 0.2
    return options


def load(options: argparse.Namespace) -> tuple[tuple[np.ndarray, np.ndarray], mx.io.NDArrayIter]:
    """The images to train on with their labels, and batches to test with."""
    with tempfile.TemporaryDirectory() as made:
        if options.data_dir is None:
            datasets.write_cifar10(Path(made), options.num_images, options.num_images // 8)
        directory = options.data_dir or Path(made)
        images, labels = datasets.read_cifar10(directory, "data_batch_*.bin")
        test_images, test_labels = datasets.read_cifar10(directory, "test_batch.bin")
    return (_scaled(images), labels), mx.io.NDArrayIter(_scaled(test_images), test_labels, options.batch_size)


def part_of(images: np.ndarray, labels: np.ndarray, batch: int, epoch: int, kv: mx.kv.KVStore) -> mx.io.NDArrayIter:
    """This worker's part of each batch of an epoch, in an order that is the same on every worker."""
    order = np.random.default_rng(epoch).permutation(len(labels))
    mine = order[: len(order) // (batch * kv.num_workers) * batch * kv.num_workers][kv.rank :: kv.num_workers]
    return mx.io.NDArrayIter(images[mine], labels[mine], batch)


def make_net(options: argparse.Namespace, contexts: list[mx.Context]) -> gluon.HybridBlock:
    """All workers' weights are the same. What dropout leaves out is not."""
    mx.random.seed(1)
    net = gluon.model_zoo.vision.get_model(options.model, classes=datasets.CLASSES)
    for block in net.features:
        if isinstance(block, gluon.nn.Dropout):
            block._rate = options.dropout
    net.initialize(mx.init.Xavier(magnitude=2), ctx=contexts)
    net.hybridize()
    net(mx.nd.zeros((1, 3, 32, 32), ctx=contexts[0]))  # now its layers have shapes, and weights
    return net


def _scaled(images: np.ndarray) -> np.ndarray:
    return (images - 0.5) * 4  # about as large as normal numbers


def evaluate(net: gluon.Block, data: mx.io.DataIter, contexts: list[mx.Context]) -> float:
    data.reset()
    right = seen = 0
    for batch in data:
        count = len(batch.label[0]) - batch.pad
        guesses = net(batch.data[0].as_in_context(contexts[0])).argmax(axis=1).asnumpy()
        right += np.sum(guesses[:count] == batch.label[0].asnumpy()[:count])
        seen += count
    return float(right / seen)


def main() -> int:
    options = parse()
    kv = mx.kv.create(options.kvstore)  # in a server or scheduler that reigen launch has started, this is all
    contexts = [mx.gpu(int(number)) for number in options.gpus.split(",") if number] or [mx.cpu()]
    images_and_labels, test = load(options)
    steps = len(images_and_labels[1]) // (options.batch_size * kv.num_workers)  # of an epoch
    net = make_net(options, contexts)
    mx.random.seed(kv.rank)
    settings = {"learning_rate": options.lr, "wd": options.wd, "multi_precision": True}
    trainer = gluon.Trainer(
        net.collect_params(),
        options.optimizer,
        settings,
        kvstore=kv,
        compression_params={"type": "2bit", "threshold": options.threshold} if options.compression else None,
        update_on_kvstore=False if options.update_in_worker else None,
    )
    # A synchronous store adds up the gradients of all workers; an asynchronous one takes each worker's by itself.
    images_per_update = options.batch_size * (1 if "async" in options.kvstore else kv.num_workers)
    loss_of, metric = gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy()

    me, accuracy = f"worker {kv.rank}", 0.0
    for epoch in range(options.epochs):
        metric.reset()
        train = part_of(*images_and_labels, options.batch_size, epoch, kv)
        start = time.perf_counter()
        for step, batch in enumerate(train, start=1):
            images = gluon.utils.split_and_load(batch.data[0], contexts)
            labels = gluon.utils.split_and_load(batch.label[0], contexts)
            with autograd.record():
                outputs = [net(each) for each in images]
                losses = [loss_of(output, label) for output, label in zip(outputs, labels, strict=True)]
            autograd.backward(losses)
            trainer.step(images_per_update)
            metric.update(labels, outputs)
            if step % options.log_interval == 0:
                rate = step * options.batch_size / (time.perf_counter() - start)
                left = (options.epochs - epoch) * steps - step
                eta = f"ETA {left * options.batch_size / rate:.0f} s"
                loss = np.mean([each.mean().asscalar() for each in losses])
                seen = f"loss={loss:.4f} accuracy={metric.get()[1]:.4f}  {eta}"
                print(f"{me} Epoch[{epoch}] Batch [{step}] Speed: {rate:.2f} samples/sec  {seen}", flush=True)
        accuracy = evaluate(net, test, contexts)
        print(f"{me} Epoch[{epoch}] Validation-accuracy={accuracy:.4f}", flush=True)
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
