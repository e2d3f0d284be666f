"""Names of ``horovod.mxnet.mpi_ops``: the collectives, and queries of the job."""

from reigen.api.horovod_basics import HorovodBasics
from reigen.mxnet import *

_basics = HorovodBasics()
