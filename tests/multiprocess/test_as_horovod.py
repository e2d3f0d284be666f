"""`reigen run --as-horovod`: scripts that were written for Horovod, unmodified."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reigen.compat
from tests.multiprocess.launcher import run

pytestmark = pytest.mark.slow  # many real processes

SCRIPTS = Path(__file__).parent / "horovod_scripts"

#: What Horovod's packages offer, and scripts use: from its documentation.
NAMES = {
    "horovod": "run __version__",
    "horovod.runner": "run",
    "horovod.torch": """
        init shutdown is_initialized rank size local_rank local_size cross_rank cross_size mpi_threads_supported
        mpi_enabled gloo_enabled mpi_built gloo_built cuda_built rocm_built ddl_built ccl_built nccl_built
        Average Sum Adasum Min Max Product ProcessSet global_process_set add_process_set
        remove_process_set allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce
        grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather
        allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_ broadcast_async broadcast_async_
        alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
        poll synchronize join barrier broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object
        SyncBatchNorm DistributedOptimizer elastic Compression HorovodInternalError
    """,
    "horovod.torch.mpi_ops": """
        allreduce allreduce_async_ allgather broadcast_ alltoall reducescatter synchronize poll join barrier rank size
        Average Sum Adasum _basics
    """,
    "horovod.torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.util": """
        _cache gpu_available extension_available num_rank_is_power_2 split_list is_iterable nccl_built
    """,
    "horovod.torch.elastic": "run State ObjectState TorchState ElasticSampler HorovodInternalError",
    "horovod.torch.elastic.state": "TorchState get_handler_registry set_handler_registry",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.common.elastic": "run_fn State ObjectState HorovodInternalError HostsUpdatedInterrupt",
}

QUESTIONS = """
import importlib, sys
for line in sys.stdin:
    module, *names = line.split()
    print(module, [name for name in names if not hasattr(importlib.import_module(module), name)])
import horovod.torch as hvd
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import *
from horovod.common.util import *
from horovod.torch import mpi_ops, elastic
import horovod.torch.elastic
is_one = hvd.elastic is elastic is horovod.torch.elastic and elastic.__name__ == "horovod.torch.elastic"
print(is_one, mpi_ops.allreduce is hvd.allreduce, hvd.HorovodInternalError is HorovodInternalError)
basics = HorovodBasics("horovod/torch", "mpi_lib")
basics.init()
print(basics.rank(), basics.size(), basics.gloo_built(), bool(basics.nccl_built()))
print(issubclass(HostsUpdatedInterrupt, RuntimeError), HostsUpdatedInterrupt(True).skip_sync)
print(split_list([1, 2, 3, 4, 5], 2), num_rank_is_power_2(4), num_rank_is_power_2(6), is_iterable(3), is_iterable("a"))
print(extension_available("torch"), extension_available("tensorflow"), gpu_available("torch"))
with env(A_VARIABLE="1"):
    import os
    print(os.environ["A_VARIABLE"])
print("A_VARIABLE" in os.environ)
from horovod.common import util
calls = []
@util._cache
def once(*numbers):
    calls.append(numbers)
    return sum(numbers)
print(once(1, 2), once(1, 2), calls, mpi_ops._basics.size(), mpi_ops._basics.is_initialized())
basics.shutdown()
try:
    hvd.size()
except ValueError as error:
    print(error)
for statement in (
    "import horovod.tensorflow.keras",
    "import horovod.keras",
    "import horovod.mxnet",
    "import horovod.ray",
    "elastic.nothing",
):
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error)
"""


def test_all_names_are_there_and_what_is_missing_says_so():
    environ = reigen.compat.as_horovod({"PYTHONPATH": str(Path(reigen.__file__).parents[1])})
    lines = "".join(f"{module} {' '.join(names.split())}\n" for module, names in NAMES.items())
    done = subprocess.run(
        [sys.executable, "-c", QUESTIONS], input=lines, env=environ, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines()
    assert out[: len(NAMES)] == [f"{module} []" for module in NAMES]
    assert out[len(NAMES) :] == [
        "True True True",
        "0 1 True False",
        "True True",
        "[[1, 2, 3], [4, 5]] True False False True",
        "True False False",
        "1",
        "False",
        "3 3 [(1, 2)] 1 True",
        "Horovod has not been initialized; use hvd.init().",
        (
            "ModuleNotFoundError reigen.tensorflow needs TensorFlow: pip install tensorflow "
            "(No module named 'tensorflow')"
        ),
        "ModuleNotFoundError reigen.keras needs Keras 3: pip install 'keras>=3.5' (No module named 'keras')",
        (
            "ModuleNotFoundError reigen.mxnet needs MXNet: pip install mxnet==1.9.1 numpy==1.23.5 "
            "(No module named 'mxnet')"
        ),
        "ModuleNotFoundError reigen.ray needs Ray: pip install 'reigen[ray]' (No module named 'ray')",
        "AttributeError module 'horovod.torch.elastic' has no attribute 'nothing'",
    ]


@pytest.mark.slow
def test_a_training_script_runs_unmodified_and_so_does_what_it_starts():
    line = ["run", "--as-horovod", "-np", "2", "--no-prefix", sys.executable, str(SCRIPTS / "digits.py")]
    done = subprocess.run(
        [sys.executable, "-m", "reigen", *line, "--fp16-allreduce"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert "same True\n" in out
    assert re.search(r"version 0\.28\.1\+reigen 0\.28\.1\+reigen\n", out)
    assert out.count("mismatch told\n") == 2
    accuracy = re.search(r"accuracy (\S+)", out)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.slow
def test_a_test_suite_runs_unmodified():
    status, _, err = run("--as-horovod", "-np", "2", "--no-prefix", sys.executable, str(SCRIPTS / "suite_torch.py"))
    assert status == 0, err
    assert err.count("OK\n") == 2
    assert "skipped" not in err


@pytest.mark.slow
def test_horovods_run_starts_ranks_that_know_horovod():
    program = """
import horovod
def work(x):
    import horovod.torch as hvd, torch
    hvd.init()
    return hvd.rank(), int(hvd.allreduce(torch.tensor([x]), op=hvd.Sum))
if __name__ == "__main__":
    print(horovod.run(work, args=(20,), num_proc=2))
"""
    environ = reigen.compat.as_horovod({**os.environ, "PYTHONPATH": str(Path(reigen.__file__).parents[1])})
    done = subprocess.run([sys.executable, "-c", program], env=environ, text=True, capture_output=True, check=False)
    assert done.stdout == "[(0, 40), (1, 40)]\n", done.stderr


def test_without_the_option_nothing_is_called_horovod():
    code = "import importlib.util; print(importlib.util.find_spec('horovod'))"
    assert run("-np", "1", "--no-prefix", sys.executable, "-c", code)[1] == "None\n"


def test_the_directory_comes_first_and_once():
    first = reigen.compat.as_horovod({"PYTHONPATH": "/a:/b"})
    assert first["PYTHONPATH"] == f"{reigen.compat.DIRECTORY}:/a:/b"
    assert reigen.compat.as_horovod(first) == first
    assert reigen.compat.as_horovod({})["PYTHONPATH"] == reigen.compat.DIRECTORY
    printed = subprocess.run([sys.executable, "-m", "reigen.compat"], capture_output=True, text=True, check=True).stdout
    assert printed == reigen.compat.DIRECTORY + "\n"
