"""Names of ``horovod.spark.common.estimator``."""

from reigen.spark.estimator import DistributedEstimator as HorovodEstimator
from reigen.spark.estimator import TrainedModel as HorovodModel

__all__ = ["HorovodEstimator", "HorovodModel"]
