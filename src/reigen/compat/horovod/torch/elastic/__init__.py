"""``reigen.torch.elastic`` under Horovod's name, with Horovod's inner modules."""

from reigen.torch.elastic import *

from . import sampler as sampler
from . import state as state
