"""``import horovod.tensorflow``, ``.keras`` under --as-horovod: what Horovod's packages offer, and scripts use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import reigen.compat

JOB = """
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
    rocm_built Average Sum Adasum Min Max Product ProcessSet global_process_set add_process_set remove_process_set
    start_timeline stop_timeline
"""
NAMES = {
    "horovod.tensorflow": JOB
    + """
    allreduce grouped_allreduce allgather grouped_allgather broadcast broadcast_ alltoall reducescatter
    grouped_reducescatter join size_op process_set_included_op rank_op local_rank_op local_size_op broadcast_variables
    broadcast_global_variables BroadcastGlobalVariablesHook broadcast_object broadcast_object_fn allgather_object
    DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape SyncBatchNormalization gpu_available
    check_num_rank_power_of_2 elastic Compression
    """,
    "horovod.tensorflow.mpi_ops": "allreduce allgather broadcast alltoall reducescatter join size rank size_op _basics",
    "horovod.tensorflow.functions": "broadcast_variables broadcast_object allgather_object broadcast_global_variables",
    "horovod.tensorflow.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.tensorflow.gradient_aggregation": "LocalGradientAggregator",
    "horovod.tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "horovod.tensorflow.elastic": "HorovodInternalError HostsUpdatedInterrupt ObjectState TensorFlowKerasState "
    "TensorFlowState run",
}
KERAS = """
    DistributedOptimizer PartialDistributedOptimizer allreduce allgather broadcast reducescatter load_model callbacks
    broadcast_global_variables Compression elastic
"""
CALLBACKS = """
    BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
    BestModelCheckpoint
"""
for package in ("horovod.tensorflow.keras", "horovod.keras"):
    NAMES |= {package: JOB + KERAS, f"{package}.callbacks": CALLBACKS}
    NAMES[f"{package}.elastic"] = "CommitStateCallback KerasState UpdateBatchStateCallback UpdateEpochStateCallback run"

QUESTIONS = """
import importlib, sys
import horovod.tensorflow as hvd
for line in sys.stdin:
    module, *names = line.split()
    print(module, [name for name in names if not hasattr(importlib.import_module(module), name)])
import horovod.tensorflow.keras as keras
print(keras.callbacks is sys.modules["horovod.tensorflow.keras.callbacks"])
for statement in (
    "import horovod.tensorflow.data",
    "hvd.elastic.nothing",
    "hvd.nothing",
):
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("keras", ["keras 3", "legacy"])
def test_all_names_are_there_and_what_is_missing_says_so(keras):
    variables = {"PYTHONPATH": str(Path(reigen.compat.__file__).parents[2])}
    environ = reigen.compat.as_horovod(variables | {"TF_USE_LEGACY_KERAS": "01"[keras == "legacy"]})
    lines = "".join(f"{module} {' '.join(names.split())}\n" for module, names in NAMES.items())
    command = [sys.executable, "-c", QUESTIONS]
    done = subprocess.run(command, input=lines, env=environ, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *[f"{module} []" for module in NAMES],
        "True",
        "ImportError horovod.tensorflow.data: Reigen has no jobs of tf.data services yet",
        "AttributeError module 'reigen.tensorflow.elastic' has no attribute 'nothing'",
        "AttributeError module 'reigen.tensorflow' has no attribute 'nothing'",
    ]
