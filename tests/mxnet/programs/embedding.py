"""Trains an embedding with row-sparse gradients: `embedding.py FILE weight|gradient [...]`.

"weight": its weight is row_sparse, too, and only rows are pulled; "gradient": it is dense.
"""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

ROWS, STEPS = 20, 4


class Rows(gluon.Block):
    def __init__(self, stype):
        super().__init__()
        self.weight = self.params.get("weight", shape=(ROWS, 4), stype=stype, grad_stype="row_sparse")
        self.is_sparse = stype != "default"

    def forward(self, ids):
        weight = self.weight.row_sparse_data(ids) if self.is_sparse else self.weight.data()
        return mx.nd.Embedding(ids, weight, input_dim=ROWS, output_dim=4, sparse_grad=True)


def train(kvstore, rank, stype):
    net = gluon.nn.Sequential()
    net.add(Rows(stype), gluon.nn.Dense(3, in_units=8))
    mx.random.seed(5)
    net.initialize(mx.init.Normal(0.3))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9}, kvstore=kvstore)
    loss = gluon.loss.L2Loss()
    for step in range(STEPS):
        ids = mx.nd.array([[(3 * step + 5 * rank + i) % ROWS, (step + i) % ROWS] for i in range(4)])
        with autograd.record():
            losses = loss(net(ids), mx.nd.ones((4, 3)))
        losses.backward()
        trainer.step(1)
    weight = net[0].weight
    rows = weight.row_sparse_data(mx.nd.arange(ROWS)) if stype != "default" else weight.data()
    return {"rows": rows.asnumpy(), "dense": net[1].weight.data().asnumpy()}


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        kv = mx.kv.create("dist_sync")
        weights = train(kv, kv.rank, "row_sparse" if kind == "weight" else "default")
        if kv.rank == 0:
            np.savez(f"{sys.argv[1]}.{kind}.npz", **weights)
