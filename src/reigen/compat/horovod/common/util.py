"""Small questions and helpers."""

import functools

from reigen.api.build_info import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built
from reigen.api.gradients.bucket_plan import split_list
from reigen.api.horovod_basics import (
    check_extension,
    check_num_rank_power_of_2,
    env,
    extension_available,
    gpu_available,
    is_iterable,
    is_version_greater_equal_than,
    num_rank_is_power_2,
)

_cache = functools.cache

__all__ = [
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]
