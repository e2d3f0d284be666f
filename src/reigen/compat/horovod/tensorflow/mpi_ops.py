"""Names of ``horovod.tensorflow.mpi_ops``: the collectives, and queries of the job."""

from reigen.api.horovod_basics import HorovodBasics
from reigen.tensorflow import *

_basics = HorovodBasics()
