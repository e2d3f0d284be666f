"""Names of ``horovod.torch.mpi_ops``: the collectives, and queries of the job."""

from reigen.api.horovod_basics import HorovodBasics
from reigen.torch import *

_basics = HorovodBasics()
