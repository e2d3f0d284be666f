"""``reigen.torch`` under Horovod's name, with Horovod's inner modules."""

from reigen.torch import *

from . import compression as compression
from . import functions as functions
from . import mpi_ops as mpi_ops
from . import optimizer as optimizer
from . import sync_batch_norm as sync_batch_norm
from .elastic import run as _in_elastic  # noqa: F401  imports the module of here, instead of Reigen's
