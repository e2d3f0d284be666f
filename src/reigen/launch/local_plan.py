"""Plan of a job's processes on this host: the environment and the cores of each. Decides, starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from reigen.cluster.environ import (
    ELASTIC_VARIABLE,
    PORT_IS_HELD_VARIABLE,
    PREFIXED_VARIABLE,
    RANK_VARIABLES,
    RENDEZVOUS_VARIABLE,
    SECRET_VARIABLE,
)
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.hosts import HostAssignment
from reigen.launch.ps_processes import WORKER_LOSS_VARIABLE, PsJobSpec, PsProcess, PsRole, ServerOptions
from reigen.resources.cpu import read_cpu_quota

#: Values of `--bind`.
CPU_BINDINGS = ("cores", "none")
#: Set to 1 where the output of a rank ends on a terminal, though the rank itself writes into a pipe: rank 0 may redraw
#: its line with a carriage return.
TERMINAL_VARIABLE = "REIGEN_TERMINAL"
#: Variables that list the GPUs that a process sees; the first one where a host has none.
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
START_TIMEOUT_VARIABLE = "REIGEN_START_TIMEOUT"
#: Set to 1 where ranks are to be given torchrun's variables: a script that finds them starts torch.distributed.
TORCHRUN_ENV_VARIABLE = "REIGEN_TORCHRUN_ENV"
#: torchrun's names of a process's topology.
_TORCHRUN_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Variables of a rank alone, or of a scheduler alone.
PER_RANK_VARIABLES = frozenset(
    {
        PORT_IS_HELD_VARIABLE,
        *RANK_VARIABLES,
        *(name.replace("REIGEN_", "HOROVOD_") for name in RANK_VARIABLES),
        *(*_TORCHRUN_RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"),
    }
)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Process before it is started.

    Attributes:
        topology: a rank's place in the job; None for a process of a parameter server.
        cpus: the logical processors it is bound to; empty: not bound.
        environ: its whole environment. Not shown in ``repr``: the job's secret is in it.
        ps_process: its number and role if it is no rank.
        descriptors: inherited each time that it is started.
        command: the program and its arguments; empty where the caller knows them.
    """

    topology: Topology | None
    cpus: tuple[int, ...]
    environ: Mapping[str, str] = field(repr=False)
    ps_process: PsProcess | None = None
    descriptors: tuple[int, ...] = ()
    command: Sequence[str] = ()

    @property
    def number(self) -> int:
        """Number in the job: a rank's is its rank."""
        if self.ps_process is not None:
            return self.ps_process.number
        assert self.topology is not None, "a process is a rank or a PS process"
        return self.topology.rank

    @property
    def is_restartable(self) -> bool:
        """True if another process may be started in its place: nothing of this one may then be left."""
        of_a_worker = "DMLC_ROLE" in self.environ and self.environ.get(WORKER_LOSS_VARIABLE) == "wait"
        return self.ps_process is not None or of_a_worker or ELASTIC_VARIABLE in self.environ

    @property
    def name(self) -> str:
        """Name in messages: ``rank 1``, ``server 0``."""
        return f"rank {self.number}" if self.ps_process is None else self.ps_process.name


@dataclass(frozen=True, slots=True)
class JobServices:
    """Services of the launcher for the ranks.

    Attributes:
        rendezvous: ``host:port`` of the rendezvous service.
        secret: the job's 32 bytes.
        master_port: a port that is held for rank 0's own server, at ``master_address``, its host.
        ps_job: description of the parameter servers' job; None: there are none.
        node_host: the address at which other hosts reach this one.
    """

    rendezvous: str
    secret: bytes = field(repr=False)
    master_port: int
    master_address: str = "127.0.0.1"
    ps_job: PsJobSpec | None = None
    node_host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of a job that each host's processes are started with.

    Attributes:
        command: of the ranks: the program and its arguments.
        bind: ``cores``, ``none``, or None to bind where there is at least one processor for each rank.
        start_timeout_seconds: how long ``init()`` waits for all ranks, None for its default.
        servers: parameter servers that run beside the ranks; None: none.
        gpus_per_rank: how many of its host's GPUs each rank sees; None: all of them.
    """

    command: tuple[str, ...]
    bind: str | None = None
    start_timeout_seconds: float | None = None
    servers: ServerOptions | None = None
    gpus_per_rank: int | None = None


@dataclass(frozen=True, slots=True)
class AvailableCpus:
    """Processors that the launcher may use.

    Attributes:
        cpus: numbers of the logical processors, those of one physical core side by side.
        quota: processors' worth of time that the control group allows, None where it sets no limit.
    """

    cpus: tuple[int, ...]
    quota: float | None = None

    @property
    def num_usable(self) -> int:
        """Number of processors that can be busy at a time."""
        return len(self.cpus) if self.quota is None else max(1, min(len(self.cpus), int(self.quota)))


def output_variables(*, is_terminal: bool, prefix: bool) -> dict[str, str]:
    """Return the variables that describe the ranks' output: it ends on a terminal, or each line gets its rank."""
    conditions = {TERMINAL_VARIABLE: is_terminal, PREFIXED_VARIABLE: prefix}
    return {name: "1" for name, holds in conditions.items() if holds}


def single_host_topologies(num_ranks: int) -> list[Topology]:
    """Return the topologies of a job whose ranks are all on this host."""
    return [Topology.on_one_host(rank, num_ranks) for rank in range(num_ranks)]


def plan_host(
    assignment: HostAssignment, options: ProcessOptions, services: JobServices, environ: Mapping[str, str]
) -> tuple[list[ProcessSpec], list[str]]:
    """Plan all processes of this host, with the reason for their binding and a line about each.

    Raises:
        ConfigError: no such binding.
    """
    servers = options.servers
    of_ranks = environ if servers is None else {**environ, **servers.worker_environ}
    timeout, bind = options.start_timeout_seconds, options.bind
    specs, reason = plan_ranks(
        assignment.topologies, services, of_ranks, detect_cpus(), bind=bind, start_timeout_seconds=timeout
    )
    if options.gpus_per_rank is not None:
        visible = divide_gpus(of_ranks, len(specs), options.gpus_per_rank)
        specs = [
            replace(spec, environ={**spec.environ, **variables}) for spec, variables in zip(specs, visible, strict=True)
        ]
    if own := assignment.rank_environs:
        specs = [
            replace(spec, environ=replace_variables(spec.environ, environ))
            for spec, environ in zip(specs, own, strict=True)
        ]
    if servers is not None:
        specs += plan_ps_processes(assignment.ps_processes, services, environ, servers.environ)
    ps_command = () if servers is None else servers.command
    lines = [reason]
    for spec in specs:
        where = "any processor" if not spec.cpus else "processors " + ",".join(map(str, spec.cpus))
        lines.append(f"{where}, OMP_NUM_THREADS={spec.environ['OMP_NUM_THREADS']}")
    return [replace(spec, command=process_command(spec, options.command, ps_command)) for spec in specs], lines


def divide_gpus(environ: Mapping[str, str], num_ranks: int, gpus_per_rank: int) -> list[dict[str, str]]:
    """Return the variables of each rank of a host by which it sees its own GPUs alone, in the order of the host's list.

    Where the host lists none, they are those from 0 on.

    Raises:
        ConfigError: the host lists too few.

    Example:
        >>> divide_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6"}, 2, 1)
        [{'CUDA_VISIBLE_DEVICES': '4'}, {'CUDA_VISIBLE_DEVICES': '5'}]
    """
    names = [name for name in _GPU_VARIABLES if name in environ] or [_GPU_VARIABLES[0]]
    found: list[dict[str, str]] = [{} for _ in range(num_ranks)]
    needed = num_ranks * gpus_per_rank
    for name in names:
        gpus = [gpu for gpu in environ[name].split(",") if gpu] if name in environ else list(map(str, range(needed)))
        if len(gpus) < needed:
            raise ConfigError(
                f"{num_ranks} ranks with {gpus_per_rank} GPUs each need {needed}, but {name}={environ[name]} lists "
                f"{len(gpus)}: ask the engine for more, or leave --gpus-per-rank out: all ranks see all GPUs"
            )
        for rank, variables in enumerate(found):
            variables[name] = ",".join(gpus[rank * gpus_per_rank : (rank + 1) * gpus_per_rank])
    return found


def replace_variables(environ: Mapping[str, str], own: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables with those of ``own``; None removes one."""
    return {name: text for name, text in {**environ, **own}.items() if text is not None}


def plan_ranks(
    topologies: Sequence[Topology],
    services: JobServices,
    environ: Mapping[str, str],
    cores: AvailableCpus,
    *,
    bind: str | None = None,
    start_timeout_seconds: float | None = None,
) -> tuple[list[ProcessSpec], str]:
    """Plan this host's ranks; returns them with the reason for their binding.

    Args:
        topologies: the ranks that this host has.
        services: of the launcher.
        environ: inherited by the ranks, but for their place in another job; TORCHRUN_ENV_VARIABLE in it asks for
            torchrun's variables.
        cores: the processors there are.
        bind: as in `ProcessOptions`.
        start_timeout_seconds: as there.

    Raises:
        ConfigError: no such binding.
    """
    if not topologies:
        return [], "no ranks here"
    shares, reason = bind_cores(len(topologies), cores.cpus, bind)
    common = {name: text for name, text in environ.items() if name not in _TORCHRUN_RANK_VARIABLES}
    for_torchrun = environ.get(TORCHRUN_ENV_VARIABLE, "0") not in ("", "0")
    # Block buffering would hold back what a rank prints until it ends; a terminal would not, and a pipe should not.
    common.setdefault("PYTHONUNBUFFERED", "1")
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores.num_usable // len(topologies))))
    if start_timeout_seconds is not None:
        common[START_TIMEOUT_VARIABLE] = f"{start_timeout_seconds:g}"
    specs = []
    for topology, cpus in zip(topologies, shares, strict=True):
        of_torchrun = _torchrun_variables(topology, services) if for_torchrun else {}
        specs.append(ProcessSpec(topology, cpus, {**common, **_variables(topology, services), **of_torchrun}))
    return specs, reason


def plan_ps_processes(
    processes: Sequence[PsProcess], services: JobServices, environ: Mapping[str, str], of_servers: Mapping[str, str]
) -> list[ProcessSpec]:
    """Plan this host's PS processes, which are not bound: they run when ranks wait.

    ``of_servers`` are variables of the servers alone, beside the ``environ`` of all.
    """
    common = {name: text for name, text in environ.items() if name not in PER_RANK_VARIABLES}
    common.setdefault("PYTHONUNBUFFERED", "1")
    common.setdefault("OMP_NUM_THREADS", "1")
    common |= {RENDEZVOUS_VARIABLE: services.rendezvous, SECRET_VARIABLE: services.secret.hex()}
    specs = []
    for process in processes:
        own = {**common, **(of_servers if process.role is PsRole.SERVER else {})}
        specs.append(ProcessSpec(None, (), own | _kv_variables(process.role, process.index, services), process))
    return specs


def default_ps_command(role: PsRole) -> tuple[str, ...]:
    """Return the command of Reigen's own server or scheduler, with this Python."""
    # -P: no module of the working directory is imported by mistake
    return sys.executable, "-P", "-m", "reigen", role


def process_command(spec: ProcessSpec, rank_command: Sequence[str], ps_command: Sequence[str]) -> Sequence[str]:
    """Return the command of a process; an empty ``ps_command`` means Reigen's own."""
    return rank_command if spec.ps_process is None else ps_command or default_ps_command(spec.ps_process.role)


def bind_cores(num_ranks: int, cpus: Sequence[int], bind: str | None) -> tuple[list[tuple[int, ...]], str]:
    """Return the processors of each rank (an empty tuple: not bound), and the reason.

    Adjacent processors go to one rank, and shares differ by one at most. With more ranks than processors, and only
    if ``bind`` asks for it, rank r gets processor r modulo their number.
    """
    if bind is not None and bind not in CPU_BINDINGS:
        raise ConfigError(f"--bind {bind}: there is no such binding; there are {' and '.join(CPU_BINDINGS)}")
    unbound: list[tuple[int, ...]] = [()] * num_ranks
    if bind == "none":
        return unbound, "not bound: --bind none"
    if num_ranks <= len(cpus):
        bounds = [rank * len(cpus) // num_ranks for rank in range(num_ranks + 1)]
        shares = [tuple(cpus[low:high]) for low, high in pairwise(bounds)]
        return shares, f"{len(cpus)} processors are spread over {num_ranks} ranks"
    if bind is None:
        return unbound, f"not bound: {num_ranks} ranks on {len(cpus)} processors are better placed by the kernel"
    return [(cpus[rank % len(cpus)],) for rank in range(num_ranks)], "ranks share processors in turn: --bind cores"


def _variables(topology: Topology, services: JobServices) -> dict[str, str]:
    texts = [str(number) for number in astuple(topology)]
    variables = dict(zip(RANK_VARIABLES, texts, strict=True))
    variables |= {name.replace("REIGEN_", "HOROVOD_"): variables[name] for name in RANK_VARIABLES}
    variables |= _kv_variables(PsRole.WORKER, topology.rank, services)
    return variables | {RENDEZVOUS_VARIABLE: services.rendezvous, SECRET_VARIABLE: services.secret.hex()}


def _torchrun_variables(topology: Topology, services: JobServices) -> dict[str, str]:
    variables = dict(zip(_TORCHRUN_RANK_VARIABLES, map(str, astuple(topology)), strict=False))
    return variables | {"MASTER_ADDR": services.master_address, "MASTER_PORT": str(services.master_port)}


def _kv_variables(role: PsRole, index: int, services: JobServices) -> dict[str, str]:
    return {} if services.ps_job is None else services.ps_job.variables(role, index, services.node_host)


def detect_cpus(root: Path = Path("/sys"), proc: Path = Path("/proc")) -> AvailableCpus:
    """Return the processors that this process may use, those of one physical core side by side."""

    def order(cpu: int) -> tuple[int, int, int]:
        topology = root / f"devices/system/cpu/cpu{cpu}/topology"
        return _read_int(topology / "physical_package_id"), _read_int(topology / "core_id"), cpu

    return AvailableCpus(tuple(sorted(os.sched_getaffinity(0), key=order)), read_cpu_quota(proc))


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
