"""Names of ``horovod.spark.common.backend``."""

from reigen.spark.estimator_backend import Backend, LocalBackend, SparkBackend

__all__ = ["Backend", "LocalBackend", "SparkBackend"]
