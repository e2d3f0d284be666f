"""The peer MultiWorkerMirroredStrategy with a loop of one's own, for `reigen bench frameworks`.

TF_CONFIG names the workers. By hand: see `benchmarks.harness.rank`, with TF_CONFIG set for each rank.
"""

from __future__ import annotations

import tensorflow as tf

from benchmarks.harness.tensorflow_training import TensorflowTraining
from benchmarks.harness.work import Case


class Strategy:
    def __init__(self, rank: int, size: int) -> None:
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self._rank, self._size = rank, size
        self.versions = {"tensorflow": tf.__version__}

    def open(self, case: Case) -> TensorflowTraining:
        """The strategy adds gradients up as the optimizer applies them: each rank's loss is its share."""
        with self._strategy.scope():
            return TensorflowTraining(case, self._rank, run=self._strategy.run, loss_factor=1 / self._size)

    def close(self) -> None:
        """Nothing to leave."""


def start(rank: int, size: int) -> Strategy:
    return Strategy(rank, size)
