"""Nodes of a job whose engine runs the same command on each of them, and the sources of that knowledge. No I/O.

A source is a function of the environment and of files, which are read by a function that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import cast

from reigen.errors import ConfigError

#: Returns a file's text; None: there is none. Raises OSError where it cannot be read.
ReadFile = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class NodeJob:
    """Job of an engine that runs the same command on each node.

    Attributes:
        source: the engine, and the evidence, in words.
        index: number of this node; node 0 supervises.
        size: how many nodes there are.
        leader: name, or address, by which the others reach node 0.
        job_id: differs from job to job, and is the same on all nodes.
        names: of all nodes, by index; empty: unknown.
        slots: ranks that this node takes; None: the engine does not say.
        port: where node 0 listens; None: the engine does not say.
        secret_file: where the engine mounts the secret, unless REIGEN_SECRET_FILE says another place; empty: nowhere.
        makes_secret: node 0 makes the secret in ``secret_file``, which is in a directory that the nodes share.
        failure_file: gets the reason where the job fails, on every node; empty: there is no such file.
        grace_seconds: from SIGTERM to SIGKILL, as the engine does it; None: unknown.
        resolve_seconds: how long the leader's name may be unknown at the start; None: as long as the start may take.
        environ: variables that follow from files of the engine, where they are not set.
        removed: names of variables that describe this node, and would be taken for a rank's.
    """

    source: str
    index: int
    size: int
    leader: str
    job_id: str = ""
    names: tuple[str, ...] = ()
    slots: int | None = None
    port: int | None = None
    secret_file: str = ""
    failure_file: str = ""
    grace_seconds: float | None = None
    resolve_seconds: float | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    makes_secret: bool = False


Source = Callable[[Mapping[str, str], ReadFile], NodeJob | None]

#: Sources, by what each looks for; the first that finds something counts.
SOURCES: Mapping[str, str] = {
    "SageMaker: resourceconfig.json, or SM_HOSTS": "reigen.launch.nodes.sagemaker:find_training_job",
    "Kubeflow TrainJob: PET_NNODES": "reigen.launch.nodes.kubernetes:find_train_job",
    "Kubeflow TrainJob for JAX: JAX_NUM_PROCESSES": "reigen.launch.nodes.kubernetes:find_jax_job",
    "LeaderWorkerSet: LWS_GROUP_SIZE": "reigen.launch.nodes.kubernetes:find_leader_worker_set",
    "Indexed Job: JOB_COMPLETION_INDEX and REIGEN_NODES": "reigen.launch.nodes.kubernetes:find_indexed_job",
    "a step of Slurm's: SLURM_STEP_NUM_TASKS, one on each node": "reigen.launch.slurm.step:find_step",
    "StatefulSet: REIGEN_NODES and a numbered host name": "reigen.launch.nodes.kubernetes:find_stateful_set",
}


def find_node_job(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob | None:
    """Find the job whose node this is; None: no source knows it.

    Raises:
        ConfigError: an engine's variables are not in order.
    """
    for target in SOURCES.values():
        module, _, function = target.partition(":")
        if (job := cast(Source, getattr(import_module(module), function))(environ, read_file)) is not None:
            return job
    return None


def require_node_job(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob:
    """Find the job, or raise ConfigError, which lists all sources."""
    job = find_node_job(environ, read_file)
    if job is None:
        raise ConfigError(f"--nodes-from-env: nothing says which node this is. Looked for: {'; '.join(SOURCES)}")
    return job
