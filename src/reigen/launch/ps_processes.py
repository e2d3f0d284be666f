"""Processes of a job that are no ranks: parameter servers, and the scheduler.

Decides, starts nothing. The workers are the job's ranks. Servers run where the user says, in turn; the scheduler runs
on the launcher's host, at a port that the launcher holds for the whole job, so that another one can take its place.
All of them get their places in MXNet's variables, which Reigen's processes and those of others understand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from reigen.cluster.environ import (
    ELASTIC_TIMEOUT_VARIABLE,
    FIRST_WORKERS_VARIABLE,
    MAX_SERVERS_VARIABLE,
    PORT_IS_HELD_VARIABLE,
)
from reigen.errors import ConfigError

#: Directory of servers' snapshots: without it, one that is started again would have lost its keys.
SNAPSHOT_VARIABLE = "REIGEN_KV_SNAPSHOT_DIR"
#: 2: what a server holds is in the memory of another one, too.
REPLICAS_VARIABLE = "REIGEN_KV_REPLICAS"
#: Policy when a worker is lost: abort (the default), continue, or wait for another one.
WORKER_LOSS_VARIABLE = "REIGEN_KV_ON_WORKER_LOSS"
DEADLINE_VARIABLE = "REIGEN_DEADLINE"
#: How long the scheduler of a launched job waits for workers: two weeks, in seconds. The launcher knows when they end,
#: and one that waits for others has a deadline itself; a program that takes its time until it makes a store does
#: nothing wrong.
_SCHEDULER_DEADLINE = "1209600"
NODE_HOST_VARIABLE = "DMLC_NODE_HOST"
#: Number of the first server of an elastic job, whose ranks' numbers grow.
FIRST_ELASTIC_NUMBER = 1 << 20
#: Number of times that a process has been started before.
ATTEMPT_VARIABLE = "DMLC_NUM_ATTEMPT"


class PsRole(StrEnum):
    """Role of a process in the parameter server."""

    WORKER = "worker"
    SERVER = "server"
    SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Parameter servers that a job was asked for.

    Attributes:
        num: the number of servers.
        hosts: where they run, in turn; empty: on the hosts of the job.
        command: of servers and scheduler; empty: Reigen's own.
        environ: variables of the servers alone.
        worker_environ: variables of the ranks alone.
        round_robin_workers: the ranks go to the hosts in turn, too, behind the servers; not host by host.
        num_restarts: how often each process that may be is started again.
        replicas: 2: what a server holds is in the memory of another one, too; None: as the environment says.
        max_num: the greatest number of processes of an elastic job's servers, which then may change; as many are the
            servers themselves, of which a process has one or several. None: each server has a process of its own.
        uses_reigen_scheduler: the scheduler is Reigen's in any case. A command may also be a program for MXNet's own
            servers, and their scheduler could not listen at a port that is held against other users.

    Raises:
        ConfigError: one of them makes no sense.
    """

    num: int
    hosts: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    worker_environ: Mapping[str, str] = field(default_factory=dict)
    round_robin_workers: bool = False
    num_restarts: int = 3
    uses_reigen_scheduler: bool = True
    replicas: int | None = None
    max_num: int | None = None

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError(f"the number of servers must be at least 1, not {self.num}: without, there is no store")
        if self.num_restarts < 0:
            raise ConfigError(f"a server cannot be started again {self.num_restarts} times")
        if self.replicas not in {None, 1, 2}:
            raise ConfigError(f"--replicate-servers {self.replicas}: there is 1, and 2 for a copy of each server")
        if self.replicas == 2 and self.num < 2:
            raise ConfigError("--replicate-servers 2: the copies are in the memory of another server: use -s 2 or more")

        if self.max_num is None:
            return
        if self.max_num < max(self.num, 2):
            raise ConfigError(
                f"--max-servers {self.max_num}: the servers run in {self.num} process{'es' * (self.num > 1)} at first, "
                "and in as many at most; their number can change where that is 2 or more"
            )
        if self.replicas == 2 or self.command:
            what = "--replicate-servers 2" if self.replicas == 2 else "a command for servers"
            raise ConfigError(
                f"--max-servers and {what}: servers that move from process to process have no copies in the memory of "
                "others, and are Reigen's own. With REIGEN_KV_SNAPSHOT_DIR they survive the death of a process"
            )

    @property
    def num_in_job(self) -> int:
        """Number of the servers that workers talk to."""
        return self.max_num or self.num

    @property
    def most_processes(self) -> int:
        """Return how many server processes there may be; one more than servers, while all of the others leave."""
        return self.num if self.max_num is None else self.max_num + 1

    @property
    def variables(self) -> dict[str, str]:
        """Return variables of all processes of the job."""
        return {} if self.replicas is None else {REPLICAS_VARIABLE: str(self.replicas)}


@dataclass(frozen=True, slots=True)
class PsProcess:
    """Server, or scheduler: ``number`` is in the job, behind the ranks, ``index`` among those of its role.

    ``has_several``: it is a process of an elastic job that has several servers, which move.
    """

    number: int
    role: PsRole
    index: int
    has_several: bool = False

    @property
    def name(self) -> str:
        """Name in messages: ``server 1``."""
        process = " process" if self.has_several else ""
        return self.role if self.role is PsRole.SCHEDULER else f"{self.role}{process} {self.index}"


@dataclass(frozen=True, slots=True)
class PsJobSpec:
    """Description of the job for each process of a job with parameter servers.

    Attributes:
        scheduler_host, scheduler_port: where the scheduler is.
        num_workers, num_servers: how many there are; of an elastic job, how many workers at a time at most.
        port_is_held: the launcher holds the scheduler's port against other users; the scheduler has to know.
        is_elastic: workers come and go.
        first_workers: with so many an elastic job begins.
        elastic_timeout_seconds: how long its scheduler waits for others when all workers are lost.
        servers_move: its servers move from process to process.
    """

    scheduler_host: str
    scheduler_port: int
    num_workers: int
    num_servers: int
    port_is_held: bool = False
    is_elastic: bool = False
    first_workers: int = 1
    elastic_timeout_seconds: float = 600.0
    servers_move: bool = False

    def variables(self, role: PsRole, index: int, node_host: str) -> dict[str, str]:
        """Return the variables of process ``index`` of a role, whose host the others reach at ``node_host``."""
        own: dict[str, str] = {}
        if role is PsRole.SCHEDULER:
            own = {DEADLINE_VARIABLE: _SCHEDULER_DEADLINE} | ({PORT_IS_HELD_VARIABLE: "1"} if self.port_is_held else {})
        if self.is_elastic:
            own[WORKER_LOSS_VARIABLE] = "elastic"
        if self.servers_move:
            own[MAX_SERVERS_VARIABLE] = str(self.num_servers)
        if self.is_elastic and role is PsRole.SCHEDULER:
            own[FIRST_WORKERS_VARIABLE] = str(self.first_workers)
            own[ELASTIC_TIMEOUT_VARIABLE] = f"{self.elastic_timeout_seconds:g}"
        return own | {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": self.scheduler_host,
            "DMLC_PS_ROOT_PORT": str(self.scheduler_port),
            "DMLC_NUM_WORKER": str(self.num_workers),
            "DMLC_NUM_SERVER": str(self.num_servers),
            "DMLC_TASK_ID": str(index),
            ATTEMPT_VARIABLE: "0",
            NODE_HOST_VARIABLE: node_host,
        }


def list_ps_processes(num_ranks: int, servers: ServerOptions | None) -> list[PsProcess]:
    """List the servers, and behind them the scheduler; empty where no servers were asked for."""
    if servers is None:
        return []
    num, have_several = servers.most_processes, servers.max_num is not None
    processes = [PsProcess(num_ranks + index, PsRole.SERVER, index, have_several) for index in range(num)]
    return [*processes, PsProcess(num_ranks + num, PsRole.SCHEDULER, 0)]


def name_ps_processes(num_ranks: int, servers: ServerOptions | None) -> dict[int, str]:
    """Return the names of PS processes by number."""
    return {process.number: process.name for process in list_ps_processes(num_ranks, servers)}


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Failures that do not end the job.

    Attributes:
        restarts: how often processes may be started again, by number: all PS processes, and ranks that may be.
        continue_on_failure: the ranks go on without one that fails.
    """

    restarts: Mapping[int, int] = field(default_factory=dict)
    continue_on_failure: bool = False


def servers_keep_values(servers: ServerOptions, environ: Mapping[str, str]) -> bool:
    """Return whether what servers hold outlives them, in snapshots on a disk or in the memory of other servers."""
    variables = {**environ, **servers.environ}
    return bool(variables.get(SNAPSHOT_VARIABLE)) or variables.get(REPLICAS_VARIABLE, "1") == "2"


def choose_restart_policy(
    num_ranks: int, servers: ServerOptions | None, environ: Mapping[str, str], *, is_elastic: bool = False
) -> RestartPolicy:
    """Choose the policy for a job whose processes inherit ``environ``.

    A server is started again only where it keeps snapshots, on a disk or in the memory of another server: one that has
    forgotten everything is worse than none.
    The scheduler learns everything anew from its members, and that of an elastic job from the record that the one
    before it has left. A worker is started again where the servers wait for one.
    """
    if servers is None:
        return RestartPolicy()
    of_servers = servers.num_restarts if servers_keep_values(servers, environ) else 0
    restarts = {
        process.number: servers.num_restarts if process.role is PsRole.SCHEDULER else of_servers
        for process in list_ps_processes(num_ranks, servers)
    }
    if is_elastic:
        return RestartPolicy(restarts)
    policy = environ.get(WORKER_LOSS_VARIABLE, "")
    if policy == "wait":
        restarts |= dict.fromkeys(range(num_ranks), servers.num_restarts)
    return RestartPolicy(restarts, policy == "continue")
