"""TensorFlow's training step in `reigen bench frameworks`: one rank alone, and Reigen's DistributedGradientTape."""

from __future__ import annotations

from contextlib import ExitStack

import tensorflow as tf

from benchmarks.harness.tensorflow_training import TensorflowTraining
from benchmarks.harness.work import Case


class Trainer:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stack = ExitStack()
        self.versions = {"tensorflow": tf.__version__}

    def open(self, case: Case) -> TensorflowTraining:
        """The training of a model: ``MODEL/alone``, or ``MODEL/reigen`` as a rank of a job."""
        if case.name.endswith("/alone"):
            return TensorflowTraining(case, self._rank)
        import reigen.tensorflow as hvd

        if not hvd.is_initialized():
            hvd.init()
            self._stack.callback(hvd.shutdown)
        return TensorflowTraining(case, self._rank, wrap_tape=hvd.DistributedGradientTape)

    def close(self) -> None:
        """Leave the job."""
        self._stack.close()


def start(rank: int, size: int) -> Trainer:
    """The program of one rank."""
    return Trainer(rank)
