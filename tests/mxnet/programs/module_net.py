"""Trains a small net with Module.fit, as scripts for MXNet do: `module_net.py FILE`. Worker 0 writes the weights."""

import sys

import mxnet as mx
import numpy as np

BATCH, STEPS = 16, 4


def fit(kvstore, num_workers, rank):
    random = np.random.RandomState(1)
    images = random.randn(BATCH * STEPS, 10).astype("float32")
    labels = (images @ random.randn(10, 3)).argmax(1).astype("float32")
    mine = np.arange(BATCH * STEPS).reshape(STEPS, num_workers, -1)[:, rank].reshape(-1)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc1")
    net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="tanh"), num_hidden=3, name="fc2")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))
    mx.random.seed(5)
    module.fit(
        mx.io.NDArrayIter(images[mine], labels[mine], batch_size=BATCH // num_workers),
        num_epoch=3,
        kvstore=kvstore,
        optimizer="sgd",
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-2},
        initializer=mx.init.Normal(0.3),
    )
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


if __name__ == "__main__":
    kv = mx.kv.create("dist_sync")
    weights = fit(kv, kv.num_workers, kv.rank)
    if kv.rank == 0:
        np.savez(sys.argv[1], **weights)
