"""Reigen for MXNet 1.9: ``import reigen.mxnet as hvd`` in a script written for Horovod."""

try:
    import mxnet  # noqa: F401  first and whole: under --as-mxnet its import needs modules of this package
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"reigen.mxnet needs MXNet: pip install mxnet==1.9.1 numpy==1.23.5 ({error})", name=error.name
    ) from None

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
from reigen.api.job import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
    start_timeline,
    stop_timeline,
)
from reigen.api.operations import Adasum, Average, Max, Min, Product, Sum
from reigen.api.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from reigen.errors import HorovodInternalError
from reigen.mxnet.compression import Compression
from reigen.mxnet.engine import shutdown
from reigen.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from reigen.mxnet.ops import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from reigen.mxnet.optimizer import DistributedOptimizer
from reigen.mxnet.trainer import DistributedTrainer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
