"""Jobs in Spark: functions, and scripts of PyTorch's, on the executors of an application.

Nothing of pyspark is imported before it is used.
"""

from reigen.spark.call import run, run_elastic
from reigen.spark.distributor import Distributor
from reigen.spark.gpus import get_available_devices

__all__ = ["Distributor", "get_available_devices", "run", "run_elastic"]
