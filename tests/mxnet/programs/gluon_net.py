"""Trains a small net with gluon.Trainer, as scripts for MXNet do: `gluon_net.py DIRECTORY MODE ...`.

Every mode has a store of its own, which MXNet's own cannot do: with that, one mode a run. Worker 0 writes the weights.
"""

import os
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

BATCH, STEPS = 8, 6


class Falling(mx.lr_scheduler.LRScheduler):
    """A schedule that only this script knows."""

    def __call__(self, num_update):
        return self.base_lr / num_update


def data():
    random = np.random.RandomState(1)
    images = random.randn(2 * BATCH * STEPS, 10).astype("float32")
    return images, (images @ random.randn(10, 3)).argmax(1).astype("float32")


class Half(gluon.HybridBlock):
    """A layer that MXNet can compute in float16 without a GPU."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = self.params.get("weight", shape=(outputs, inputs))
        self.bias = self.params.get("bias", shape=(outputs,))

    def hybrid_forward(self, F, x, weight, bias):  # noqa: N803  gluon gives it by this name
        products = F.broadcast_mul(x.expand_dims(1), weight.expand_dims(0))
        return F.broadcast_add(products.sum(axis=2), bias.expand_dims(0))


def made_net(dtype, contexts):
    mx.random.seed(5)
    net = gluon.nn.HybridSequential()
    if dtype == "float16":
        net.add(Half(10, 16), Half(16, 3))
    else:
        net.add(gluon.nn.Dense(16, activation="relu", in_units=10), gluon.nn.Dense(3, in_units=16))
    net.initialize(mx.init.Normal(0.3), ctx=contexts)
    net.cast(dtype)
    net.hybridize()
    return net


def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def settings(mode):
    """Optimizer, its parameters, and the Trainer's options."""
    sgd = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}
    if mode == "adam":
        return "adam", {"learning_rate": 0.02}, {}
    if mode == "half":
        return "sgd", {**sgd, "multi_precision": True}, {}
    if mode == "schedule":
        return "sgd", {"momentum": 0.9, "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}, {}
    if mode == "own_schedule":
        return "sgd", {"momentum": 0.9, "lr_scheduler": Falling(0.2)}, {}
    if mode == "adadelta":
        return "adadelta", {}, {"update_on_kvstore": False}
    options = {"update_on_kvstore": False} if mode.endswith("worker") else {}
    if mode.startswith("2bit"):
        options["compression_params"] = {"type": "2bit", "threshold": 0.5}
    return "sgd", sgd, options


def train(mode, kvstore, num_workers, rank):
    """The weights after some steps of this worker's part; or, with one worker, of all parts."""
    dtype = "float16" if mode == "half" else "float32"
    contexts = [mx.cpu(0), mx.cpu(1)] if mode == "devices" else [mx.cpu()]
    net, (images, labels) = made_net(dtype, contexts), data()
    if mode != "plain":  # MXNet's own servers are not told of these
        net[0].weight.lr_mult, net[1].bias.wd_mult = 0.5, 0.0
    optimizer, parameters, options = settings(mode)
    trainer = gluon.Trainer(net.collect_params(), optimizer, parameters, kvstore=kvstore, **options)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(STEPS):
        if mode == "rate" and step == 3:
            trainer.set_learning_rate(0.01)
        begin = 2 * BATCH * step + rank * BATCH
        part = slice(begin, begin + BATCH * 2 // num_workers)
        with autograd.record():
            losses = [
                loss(net(x.astype(dtype)), y)
                for x, y in zip(
                    gluon.utils.split_and_load(images[part], contexts),
                    gluon.utils.split_and_load(labels[part], contexts),
                    strict=True,
                )
            ]
        autograd.backward(losses)
        trainer.step(2 * BATCH)
        if mode == "forks":  # as a DataLoader does, while gradients are on their way
            fork()
    if mode == "states" and not isinstance(kvstore, (str, type(None))):
        trainer.save_states(f"{sys.argv[1]}/states.{rank}")
        trainer.load_states(f"{sys.argv[1]}/states.{rank}")
    return {f"p{i}": p.data(contexts[0]).asnumpy() for i, p in enumerate(net.collect_params().values())}


if __name__ == "__main__":
    for one in sys.argv[2:]:
        store = mx.kv.create("dist_async" if one == "async" else "dist_sync")
        weights = train(one, store, store.num_workers, store.rank)
        if store.rank == 0:
            np.savez(Path(sys.argv[1], f"{one}.npz"), **weights)
