"""Names of ``reigen.mxnet``, and Horovod's inner modules."""

from reigen.mxnet import *

from . import compression as compression
from . import functions as functions
from . import mpi_ops as mpi_ops
