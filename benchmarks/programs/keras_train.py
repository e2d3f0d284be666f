"""Keras 3's `fit` in `reigen bench frameworks`, on TensorFlow: one rank alone, and Reigen's DistributedOptimizer."""

from __future__ import annotations

from contextlib import ExitStack

import keras
import tensorflow as tf

from benchmarks.harness.keras_training import KerasTraining
from benchmarks.harness.work import Case


class Trainer:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stack = ExitStack()
        self.versions = {"keras": keras.__version__, "tensorflow": tf.__version__}

    def open(self, case: Case) -> KerasTraining:
        """The training of a model: ``MODEL/alone``, or ``MODEL/reigen`` as a rank of a job."""
        if case.name.endswith("/alone"):
            return KerasTraining(keras, case, self._rank)
        import reigen.keras as hvd

        if not hvd.is_initialized():
            hvd.init()
            self._stack.callback(hvd.shutdown)
        return KerasTraining(keras, case, self._rank, wrap_optimizer=hvd.DistributedOptimizer)

    def close(self) -> None:
        """Leave the job."""
        self._stack.close()


def start(rank: int, size: int) -> Trainer:
    """The program of one rank."""
    return Trainer(rank)
