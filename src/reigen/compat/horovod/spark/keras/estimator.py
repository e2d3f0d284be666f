"""Names of ``horovod.spark.keras.estimator``."""

from reigen.spark.keras import *
