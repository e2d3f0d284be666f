"""What the page about MXNet leaves to its reader, and what its programs must have done."""

from __future__ import annotations

import sys
from typing import Any

import mxnet as mx

import reigen.mxnet as hvd

Names = dict[str, Any]


def _step(names: Names) -> None:
    x = mx.nd.ones((2, 4)) * (1 + hvd.rank())
    with mx.autograd.record():
        loss = (names["net"](x) ** 2).sum()
    loss.backward()
    names["trainer"].step(2)


def _check_alike(net: Any) -> None:
    weights = net.weight.data()
    gathered = hvd.allgather(weights.reshape((1, -1)))
    assert (gathered == weights.reshape((1, -1))).asnumpy().all()


def given_mxnet() -> Names:
    mx.random.seed(hvd.rank() if hvd.is_initialized() else 0)
    # of this host's one processor each rank has the same context
    mx.cpu = lambda device_id=0: mx.context.Context("cpu", 0)
    return {"net": mx.gluon.nn.Dense(3, in_units=4)}


def check_mxnet(names: Names) -> None:
    _step(names)
    _check_alike(names["net"])


def given_elastic() -> Names:
    hvd.init()
    names: Names = {"mx": mx, "hvd": hvd, "net": mx.gluon.nn.Dense(3), "batch": mx.nd.ones((2, 4)), "steps": 3}

    def train_one_batch(step: int) -> None:
        made = vars(sys.modules["documentation_elastic"])
        _step(made)

    return {**names, "train_one_batch": train_one_batch}
