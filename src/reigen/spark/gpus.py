"""GPUs of Spark's tasks, and those that a rank may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from reigen.errors import LaunchError

#: Number of GPUs of each task of this host.
GPUS_PER_TASK_VARIABLE = "REIGEN_SPARK_GPUS_PER_TASK"
_LOCAL_RANK_VARIABLE = "REIGEN_LOCAL_RANK"
_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ADDRESS = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class TaskGpus:
    """GPUs of one task.

    Attributes:
        host: the same for tasks on one host.
        addresses: Spark's, numbers among the GPUs that the executor sees.
        visible: CUDA_VISIBLE_DEVICES of the executor; empty where it is not set.
    """

    host: str
    addresses: tuple[str, ...]
    visible: str = ""


def gpu_variables(tasks: Iterable[TaskGpus]) -> dict[str, str]:
    """Return the variables that make the GPUs of all tasks of one host visible to its ranks, in the order of tasks.

    Raises:
        LaunchError: Spark names a GPU in another way than by its number.
    """
    tasks = list(tasks)
    names = [_name_of(task, address) for task in tasks for address in task.addresses]
    if not names:
        return {}
    return {
        _VISIBLE_VARIABLE: ",".join(dict.fromkeys(names)),
        GPUS_PER_TASK_VARIABLE: str(max(len(task.addresses) for task in tasks)),
    }


def get_available_devices() -> list[str]:
    """Return this rank's GPUs, as numbers among those that it can see; an empty list where Spark gave it none.

    A rank sees the GPUs of all of the job's tasks on its host, so that ranks can exchange data between them;
    ``torch.cuda.set_device(int(get_available_devices()[0]))`` chooses its own.

    Raises:
        RuntimeError: this process is no rank of a job.
    """
    local_rank = os.environ.get(_LOCAL_RANK_VARIABLE)
    if local_rank is None:
        raise RuntimeError("get_available_devices() has to be called by a function that reigen.spark.run runs")
    num_gpus = int(os.environ.get(GPUS_PER_TASK_VARIABLE, "0"))
    num_visible = len(_split_names(os.environ.get(_VISIBLE_VARIABLE, "")))
    first = int(local_rank) * num_gpus
    return [str(number) for number in range(first, min(first + num_gpus, num_visible))]


def _name_of(task: TaskGpus, address: str) -> str:
    """Translate a number among the executor's visible GPUs into CUDA's name on the host."""
    if not _ADDRESS.fullmatch(address):
        raise LaunchError(
            f"Spark's address of a GPU is {address!r}; it has to be a number: see the script that finds GPUs, "
            "spark.worker.resource.gpu.discoveryScript"
        )
    visible = _split_names(task.visible)
    return visible[int(address)] if int(address) < len(visible) else address


def _split_names(visible: str) -> list[str]:
    return [name for name in visible.split(",") if name]
