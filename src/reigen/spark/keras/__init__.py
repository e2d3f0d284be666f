"""Estimators of Spark ML for Keras 3: ``from reigen.spark.keras import KerasEstimator``."""

from reigen.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
