"""Detection of others' launchers by the variables that each gives to a rank, as it documents them.

A launcher that is not in `LAUNCHERS` is recognised as soon as a function for it is. Their order is the order in which
launchers are usually nested, innermost first: a process of torchrun inside of a Slurm step is torchrun's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reigen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JobInfo:
    """Facts that a process knows about its job when it starts.

    Attributes:
        rank: this process's number.
        size: the number of processes.
        rendezvous: ``host:port`` of the launcher's control service; None: there is none, or the job is one process.
        secret: the job's 32 bytes, None where there is no service. Not shown in ``repr``.
        launcher: its name, ``none`` when alone.
        reason: why it was chosen: its variables of rank and size, with their values.
        local: this process's number among those of its host, and their number, from the launcher; None: unknown. Which
            ranks share a host, they find out by themselves (`cluster.host_discovery`).
        coordinator: host of rank 0, None where it is not known.
        job_id: distinguishes jobs of one user, the same on all ranks, whatever they call their hosts; may be empty.
        by_mpi: started in a way that lets the ranks use MPI.
        port: where rank 0 shall listen, None: any.
    """

    rank: int
    size: int
    rendezvous: str | None
    secret: bytes | None = field(repr=False)
    launcher: str
    reason: str
    local: tuple[int, int] | None = None
    coordinator: str | None = None
    job_id: str = ""
    by_mpi: bool = False
    port: int | None = None

    @property
    def is_on_one_host(self) -> bool:
        """True if the launcher says that all ranks are on one host."""
        return self.local is not None and self.local[1] == self.size


class VariableReader:
    """Reader of one launcher's variables: ``problems`` are collected, not raised one by one."""

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self._environ, self._launcher = environ, launcher
        self.problems: list[str] = []

    def text(self, name: str) -> str:
        """Read a variable that must be there; empty if it is not."""
        if name not in self._environ:
            self.problems.append(f"{name} is not set")
        return self._environ.get(name, "")

    def number(self, name: str) -> int:
        """Read a variable that must be there and be a number; 0 if it is not."""
        self.text(name)
        return self.optional(name) or 0

    def optional(self, name: str) -> int | None:
        """Read a variable that must be a number if it is there."""
        text = self._environ.get(name)
        if text is None:
            return None
        if text.strip().isascii() and text.strip().isdigit():
            return int(text)
        self.problems.append(f"{name} is {text!r}, not a number")
        return None

    def pair(self, first: str, second: str) -> tuple[int, int] | None:
        """Read two numbers, if both are there."""
        one, two = self.optional(first), self.optional(second)
        return None if one is None or two is None else (one, two)

    def found(
        self,
        rank: tuple[str, int] | str,
        size: tuple[str, int] | str,
        *,
        local: tuple[str, str] | tuple[int, int] | None = None,
        **more: object,
    ) -> JobInfo:
        """Return the facts, or raise ConfigError with all problems; numbers may be given by their variables' names."""
        rank_name, rank_number = (rank, self.number(rank)) if isinstance(rank, str) else rank
        size_name, size_number = (size, self.number(size)) if isinstance(size, str) else size
        if local is not None and isinstance(local[0], str):
            local = self.pair(*map(str, local))
        if not self.problems:
            if size_number < 1:
                self.problems.append(f"{size_name} is {size_number}, but must be at least 1")
            elif rank_number >= size_number:
                self.problems.append(f"{rank_name} is {rank_number}, but must be less than {size_name}, {size_number}")
            if isinstance(local, tuple) and not 0 <= int(local[0]) < int(local[1]) <= size_number:
                self.problems.append(
                    f"its number on its host is {local[0]} of {local[1]}, in a job of {size_number} processes"
                )
        self.check(
            f"this process was started by {self._launcher}, whose variables are not in order",
            ", or as its launcher says; to run one process alone, unset them.",
        )
        reason = f"{rank_name}={rank_number}, {size_name}={size_number}"
        facts = {"local": local, **more}
        return JobInfo(rank_number, size_number, None, None, self._launcher, reason, **facts)  # type: ignore[arg-type]

    def check(self, heading: str, remedy: str) -> None:
        """Raise ConfigError with all problems, if there are any."""
        if self.problems:
            lines = "\n  ".join(self.problems)
            raise ConfigError(f"{heading}:\n  {lines}\nStart the job with `reigen run -np N ...`{remedy}")


def _read(environ: Mapping[str, str], launcher: str, rank: str, size: str, **more: Any) -> JobInfo | None:
    """Read the facts of a launcher that sets variables of these names; None if both are missing."""
    if rank not in environ and size not in environ:
        return None
    return VariableReader(environ, launcher).found(rank, size, **more)


def _join_values(environ: Mapping[str, str], *names: str) -> str:
    """Join the values of those variables that are there."""
    return " ".join(environ[name] for name in names if environ.get(name))


def _torch(environ: Mapping[str, str]) -> JobInfo | None:
    """Read torchrun's variables, which others set as well: torch's own launchers, Kubeflow's operators, people."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ
    if not is_torchrun and not ("RANK" in environ and "WORLD_SIZE" in environ):
        return None
    reader = VariableReader(environ, "torchrun" if is_torchrun else "whoever set RANK and WORLD_SIZE")
    job_id = _join_values(environ, "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return reader.found("RANK", "WORLD_SIZE", local=("LOCAL_RANK", "LOCAL_WORLD_SIZE"), job_id=job_id)


def _horovodrun(environ: Mapping[str, str]) -> JobInfo | None:
    local = ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    job_id = _join_values(environ, "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    return _read(environ, "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", local=local, job_id=job_id)


def _open_mpi(environ: Mapping[str, str]) -> JobInfo | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    job_id = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return _read(environ, "mpirun (Open MPI)", *names, local=local, job_id=job_id, by_mpi=True)


def _pmi(environ: Mapping[str, str]) -> JobInfo | None:
    """Read variables of Hydra, the launcher of MPICH, Intel MPI and MVAPICH."""
    numbers = [environ.get(name) for name in ("PMI_RANK", "PMI_SIZE")]
    if numbers == [environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]:
        return None  # srun --mpi=pmi2: the step says more
    launcher, local = "mpiexec (MPICH, Intel MPI or MVAPICH)", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _read(environ, launcher, "PMI_RANK", "PMI_SIZE", local=local, by_mpi=True)


def _slurm(environ: Mapping[str, str]) -> JobInfo | None:
    """Read variables of a step of `srun`: a batch script has SLURM_PROCID as well, but is one process."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    reader = VariableReader(environ, "srun (a Slurm step)")
    rank, size = reader.number("SLURM_PROCID"), reader.number("SLURM_STEP_NUM_TASKS")
    return reader.found(
        ("SLURM_PROCID", rank),
        ("SLURM_STEP_NUM_TASKS", size),
        local=_slurm_local(reader, environ.get("SLURM_STEP_TASKS_PER_NODE")),
        coordinator=first_host(environ.get("SLURM_STEP_NODELIST", "")),
        job_id=_join_values(environ, "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        by_mpi="PMI_RANK" in environ or "PMIX_RANK" in environ,
    )


def _slurm_local(reader: VariableReader, tasks_per_node: str | None) -> tuple[int, int] | None:
    """Return the number on the host, from a list like ``2(x3),1``: two tasks on each of three nodes, then one."""
    local_rank, node = reader.optional("SLURM_LOCALID"), reader.optional("SLURM_NODEID")
    if tasks_per_node is None or local_rank is None or node is None:
        return None
    num_nodes = 0
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if match is None:
            reader.problems.append(f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node!r}, which is not like 2(x3),1")
            return None
        num_nodes += int(match[2] or 1)
        if node < num_nodes:
            return local_rank, int(match[1])
    reader.problems.append(
        f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE={tasks_per_node} has {num_nodes} nodes"
    )
    return None


def first_host(nodes: str) -> str | None:
    """Return the first host of Slurm's list: ``n01`` of ``n[01-03,7],m2``; None if it is empty."""
    depth, first = 0, ""
    for letter in nodes:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            break
        first += letter
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first).strip() or None


def _sagemaker(environ: Mapping[str, str]) -> JobInfo | None:
    if "SM_HOSTS" not in environ and "SM_CURRENT_HOST" not in environ:
        return None
    reader = VariableReader(environ, "SageMaker, one process a host")
    text, current = reader.text("SM_HOSTS"), reader.text("SM_CURRENT_HOST")
    hosts: list[str] = []
    try:
        parsed = json.loads(text or "[]")
        hosts = [str(host) for host in parsed] if isinstance(parsed, list) else []
    except ValueError:
        pass
    if text and not hosts:
        reader.problems.append(f"SM_HOSTS is {text!r}, not a list of hosts in JSON")
    if hosts and current and current not in hosts:
        reader.problems.append(f"SM_CURRENT_HOST is {current!r}, which is not in SM_HOSTS")
    rank = hosts.index(current) if current in hosts else 0
    return reader.found(
        ("number of SM_CURRENT_HOST in SM_HOSTS", rank),
        ("their number", len(hosts)),
        coordinator=hosts[0] if hosts else None,
        job_id=environ.get("TRAINING_JOB_NAME", ""),
    )


def _kubeflow(environ: Mapping[str, str]) -> JobInfo | None:
    """Read variables of Kubeflow's trainer where it starts the script itself, without torchrun, for which PET_* is."""
    if "PET_NNODES" in environ or "PET_NODE_RANK" in environ:
        reader = VariableReader(environ, "Kubeflow, one process a container")
        if environ.get("PET_NPROC_PER_NODE", "1") != "1":
            reader.problems.append(
                f"PET_NPROC_PER_NODE is {environ['PET_NPROC_PER_NODE']!r}: several processes in a container are "
                "started by `torchrun train.py`, which reads it, or by `reigen run`"
            )
        job_id, coordinator = _join_values(environ, "PET_MASTER_PORT", "PET_RDZV_ID"), environ.get("PET_MASTER_ADDR")
        return reader.found("PET_NODE_RANK", "PET_NNODES", coordinator=coordinator, job_id=job_id)
    launcher = "Kubeflow, or whoever set JAX_PROCESS_ID"
    host, _, port = environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")
    coordinator = host.strip("[]") or None
    return _read(environ, launcher, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", coordinator=coordinator, job_id=port)


def _jsrun(environ: Mapping[str, str]) -> JobInfo | None:
    """Read variables of LSF's launcher on IBM's computers."""
    rank, size, local_rank, local_size = (
        f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    local = (local_rank, local_size)
    return _read(environ, "jsrun (LSF)", rank, size, local=local, job_id=environ.get("LSB_JOBID", ""), by_mpi=True)


def _skypilot(environ: Mapping[str, str]) -> JobInfo | None:
    launcher, names = "SkyPilot, one process a node", ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    coordinator = next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), None)
    return _read(environ, launcher, *names, coordinator=coordinator, job_id=environ.get("SKYPILOT_TASK_ID", ""))


#: Each returns its facts, None if its launcher did not start this process, or raises ConfigError.
LAUNCHERS: Sequence[Callable[[Mapping[str, str]], JobInfo | None]] = (
    *(_torch, _horovodrun, _open_mpi, _pmi, _slurm, _sagemaker, _kubeflow, _jsrun, _skypilot),
)

#: Sets of variables that none of these reads, but that no process has which is alone.
_UNSUPPORTED_LAUNCHERS = (
    ("a launcher by PMIx", "PMIX_RANK", "does not say how many processes there are; mpirun of Open MPI or srun do"),
    ("whoever set torch's variables", "WORLD_SIZE MASTER_ADDR", "does not say which RANK this process is"),
    ("whoever set torch's variables", "RANK MASTER_ADDR", "does not say in WORLD_SIZE how many there are"),
)


def explain_unsupported_launcher(environ: Mapping[str, str]) -> str | None:
    """Explain why this process is not alone although none of `LAUNCHERS` started it; None: it is alone."""
    for launcher, names, lack in _UNSUPPORTED_LAUNCHERS:
        if all(name in environ for name in names.split()) and environ.get("WORLD_SIZE") != "1":
            shown = ", ".join(f"{name}={environ[name]}" for name in names.split())
            return f"this process was started by {launcher} ({shown}), which {lack}"
    return None
