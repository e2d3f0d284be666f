"""Names of ``horovod.common.util``: queries of the build, and helper functions."""

import functools

from reigen.api.build_info import *
from reigen.api.gradients.bucket_plan import split_list  # noqa: F401
from reigen.api.horovod_basics import *

_cache = functools.cache
