"""Names, besides collectives, that scripts import from Horovod's inner modules (``horovod.common.util`` ...)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from reigen.api import build_info, job
from reigen.api.frameworks import FRAMEWORKS


class HorovodBasics:
    """The functions about the job, as methods.

    Args:
        pkg_path: not used, nor is what follows: there is no library to load.
    """

    def __init__(self, pkg_path: object = None, *names: object) -> None:
        del pkg_path, names

    init = staticmethod(job.init)
    shutdown = staticmethod(job.shutdown)
    is_initialized = staticmethod(job.is_initialized)
    rank = staticmethod(job.rank)
    size = staticmethod(job.size)
    local_rank = staticmethod(job.local_rank)
    local_size = staticmethod(job.local_size)
    cross_rank = staticmethod(job.cross_rank)
    cross_size = staticmethod(job.cross_size)
    is_homogeneous = staticmethod(job.is_homogeneous)
    mpi_threads_supported = staticmethod(build_info.mpi_threads_supported)
    mpi_enabled = staticmethod(build_info.mpi_enabled)
    mpi_built = staticmethod(build_info.mpi_built)
    gloo_enabled = staticmethod(build_info.gloo_enabled)
    gloo_built = staticmethod(build_info.gloo_built)
    nccl_built = staticmethod(build_info.nccl_built)
    ddl_built = staticmethod(build_info.ddl_built)
    ccl_built = staticmethod(build_info.ccl_built)
    cuda_built = staticmethod(build_info.cuda_built)
    rocm_built = staticmethod(build_info.rocm_built)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is a front end for a framework (``torch``, ``mxnet``), and the framework is installed."""
    del verbose
    return ext_base_name in FRAMEWORKS and find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Accept: there is no compiled extension to check.

    Raises:
        ImportError: there is no front end for this framework.
    """
    del ext_env_var, pkg_path, args
    framework = ext_name.rpartition(".")[2]
    if framework not in FRAMEWORKS:
        raise ImportError(f"Extension {framework} has not been built: Reigen has no front end for it")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """False: collectives run in the memory of the CPU."""
    del ext_base_name, verbose
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is 1, 2, 4, 8 ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def check_num_rank_power_of_2(num_rank: int) -> None:
    """Raise ValueError unless the number of ranks is a power of two."""
    if not num_rank_is_power_2(num_rank):
        raise ValueError(f"the number of ranks must be a power of 2, not {num_rank}")


def is_iterable(value: object) -> bool:
    """Return whether ``iter(value)`` works."""
    try:
        iter(value)  # type: ignore[call-overload]  # that is the question
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Return whether ``version`` (``1.2.3``, with or without more behind it) is at least ``target`` (``1.2.3``).

    Raises:
        ValueError: one of them has not three numbers.
    """
    return _parse_version(version) >= _parse_version(target)


def _parse_version(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"a version has the form of 1.2.3, not {version!r}")
    return tuple(map(int, match.groups()))


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Environment variables have these values inside the block; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables.items())
    try:
        yield
    finally:
        _set(before.items())


def _set(variables: Iterable[tuple[str, str | None]]) -> None:
    for name, value in variables:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
