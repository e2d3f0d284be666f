"""``reigen.torch.elastic`` under Horovod's name, with Horovod's inner modules."""

import sys as _sys

from reigen.torch.elastic import *
from reigen.torch.elastic import sampler as sampler
from reigen.torch.elastic import state as state

# the very same modules: tests replace functions in them by these names
_sys.modules[f"{__name__}.sampler"] = sampler
_sys.modules[f"{__name__}.state"] = state
