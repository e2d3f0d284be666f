"""Names of ``horovod.spark.torch.estimator``."""

from reigen.spark.torch import *
