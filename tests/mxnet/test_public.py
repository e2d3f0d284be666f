"""What is offered, under which names and with which arguments: Horovod's, from its documentation."""

import inspect
import sys

import pytest

import reigen.compat
import reigen.mxnet as hvd

NAMES = """
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size mpi_threads_supported
    mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
    start_timeline stop_timeline ProcessSet global_process_set add_process_set remove_process_set
    Average Sum Adasum Min Max Product Compression
    allgather grouped_allgather allreduce allreduce_ grouped_allreduce grouped_allreduce_ alltoall broadcast broadcast_
    reducescatter grouped_reducescatter allgather_object broadcast_object broadcast_parameters
    DistributedOptimizer DistributedTrainer
"""

REDUCING = "average=None name=None priority=0 prescale_factor=1.0 postscale_factor=1.0 process_set op=None"
SCATTERING = "op=0 name=None priority=0 process_set prescale_factor=1.0 postscale_factor=1.0"
SIGNATURES = {
    "allreduce": f"tensor {REDUCING}",
    "allreduce_": f"tensor {REDUCING}",
    "grouped_allreduce": f"tensors {REDUCING}",
    "grouped_allreduce_": f"tensors {REDUCING}",
    "allgather": "tensor name=None priority=0 process_set",
    "grouped_allgather": "tensors name=None priority=0 process_set",
    "broadcast": "tensor root_rank name=None priority=0 process_set",
    "broadcast_": "tensor root_rank name=None priority=0 process_set",
    "alltoall": "tensor splits=None name=None priority=0 process_set",
    "reducescatter": f"tensor {SCATTERING}",
    "grouped_reducescatter": f"tensors {SCATTERING}",
    "broadcast_parameters": "params root_rank=0 prefix=None",
    "allgather_object": "obj name=None",
    "DistributedOptimizer": "optimizer gradient_predivide_factor=1.0 num_groups=0 process_set",
}


def test_all_of_horovods_names_are_there():
    names = NAMES.split()
    assert [name for name in names if not hasattr(hvd, name)] == []
    assert set(names) <= set(hvd.__all__)
    assert hvd.__all__ == sorted(hvd.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_horovods(name):
    said = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        has_value = parameter.default not in {inspect.Parameter.empty, hvd.global_process_set}
        said.append(f"{parameter.name}={parameter.default}" if has_value else parameter.name)
        assert (parameter.name == "process_set") == (parameter.default is hvd.global_process_set)
    assert " ".join(said) == SIGNATURES[name]


def test_horovods_inner_modules(monkeypatch):
    monkeypatch.syspath_prepend(reigen.compat.DIRECTORY)
    import horovod.mxnet
    from horovod.common.util import extension_available
    from horovod.mxnet import compression, functions, mpi_ops

    assert horovod.mxnet.allreduce_ is mpi_ops.allreduce_ is hvd.allreduce_
    assert functions.broadcast_object is hvd.broadcast_object
    assert compression.FP16Compressor is hvd.Compression.fp16
    assert extension_available("mxnet")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
