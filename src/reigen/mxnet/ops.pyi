# Written by tools/make_stubs.py of the table in reigen/api/operations.py; not to be edited.

from collections.abc import Sequence
from typing import Any, TypeAlias

from reigen.api.process_sets import ProcessSet

NDArray: TypeAlias = Any

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]

def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    op: int | None = None,
) -> NDArray: ...
def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    op: int | None = None,
) -> NDArray: ...
def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    op: int | None = None,
) -> list[NDArray]: ...
def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    op: int | None = None,
) -> list[NDArray]: ...
def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = ...,
) -> NDArray: ...
def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = ...,
) -> list[NDArray]: ...
def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = ...,
) -> NDArray: ...
def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = ...,
) -> NDArray: ...
def alltoall(
    tensor: NDArray,
    splits: Sequence[int] | NDArray | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = ...,
) -> NDArray | tuple[NDArray, NDArray]: ...
def reducescatter(
    tensor: NDArray,
    op: int = 0,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray: ...
def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: int = 0,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[NDArray]: ...
