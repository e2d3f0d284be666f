"""Names of ``horovod.spark.common.backend``."""

from reigen.spark.estimator_backend import EstimatorBackend as Backend
from reigen.spark.estimator_backend import LocalBackend, SparkBackend

__all__ = ["Backend", "LocalBackend", "SparkBackend"]
