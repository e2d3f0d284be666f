"""Reigen's side of `reigen bench train-step`: the optimizer wrapped, as in the README."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

import reigen.torch as hvd
from reigen import __version__
from reigen.bench.models import Training
from reigen.bench.work import Case


class Trainer:
    """One rank of a Reigen job."""

    def __init__(self) -> None:
        hvd.init()
        self._stack = ExitStack()
        self.versions = {"reigen": __version__, "torch": str(torch.__version__)}

    def open(self, case: Case) -> Training:
        """The training of a model, ``MODEL/timeline`` with a timeline from then on."""
        if case.name.endswith("/timeline"):
            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="reigen-bench-"))
            hvd.stop_timeline()
            hvd.start_timeline(str(Path(directory, "timeline.json")))
        return Training(case, hvd.rank(), wrap_optimizer=_wrapped)

    def close(self) -> None:
        """Leave the job."""
        hvd.shutdown()
        self._stack.close()


def _wrapped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    averaging: torch.optim.Optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return averaging


def start(rank: int, size: int) -> Trainer:
    """The program of one rank."""
    return Trainer()
