"""Reigen for PyTorch (2.4 or later): ``import reigen.torch as hvd`` in a script written for Horovod."""

try:
    import torch as _torch  # noqa: F401  before anything that needs it: this says what to do where it is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"reigen.torch needs PyTorch: pip install torch ({error})", name=error.name) from None

from reigen.api.build_info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from reigen.api.collectives import poll, synchronize
from reigen.api.functions import allgather_object, barrier, broadcast_object, join
from reigen.api.job import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from reigen.api.operations import Adasum, Average, Max, Min, Product, Sum
from reigen.api.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from reigen.errors import HorovodInternalError
from reigen.torch.clipping import clip_global_norm
from reigen.torch.compression import Compression
from reigen.torch.distributed_optimizer import DistributedOptimizer
from reigen.torch.kvstore.trainer import Trainer
from reigen.torch.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from reigen.torch.sparse import sparse_allreduce_async
from reigen.torch.state import broadcast_optimizer_state, broadcast_parameters
from reigen.torch.sync_batch_norm import SyncBatchNorm
from reigen.torch.uneven_inputs import uneven_data

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "Trainer",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "clip_global_norm",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "uneven_data",
]
