# Written by tools/make_stubs.py of the table in reigen/api/operations.py; not to be edited.

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from reigen.api.process_sets import ProcessSet
from reigen.tensorflow.compression import Compressor

TensorLike: TypeAlias = Any

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

def allreduce(
    tensor: TensorLike,
    average: bool | None = None,
    device_dense: str = ...,
    device_sparse: str = ...,
    compression: Compressor = ...,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = ...,
    ignore_name_scope: bool = False,
) -> tf.Tensor: ...
def grouped_allreduce(
    tensors: Sequence[TensorLike],
    average: bool | None = None,
    device_dense: str = ...,
    device_sparse: str = ...,
    compression: Compressor = ...,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor]: ...
def allgather(
    tensor: TensorLike,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = ...,
) -> tf.Tensor: ...
def grouped_allgather(
    tensors: Sequence[TensorLike],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = ...,
) -> list[tf.Tensor]: ...
def broadcast(
    tensor: TensorLike,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = ...,
) -> tf.Tensor: ...
def alltoall(
    tensor: TensorLike,
    splits: Sequence[int] | TensorLike | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = ...,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]: ...
def reducescatter(
    tensor: TensorLike,
    device_dense: str = ...,
    compression: Compressor = ...,
    op: int = 0,
    name: str | None = None,
    process_set: ProcessSet = ...,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor: ...
def grouped_reducescatter(
    tensors: Sequence[TensorLike],
    device_dense: str = ...,
    compression: Compressor = ...,
    op: int = 0,
    name: str | None = None,
    process_set: ProcessSet = ...,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]: ...
