# Written by tools/make_stubs.py of the table in reigen/api/operations.py; not to be edited.

from collections.abc import Sequence

from numpy.typing import ArrayLike

from reigen.api.adapter import Array
from reigen.api.collectives import poll as poll
from reigen.api.collectives import synchronize as synchronize
from reigen.api.common_names import Adasum as Adasum
from reigen.api.common_names import Average as Average
from reigen.api.common_names import Max as Max
from reigen.api.common_names import MetricsLogger as MetricsLogger
from reigen.api.common_names import Min as Min
from reigen.api.common_names import ProcessSet as ProcessSet
from reigen.api.common_names import Product as Product
from reigen.api.common_names import Sum as Sum
from reigen.api.common_names import add_process_set as add_process_set
from reigen.api.common_names import ccl_built as ccl_built
from reigen.api.common_names import cross_rank as cross_rank
from reigen.api.common_names import cross_size as cross_size
from reigen.api.common_names import cuda_built as cuda_built
from reigen.api.common_names import ddl_built as ddl_built
from reigen.api.common_names import global_process_set as global_process_set
from reigen.api.common_names import gloo_built as gloo_built
from reigen.api.common_names import gloo_enabled as gloo_enabled
from reigen.api.common_names import init as init
from reigen.api.common_names import is_homogeneous as is_homogeneous
from reigen.api.common_names import is_initialized as is_initialized
from reigen.api.common_names import local_rank as local_rank
from reigen.api.common_names import local_size as local_size
from reigen.api.common_names import metrics as metrics
from reigen.api.common_names import mpi_built as mpi_built
from reigen.api.common_names import mpi_enabled as mpi_enabled
from reigen.api.common_names import mpi_threads_supported as mpi_threads_supported
from reigen.api.common_names import nccl_built as nccl_built
from reigen.api.common_names import rank as rank
from reigen.api.common_names import remove_process_set as remove_process_set
from reigen.api.common_names import report_progress as report_progress
from reigen.api.common_names import rocm_built as rocm_built
from reigen.api.common_names import size as size
from reigen.api.common_names import start_timeline as start_timeline
from reigen.api.common_names import stop_timeline as stop_timeline
from reigen.api.functions import allgather_object as allgather_object
from reigen.api.functions import barrier as barrier
from reigen.api.functions import broadcast_object as broadcast_object
from reigen.api.functions import join as join
from reigen.api.job import shutdown as shutdown
from reigen.engine.handle import Handle

def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Array: ...
def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Array: ...
def allreduce_async(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Handle[Array]: ...
def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Handle[Array]: ...
def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> list[Array]: ...
def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> list[Array]: ...
def grouped_allreduce_async(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Handle[list[Array]]: ...
def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ...,
) -> Handle[list[Array]]: ...
def allgather(
    tensor: ArrayLike,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Array: ...
def allgather_async(
    tensor: ArrayLike,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[Array]: ...
def grouped_allgather(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> list[Array]: ...
def grouped_allgather_async(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[list[Array]]: ...
def broadcast(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Array: ...
def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Array: ...
def broadcast_async(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[Array]: ...
def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[Array]: ...
def alltoall(
    tensor: ArrayLike,
    splits: Sequence[int] | ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Array | tuple[Array, Array]: ...
def alltoall_async(
    tensor: ArrayLike,
    splits: Sequence[int] | ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = ...,
) -> Handle[tuple[Array, Array]]: ...
def reducescatter(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array: ...
def reducescatter_async(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]: ...
def grouped_reducescatter(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]: ...
def grouped_reducescatter_async(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int = 0,
    process_set: ProcessSet = ...,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Array]]: ...
