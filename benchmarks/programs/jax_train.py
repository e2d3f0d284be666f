"""JAX's training step in `reigen bench frameworks`: one rank alone, and optax's optimizer wrapped by Reigen."""

from __future__ import annotations

from contextlib import ExitStack

import jax

from benchmarks.harness.jax_training import JaxTraining
from benchmarks.harness.work import Case


class Trainer:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stack = ExitStack()
        self.versions = {"jax": jax.__version__}

    def open(self, case: Case) -> JaxTraining:
        """The training of a model: ``MODEL/alone``, or ``MODEL/reigen`` as a rank of a job."""
        if case.name.endswith("/alone"):
            return JaxTraining(case, self._rank)
        import reigen.jax as hvd

        if not hvd.is_initialized():
            hvd.init()
            self._stack.callback(hvd.shutdown)
        return JaxTraining(case, self._rank, wrap_optimizer=hvd.distributed)

    def close(self) -> None:
        """Leave the job."""
        self._stack.close()


def start(rank: int, size: int) -> Trainer:
    """The program of one rank."""
    return Trainer(rank)
