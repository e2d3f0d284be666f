"""Estimators of Spark ML for PyTorch: ``from reigen.spark.torch import TorchEstimator``."""

from reigen.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
