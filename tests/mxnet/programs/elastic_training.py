"""A training with `hvd.elastic.run`, until so many steps are done with so many ranks: ``KIND STEPS SIZE``.

It dies by its own hand in the step that ``DIES_AT`` says: behind its gradients, whose sum the others need.
Lines: ``VIEW rank size step``, and ``DONE rank steps updates weights`` at the end.
"""

import json
import os
import signal
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import reigen.mxnet as hvd

RATE, MOMENTUM, BATCH, INPUTS = 0.1, 0.9, 12, 6


def rows(step: int) -> np.ndarray:
    """Inputs and targets of a step, of all ranks."""
    return np.random.default_rng(step).random((BATCH, INPUTS + 3), np.float32)


def make_trainer(kind: str, net: gluon.Block) -> gluon.Trainer:
    options = {"learning_rate": RATE, "momentum": MOMENTUM}
    if kind == "trainer":
        return hvd.DistributedTrainer(net.collect_params(), "sgd", options, num_groups=2)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **options))
    return gluon.Trainer(net.collect_params(), optimizer, kvstore=None)


def main() -> None:
    kind, num_steps, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    net = gluon.nn.Dense(3, in_units=INPUTS, prefix="net_")
    # rank 0 of the first view begins with zeros; the others with something else until they get its weights
    net.initialize(mx.init.Zero() if os.environ.get("REIGEN_RANK") == "0" else mx.init.One())
    trainer = make_trainer(kind, net)
    state = hvd.elastic.MXNetState(net.collect_params(), trainer, step=0)
    loss = gluon.loss.L2Loss()

    @hvd.elastic.run
    def train(state: hvd.elastic.MXNetState) -> None:
        print(f"VIEW {hvd.rank()} {hvd.size()} {state.step}", flush=True)
        while state.step < num_steps or hvd.size() < size:
            batch = rows(state.step)[hvd.rank() :: hvd.size()]
            with autograd.record():
                value = loss(net(mx.nd.array(batch[:, :INPUTS])), mx.nd.array(batch[:, INPUTS:]))
            value.backward()
            if state.step == int(os.environ.get("DIES_AT", "-1")):
                mx.nd.waitall()
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step(len(batch))
            state.step += 1
            state.commit()

    train(state)
    weights = [net.weight.data().asnumpy().tolist(), net.bias.data().asnumpy().tolist()]
    print(f"DONE {hvd.rank()} {state.step} {trainer.optimizer.num_update} {json.dumps(weights)}", flush=True)


if __name__ == "__main__":
    main()
