"""``reigen.spark.torch`` under Horovod's name."""

from reigen.spark.torch import *
