"""Training of a paced model: with the ranks' all-reduce, or on parameter servers where there are any.

``reigen run -np 2 python -m benchmarks.programs.paced_train MODEL`` trains a few steps without the controller.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch

import reigen.torch as hvd
from benchmarks.harness.paced import PacedModule, make_batch, paced_model
from benchmarks.harness.work import Case, WrongResultError
from reigen import __version__, kv

_LEARNING_RATE = 0.01
_STEPS_BY_HAND = 14


class PacedTraining:
    """A `Work` whose operation is a step.

    On servers it has a store of its own: they place each key where least lies so far, and what another model has left
    on some of them would send this one's keys to the others.
    """

    def __init__(self, case: Case, rank: int, *, has_servers: bool) -> None:
        torch.manual_seed(20)
        torch.set_num_threads(1)
        model = paced_model(case.name)
        self._module = PacedModule(model)
        self._batch = make_batch(model, rank)
        self._first = self._weights()
        self._trainer: hvd.Trainer | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._store = kv.create("dist_sync") if has_servers else None
        if self._store is not None:
            named = dict(self._module.named_parameters())
            self._trainer = hvd.Trainer(named, "sgd", {"learning_rate": _LEARNING_RATE}, kvstore=self._store)
        else:
            hvd.broadcast_parameters(self._module.state_dict(), root_rank=0)
            self._optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(self._module.parameters(), lr=_LEARNING_RATE),
                named_parameters=self._module.named_parameters(),
            )

    def prepare(self) -> None:
        """Nothing: the data is there."""

    def operate(self) -> None:
        """One step."""
        if self._trainer is not None:
            self._trainer.zero_grad()
            torch.autograd.backward(self._loss())
            self._trainer.step(self._trainer.num_workers)
        else:
            assert self._optimizer is not None
            self._optimizer.zero_grad()
            torch.autograd.backward(self._loss())
            self._optimizer.step()

    def _loss(self) -> torch.Tensor:
        loss: torch.Tensor = self._module(self._batch).square().mean()
        return loss

    def check(self) -> None:
        """See that the weights have changed, and are numbers."""
        weights = self._weights()
        if not np.isfinite(weights).all() or np.array_equal(weights, self._first):
            raise WrongResultError("the weights are not finite, or have not changed")

    def close(self) -> None:
        """Forget the model, and close its store; the servers keep what it has there."""
        self._optimizer = self._trainer = None
        if self._store is not None:
            self._store.close()

    def _weights(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        with torch.no_grad():
            flat: np.ndarray[tuple[int], np.dtype[np.float32]] = torch.cat(
                [parameter.reshape(-1) for parameter in self._module.parameters()]
            ).numpy()
        return flat.copy()


class Rank:
    """One rank: a worker of parameter servers where the environment names them."""

    def __init__(self, rank: int) -> None:
        self.versions = {"reigen": __version__, "torch": str(torch.__version__)}
        self._rank = rank
        self._has_servers = "DMLC_PS_ROOT_URI" in os.environ
        #: keeps this worker in the job while no model is open
        self._store = kv.create("dist_sync") if self._has_servers else None
        if not self._has_servers:
            hvd.init()

    def open(self, case: Case) -> PacedTraining:
        """The training of the model that the case names."""
        return PacedTraining(case, self._rank, has_servers=self._has_servers)

    def close(self) -> None:
        """Leave the job."""
        if self._store is not None:
            self._store.close()
        else:
            hvd.shutdown()


def start(rank: int, size: int) -> Rank:
    """The program of one rank."""
    return Rank(rank)


def main(model: str) -> None:
    """Train a few steps of a model."""
    rank = Rank(int(os.environ["REIGEN_RANK"]))
    work = rank.open(Case(model))
    for _ in range(_STEPS_BY_HAND):
        work.operate()
    work.close()
    rank.close()


if __name__ == "__main__":
    main(sys.argv[1])
