"""Slurm's variables of an allocation, in a batch script, under salloc, or in a step of one task. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reigen.errors import ConfigError
from reigen.launch.engines import EngineJob
from reigen.launch.hosts import HostInfo
from reigen.launch.slurm.node_list import expand_counts, expand_node_list


@dataclass(frozen=True, slots=True)
class SlurmAllocation:
    """Allocation of nodes to a job.

    Attributes:
        job_id: the job's number.
        hosts: nodes with their tasks, in Slurm's order.
        counts: the tasks as Slurm has them, ``4,2(x2)``; empty: Slurm does not say, and each node has one slot.
        groups: number of each node's component, in a heterogeneous job; else empty.
        node: Slurm's name of this node; empty on a login host.
        num_restarts: how often the job was put back into the queue, and has begun anew.
        array_task: the task of a job array that this job is, in words; else empty.
        end_seconds: time when it will be ended, in seconds since 1970; None: unknown.
    """

    job_id: str
    hosts: tuple[HostInfo, ...]
    counts: str
    groups: Mapping[str, int] = field(default_factory=dict)
    node: str = ""
    num_restarts: int = 0
    end_seconds: float | None = None
    array_task: str = ""

    @property
    def num_tasks(self) -> int:
        """Tasks on all nodes."""
        return sum(host.slots for host in self.hosts)

    @property
    def description(self) -> str:
        """Description in words: ``Slurm job 17 (SLURM_JOB_ID) with 8 tasks on 3 nodes (4,2(x2))``."""
        tasks = f"{self.num_tasks} task{'s' if self.num_tasks > 1 else ''}"
        nodes = f"{len(self.hosts)} node{'s' if len(self.hosts) > 1 else ''}"
        counts = f" ({self.counts})" if self.counts else ""
        restarts = f", started again {self.num_restarts} times" if self.num_restarts else ""
        array = f", {self.array_task}" if self.array_task else ""
        return f"Slurm job {self.job_id} (SLURM_JOB_ID) with {tasks} on {nodes}{counts}{array}{restarts}"

    def check_size(self, num_ranks: int) -> None:
        """Raise ConfigError where there are more ranks than tasks."""
        if num_ranks <= self.num_tasks:
            return
        given = f"{self.num_tasks} task{'s' if self.num_tasks > 1 else ''} on {len(self.hosts)} nodes"
        counts = f" ({self.counts})" if self.counts else ""
        raise ConfigError(
            f"Slurm gave this job {given}{counts}: {self.num_tasks} slots; -np {num_ranks} is more. Ask Slurm for more "
            "(sbatch --ntasks-per-node=N), or say which host takes how many: --launcher slurm -H HOST:N,HOST:N"
        )


def find_allocation(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """Read the allocation that this process is in; None: it is in none.

    Raises:
        ConfigError: a variable is not in order, or this process is one of several tasks of a step.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id or not any(environ.get(name) for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST")):
        return None
    _check_step(environ)
    components = _components(environ)
    hosts: list[HostInfo] = []
    texts: list[str] = []
    groups: dict[str, int] = {}
    for index, (nodes, counts) in enumerate(components):
        found, text = _read_hosts(environ, nodes, counts)
        hosts += found
        texts += [text] if text else []
        if len(components) > 1:
            groups |= {host.name: index for host in found if host.name not in groups}
    return SlurmAllocation(
        job_id,
        tuple(hosts),
        ",".join(texts),
        groups,
        environ.get("SLURMD_NODENAME", ""),
        _read_number(environ, "SLURM_RESTART_COUNT") or 0,
        _read_number(environ, "SLURM_JOB_END_TIME"),
        _describe_array(environ),
    )


def divide_nodes(
    allocation: SlurmAllocation, num_worker_nodes: int | None, num_server_nodes: int | None
) -> tuple[tuple[HostInfo, ...], tuple[str, ...]]:
    """Return the first nodes, for workers, and names of those behind them, for servers; None: all that remain.

    Raises:
        ConfigError: the allocation has fewer nodes.
    """
    num_nodes = len(allocation.hosts)
    for option, number in (("worker", num_worker_nodes), ("server", num_server_nodes)):
        if number is not None and number < 1:
            raise ConfigError(f"--slurm-{option}-nodes must be at least 1, not {number}")
    num_workers = num_nodes - (num_server_nodes or 0) if num_worker_nodes is None else num_worker_nodes
    num_servers = num_nodes - num_workers if num_server_nodes is None else num_server_nodes
    if num_workers < 1 or num_servers < 1 or num_workers + num_servers > num_nodes:
        raise ConfigError(
            f"Slurm gave this job {num_nodes} nodes: not enough for workers on {max(num_workers, 1)} and servers on "
            f"{max(num_servers, 1)} others; without --slurm-worker-nodes and --slurm-server-nodes they share nodes"
        )
    nodes = allocation.hosts
    return nodes[:num_workers], tuple(host.name for host in nodes[num_workers : num_workers + num_servers])


def _describe_array(environ: Mapping[str, str]) -> str:
    task, job = environ.get("SLURM_ARRAY_TASK_ID"), environ.get("SLURM_ARRAY_JOB_ID")
    return f"task {task} of array {job}" if task and job else ""


def find_engine_job(environ: Mapping[str, str]) -> EngineJob | None:
    """Find Slurm's job for `launch.engines`."""
    allocation = find_allocation(environ)
    return None if allocation is None else EngineJob("slurm", allocation.description, allocation.hosts)


def _check_step(environ: Mapping[str, str]) -> None:
    """Raise ConfigError in a step of several tasks, each of which would start the whole job."""
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and num_tasks != "1":
        raise ConfigError(
            f"srun has started `reigen run` {num_tasks} times, and each would start a whole job: leave srun out "
            "(in a batch script, or under salloc, `reigen run` reaches the nodes by itself), give it one task: -n1, or "
            "one on each node (--ntasks-per-node=1), and say `reigen run --nodes-from-env`"
        )


def _components(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the names of the variables of nodes and tasks, for each component of the job."""
    size = _read_number(environ, "SLURM_HET_SIZE")
    if size is not None:
        suffixes = [f"_HET_GROUP_{index}" for index in range(size)]
        return [(f"SLURM_JOB_NODELIST{suffix}", f"SLURM_TASKS_PER_NODE{suffix}") for suffix in suffixes]
    nodes = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    return [(nodes, "SLURM_TASKS_PER_NODE")]


def _read_hosts(environ: Mapping[str, str], nodes: str, counts: str) -> tuple[list[HostInfo], str]:
    """Read the hosts of a component, and their tasks as Slurm has them: empty where it does not say."""
    names = expand_node_list(environ.get(nodes, ""), nodes)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{nodes} {environ[nodes]!r} names {twice} twice")
    text = environ.get(counts, "")
    slots = expand_counts(text, counts) if text else []
    if len(slots) != len(names):
        if text and "SLURM_STEP_ID" not in environ:  # there it has the tasks of the step, and not of the job
            raise ConfigError(
                f"{counts} {text!r} has {len(slots)} numbers, but {nodes} {environ[nodes]!r} has {len(names)} names"
            )
        return [HostInfo(name, 1) for name in names], ""
    return [HostInfo(name, max(1, slot)) for name, slot in zip(names, slots, strict=True)], text


def _read_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r}, not a number")
    return int(text)
