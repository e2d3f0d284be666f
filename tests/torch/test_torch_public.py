"""What `import reigen.torch` gives, and with which signatures."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import reigen.torch as hvd

SIGNATURES = {
    "init": "(comm=None, process_sets=None, rank=None, size=None, coordinator=None)",
    "allreduce": "(tensor, average=None, name=None, compression=C, op=None, prescale_factor=1.0, "
    "postscale_factor=1.0, process_set=P)",
    "allreduce_async": "(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, "
    "process_set=P)",
    "grouped_allreduce": "(tensors, average=None, name=None, compression=C, op=None, prescale_factor=1.0, "
    "postscale_factor=1.0, process_set=P)",
    "grouped_allreduce_async": "(tensors, average=None, name=None, op=None, prescale_factor=1.0, "
    "postscale_factor=1.0, process_set=P)",
    "sparse_allreduce_async": "(tensor, name, op, process_set=P)",
    "allgather": "(tensor, name=None, process_set=P)",
    "grouped_allgather": "(tensors, name=None, process_set=P)",
    "broadcast": "(tensor, root_rank, name=None, process_set=P)",
    "alltoall": "(tensor, splits=None, name=None, process_set=P)",
    "reducescatter": "(tensor, name=None, compression=C, op=0, process_set=P, prescale_factor=1.0, "
    "postscale_factor=1.0)",
    "reducescatter_async": "(tensor, name=None, op=0, process_set=P, prescale_factor=1.0, postscale_factor=1.0)",
    "grouped_reducescatter": "(tensors, name=None, compression=C, op=0, process_set=P, prescale_factor=1.0, "
    "postscale_factor=1.0)",
    "grouped_reducescatter_async": "(tensors, name=None, op=0, process_set=P, prescale_factor=1.0, "
    "postscale_factor=1.0)",
    "join": "(device=-1)",
    "barrier": "(process_set=P)",
    "poll": "(handle)",
    "synchronize": "(handle)",
    "ProcessSet": "(ranks_or_comm)",
    "add_process_set": "(process_set)",
    "broadcast_parameters": "(params, root_rank)",
    "broadcast_optimizer_state": "(optimizer, root_rank, model=None)",
    "broadcast_object": "(obj, root_rank=0, name=None, process_set=P)",
    "allgather_object": "(obj, name=None)",
    "SyncBatchNorm": "(num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, "
    "process_set=P, device=None, dtype=None)",
    "DistributedOptimizer": "(optimizer, named_parameters=None, compression=C, backward_passes_per_step=1, op=0, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=P)",
}
#: Arguments that Horovod's functions do not have.
OWN = {"share_parameters", "elementwise", "synchronize_in_backward"}
SAME = {
    "allreduce_": "allreduce_async",
    "allreduce_async_": "allreduce_async",
    "grouped_allreduce_": "grouped_allreduce_async",
    "grouped_allreduce_async_": "grouped_allreduce_async",
    "allgather_async": "allgather",
    "grouped_allgather_async": "grouped_allgather",
    "broadcast_": "broadcast",
    "broadcast_async": "broadcast",
    "broadcast_async_": "broadcast",
    "alltoall_async": "alltoall",
    "remove_process_set": "add_process_set",
}


def signature(name: str) -> str:
    parameters = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        if parameter.name in OWN:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            continue
        default = parameter.default
        text = {hvd.global_process_set: "P", hvd.Compression.none: "C"}.get(default, repr(default))
        parameters.append(parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={text}")
    return f"({', '.join(parameters)})"


@pytest.mark.parametrize("name", [*SIGNATURES, *SAME])
def test_signatures_are_horovods(name):
    assert signature(name) == SIGNATURES[SAME.get(name, name)]


def test_all_is_sorted_and_complete():
    assert list(hvd.__all__) == sorted(hvd.__all__)
    submodules = {name for name, value in vars(hvd).items() if inspect.ismodule(value)} - {"elastic"}
    public = {name for name in dir(hvd) if not name.startswith("_")} - submodules
    assert set(hvd.__all__) == public


def test_operators_are_horovods_numbers():
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


def test_what_it_was_built_with():
    """A script must take the path of Horovod with Gloo: it is the one that works here."""
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    no = [hvd.mpi_built, hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built, hvd.cuda_built, hvd.rocm_built]
    assert not any(each() for each in no)
    assert hvd.nccl_built() == 0
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()


def test_front_ends_import_no_framework():
    code = (
        "import sys, reigen.api.gradients.plan_agreement, reigen.api.collectives, reigen.api.compression\n"
        "import reigen.api.gradients.tracker, reigen.api.functions, reigen.api.job\n"
        "assert not {'torch', 'tensorflow', 'jax', 'mxnet', 'cloudpickle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("framework", "remedy"), [("torch", "torch"), ("mxnet", "mxnet==1.9.1")])
def test_a_missing_framework_is_named_with_what_to_do(framework: str, remedy: str) -> None:
    code = f"import sys; sys.modules[{framework!r}] = None; import reigen.{framework}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"ModuleNotFoundError: reigen.{framework} needs " in done.stderr
    assert f"pip install {remedy}" in done.stderr
