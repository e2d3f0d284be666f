"""``reigen.tensorflow`` under Horovod's name, with Horovod's inner modules."""

from reigen import tensorflow as _reigen
from reigen.compat.keras2_calls import accept_keras2_calls as _accept_keras2_calls
from reigen.tensorflow import *

from . import compression as compression
from . import elastic as elastic
from . import functions as functions
from . import gradient_aggregation as gradient_aggregation
from . import mpi_ops as mpi_ops

_accept_keras2_calls()
__getattr__ = _reigen.__getattr__
