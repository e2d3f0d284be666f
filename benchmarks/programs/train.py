"""Reigen's side of `reigen bench train-step`: the optimizer wrapped, as in the README."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn

import reigen.torch as hvd
from benchmarks.harness.models import Training, variant_of
from benchmarks.harness.work import Case
from reigen import __version__


class Trainer:
    """One rank of a Reigen job."""

    def __init__(self) -> None:
        hvd.init()
        self._stack = ExitStack()
        self.versions = {"reigen": __version__, "torch": str(torch.__version__)}

    def open(self, case: Case) -> Training:
        """The training of a model: /timeline with a timeline from then on, /shared with one model a host."""
        variant = variant_of(case)
        if variant == "timeline":
            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="reigen-bench-"))
            hvd.stop_timeline()
            hvd.start_timeline(str(Path(directory, "timeline.json")))
        return Training(case, hvd.rank(), wrap_optimizer=partial(_wrapped, share_parameters=variant == "shared"))

    def close(self) -> None:
        """Leave the job."""
        hvd.shutdown()
        self._stack.close()


def _wrapped(optimizer: torch.optim.Optimizer, model: nn.Module, *, share_parameters: bool) -> torch.optim.Optimizer:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    averaging: torch.optim.Optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), share_parameters=share_parameters
    )
    return averaging


def start(rank: int, size: int) -> Trainer:
    """The program of one rank."""
    return Trainer()
