# Written by tools/make_stubs.py of the table in reigen/api/operations.py; not to be edited.

from collections.abc import Sequence
from typing import Any

from reigen.api.process_sets import ProcessSet
from reigen.engine.handle import Handle
from reigen.jax.compression import Compressor

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = ...,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Any: ...
def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Handle[Any]: ...
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = ...,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> list[Any]: ...
def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Handle[list[Any]]: ...
def allgather(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Any: ...
def allgather_async(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[Any]: ...
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> list[Any]: ...
def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[list[Any]]: ...
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Any: ...
def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[Any]: ...
def alltoall(
    tensor: Any,
    splits: Sequence[int] | Any | None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Any | tuple[Any, Any]: ...
def alltoall_async(
    tensor: Any,
    splits: Sequence[int] | Any | None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[tuple[Any, Any]]: ...
def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = ...,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any: ...
def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Any]: ...
def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = ...,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]: ...
def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Any]]: ...
