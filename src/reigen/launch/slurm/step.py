"""Step of Slurm's with one task on each node: `srun --ntasks-per-node=1 reigen run --nodes-from-env`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath

from reigen.errors import ConfigError
from reigen.launch.nodes.sources import NodeJob
from reigen.launch.nodes.variables import read_number
from reigen.launch.slurm.command import STEP_VARIABLES
from reigen.launch.slurm.node_list import expand_node_list

#: Variables of a task's place in its step, which a rank must not take for its own.
_TASK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS")


def find_step(environ: Mapping[str, str], read_file: Callable[[str], str | None]) -> NodeJob | None:
    """Find the step that this process is a task of; None: it is in none.

    Raises:
        ConfigError: the step has several tasks on a node, or its variables are not in order.
    """
    job_id, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    nodes = environ.get("SLURM_STEP_NODELIST")
    if not job_id or not step or not nodes:
        return None
    names = tuple(expand_node_list(nodes, "SLURM_STEP_NODELIST"))
    num_tasks, index = read_number(environ, "SLURM_STEP_NUM_TASKS"), read_number(environ, "SLURM_NODEID")
    if num_tasks != len(names):
        raise ConfigError(
            f"--nodes-from-env: step {job_id}.{step} of Slurm's has {num_tasks} tasks on {len(names)} nodes; it needs "
            "one on each: srun --ntasks-per-node=1"
        )
    if index >= len(names):
        raise ConfigError(f"SLURM_NODEID is {index}, but SLURM_STEP_NODELIST {nodes!r} has {len(names)} names")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    # srun begins in one directory on all nodes
    secret_file = PurePath(environ.get("PWD", "/")) / f".reigen-slurm-{job_id}.{step}.{restarts}"
    return NodeJob(
        f"step {job_id}.{step} of Slurm's (SLURM_STEP_ID)",
        index,
        len(names),
        names[0],
        job_id=f"{job_id}.{step}.{restarts}",
        names=names,
        secret_file=str(secret_file),
        removed=(*STEP_VARIABLES, *_TASK_VARIABLES, *(name for name in environ if name.startswith(("PMI_", "PMIX_")))),
        makes_secret=True,
    )
