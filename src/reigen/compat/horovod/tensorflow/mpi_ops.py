"""Names of ``horovod.tensorflow.mpi_ops``: the collectives, and queries of the job."""

from reigen.api.horovod_basics import HorovodBasics, check_num_rank_power_of_2, gpu_available
from reigen.tensorflow import *

_basics = HorovodBasics()
