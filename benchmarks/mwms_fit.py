"""The peer MultiWorkerMirroredStrategy with `fit`, for `reigen bench frameworks`, with legacy Keras: it has no other.

A process without TF_CONFIG trains alone. With it, see `benchmarks/mwms_train.py`.
"""

from __future__ import annotations

import os

import tensorflow as tf
import tf_keras

from benchmarks.harness.keras_training import KerasTraining
from benchmarks.harness.work import Case


class LegacyFit:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else None
        self.versions = {"tf_keras": tf_keras.__version__, "tensorflow": tf.__version__}

    def open(self, case: Case) -> KerasTraining:
        strategy = self._strategy
        if strategy is None:
            return KerasTraining(tf_keras, case, self._rank)

        def own(dataset: tf.data.Dataset) -> tf.data.Dataset:
            """Each rank's own batch, which nobody divides."""
            return strategy.distribute_datasets_from_function(lambda _: dataset)

        return KerasTraining(tf_keras, case, self._rank, wrap_data=own, scope=strategy.scope)

    def close(self) -> None:
        """Nothing to leave."""


def start(rank: int, size: int) -> LegacyFit:
    return LegacyFit(rank)
