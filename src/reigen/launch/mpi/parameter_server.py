"""Jobs with parameter servers that mpirun starts: one for the workers, one for the servers. The scheduler is local.

Variables go by the environment, by name on the command line: mpirun carries the values to other hosts over
connections of its own, which nothing but the site protects. The processes' numbers are the ranks that mpirun gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reigen.cluster.environ import SECRET_VARIABLE
from reigen.launch.hosts import HostAssignment, HostInfo, assign_ranks_and_servers
from reigen.launch.local_plan import PER_RANK_VARIABLES, ProcessSpec, default_ps_command
from reigen.launch.options import LaunchOptions
from reigen.launch.ps_processes import NODE_HOST_VARIABLE, PsJobSpec, PsRole, list_ps_processes

#: The number of a process is its rank in its mpirun: by Open MPI's variable, or by all others'.
_TASK_ID_WRAPPER = ("sh", "-c", 'export DMLC_TASK_ID="${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"; exec "$@"', "sh")


@dataclass(frozen=True, slots=True)
class MpirunCall:
    """Call of mpirun: its options, and its environment, which ``repr`` hides for the job's secret."""

    options: LaunchOptions
    environ: Mapping[str, str] = field(repr=False)


def plan_mpirun_calls(
    options: LaunchOptions,
    environ: Mapping[str, str],
    scheduler: tuple[str, int],
    secret: bytes,
    is_local: Callable[[str], bool],
) -> tuple[list[MpirunCall], tuple[Sequence[str], ProcessSpec]]:
    """Plan the mpirun of the workers, that of the servers, and the scheduler, as command and spec.

    ``scheduler`` is its address and port; ``is_local`` says whether a name is this host's.

    Raises:
        ConfigError: the hosts have too few slots.
    """
    servers = options.servers
    assert servers is not None, "the caller has looked"
    hosts = options.hosts or (HostInfo("localhost", options.num_ranks),)
    assignments = assign_ranks_and_servers(hosts, options.num_ranks, servers, is_local)
    ps_job = PsJobSpec(*scheduler, options.num_ranks, servers.num, servers.uses_reigen_scheduler)
    common = {name: text for name, text in environ.items() if name not in PER_RANK_VARIABLES}

    def environ_of(role: PsRole, own: Mapping[str, str]) -> dict[str, str]:
        variables = ps_job.variables(role, 0, scheduler[0])
        if any(not is_local(each.host) for each in assignments):  # each host finds out its address by itself
            del variables[NODE_HOST_VARIABLE]
        return {**common, **own, **variables, SECRET_VARIABLE: secret.hex()}

    spec = ProcessSpec(None, (), environ_of(PsRole.SCHEDULER, {}), list_ps_processes(1, replace(servers, num=1))[-1])
    of_servers = servers.command or (options.ssh.python, *default_ps_command(PsRole.SERVER)[1:])
    workers = replace(
        options, command=(*_TASK_ID_WRAPPER, *options.command), hosts=_hosts(assignments, lambda each: len(each.ranks))
    )
    server_options = replace(
        options,
        command=(*_TASK_ID_WRAPPER, *of_servers),
        num_ranks=servers.num,
        hosts=_hosts(assignments, lambda each: sum(process.role is PsRole.SERVER for process in each.ps_processes)),
    )
    calls = [
        MpirunCall(workers, environ_of(PsRole.WORKER, servers.worker_environ)),
        MpirunCall(server_options, environ_of(PsRole.SERVER, servers.environ)),
    ]
    return calls, (servers.command or default_ps_command(PsRole.SCHEDULER), spec)


def _hosts(assignments: Sequence[HostAssignment], count: Callable[[HostAssignment], int]) -> tuple[HostInfo, ...]:
    return tuple(HostInfo(each.host, count(each)) for each in assignments if count(each))
