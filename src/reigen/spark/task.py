"""Task of Spark's that holds slots of a job: it starts an agent for each, and ends with them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from reigen.cluster.local_peers import process_namespace_id
from reigen.runner.agent_process import AgentProcess
from reigen.spark.gpus import TaskGpus, gpu_variables

if TYPE_CHECKING:
    from pyspark import TaskContext

#: Variables of the worker process of Spark's that are nobody else's.
_WORKER_VARIABLES = (
    "PYTHON_WORKER_FACTORY_PORT",
    "PYTHON_WORKER_FACTORY_SECRET",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_REUSE_WORKER",
)


def run_task(partition: Iterable[Iterable[str]]) -> Iterator[int]:
    """Hold the slots of one partition, whose elements are inputs of agents, until all agents have ended.

    Raises:
        RuntimeError: an agent has not ended in good order; the message has its last output.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "Spark calls this"
    inputs = [text for texts in partition for text in texts]
    variables = _gpu_variables(context)
    with ExitStack() as stack:
        agents = []
        with _without_worker_variables():
            for text in inputs:
                agents.append(AgentProcess(text, environ=variables, attempt=context.attemptNumber()))
                stack.callback(agents[-1].stop)
        for agent in agents:
            if exit_code := agent.wait():
                number = context.partitionId()
                raise RuntimeError(f"the agent of task {number} ended with exit code {exit_code}: {agent.output}")
    yield len(inputs)


def _gpu_variables(context: TaskContext) -> dict[str, str]:
    """Return the variables for the GPUs of all tasks on this host; without a barrier, for those of this task."""
    from pyspark import BarrierTaskContext

    gpus = context.resources().get("gpu")
    if gpus is None:
        return {}
    own = TaskGpus(process_namespace_id(), tuple(gpus.addresses), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    tasks = [own]
    if isinstance(context, BarrierTaskContext):
        texts = context.allGather(json.dumps([own.host, own.addresses, own.visible]))
        everywhere = [TaskGpus(host, tuple(addresses), visible) for host, addresses, visible in map(json.loads, texts)]
        tasks = [task for task in everywhere if task.host == own.host]
    return gpu_variables(tasks)


@contextmanager
def _without_worker_variables() -> Iterator[None]:
    """Take variables out of this process's environment for as long as the block lasts."""
    taken = {name: os.environ.pop(name) for name in _WORKER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)
