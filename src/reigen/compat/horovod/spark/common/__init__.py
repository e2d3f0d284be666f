"""Modules of ``horovod.spark.common``."""
