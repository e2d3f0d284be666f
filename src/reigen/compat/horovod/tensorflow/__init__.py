"""``reigen.tensorflow`` under Horovod's name, with Horovod's inner modules."""

from reigen import tensorflow as _reigen
from reigen.compat import keras2_calls as _keras2_calls  # noqa: F401  Keras 3 takes calls of Keras 2 from here on
from reigen.tensorflow import *

from . import compression as compression
from . import functions as functions
from . import gradient_aggregation as gradient_aggregation
from . import mpi_ops as mpi_ops
from .elastic import run as _in_elastic  # noqa: F401  imports the module of here, instead of Reigen's

__getattr__ = _reigen.__getattr__
