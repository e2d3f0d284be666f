"""``reigen.spark.keras`` under Horovod's name."""

from reigen.spark.keras import *
