"""The collectives, and this process's place in the job."""

from reigen.api.horovod_basics import HorovodBasics
from reigen.torch import *

_basics = HorovodBasics()
