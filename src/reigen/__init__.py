"""Reigen: data-parallel training of one model on many processes. This is the face for NumPy arrays.

The functions are loaded when the first of them is used: the launcher and the command line are part of this package,
too, and start without NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from reigen._version import __version__

if TYPE_CHECKING:
    from reigen.numpy_face import (
        Average,
        Max,
        Min,
        Product,
        Sum,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        cross_rank,
        cross_size,
        global_process_set,
        init,
        is_initialized,
        local_rank,
        local_size,
        poll,
        rank,
        reducescatter,
        reducescatter_async,
        shutdown,
        size,
        synchronize,
    )

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "__version__",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module("reigen.numpy_face"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
