"""A job with parameter servers that mpirun starts: one for the workers, one for the servers. The scheduler is here.

What they have to know goes by the environment, by name on the command line: mpirun carries the values to other hosts
over connections of its own, which nothing but the site protects. Their numbers are the ranks that mpirun gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reigen.cluster.environ import SECRET_VARIABLE
from reigen.launch.hosts import HostAssignment, HostInfo, assign_ranks_and_servers
from reigen.launch.local_plan import PER_RANK_VARIABLES, ProcessSpec, default_ps_command
from reigen.launch.options import LaunchOptions
from reigen.launch.ps_processes import NODE_HOST_VARIABLE, PsJobSpec, PsRole, list_ps_processes

#: The name of a process is its rank in its mpirun: Open MPI's words, and everybody else's.
_TASK_ID_WRAPPER = ("sh", "-c", 'export DMLC_TASK_ID="${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"; exec "$@"', "sh")


@dataclass(frozen=True, slots=True)
class MpirunCall:
    """One mpirun.

    Attributes:
        options: what it starts, and where.
        environ: of what it starts. Not shown in ``repr``: the job's secret is in it.
    """

    options: LaunchOptions
    environ: Mapping[str, str] = field(repr=False)


def plan_mpirun_calls(
    options: LaunchOptions,
    environ: Mapping[str, str],
    scheduler: tuple[str, int],
    secret: bytes,
    is_here: Callable[[str], bool],
) -> tuple[list[MpirunCall], tuple[Sequence[str], ProcessSpec]]:
    """What is to be started: the mpirun of the workers, that of the servers; and the scheduler, as command and place.

    Args:
        options: of the job; it has servers.
        environ: what processes inherit.
        scheduler: address and port that are its.
        secret: the job's.
        is_here: whether a name is this host's.

    Raises:
        ConfigError: the hosts have too few slots.
    """
    servers = options.servers
    assert servers is not None, "the caller has looked"
    hosts = options.hosts or (HostInfo("localhost", options.num_ranks),)
    assignments = assign_ranks_and_servers(hosts, options.num_ranks, servers, is_here)
    ps_job = PsJobSpec(*scheduler, options.num_ranks, servers.num, servers.uses_reigen_scheduler)
    common = {name: text for name, text in environ.items() if name not in PER_RANK_VARIABLES}

    def told(role: PsRole, own: Mapping[str, str]) -> dict[str, str]:
        variables = ps_job.variables(role, 0, scheduler[0])
        if any(not is_here(each.host) for each in assignments):  # each host finds out its address by itself
            del variables[NODE_HOST_VARIABLE]
        return {**common, **own, **variables, SECRET_VARIABLE: secret.hex()}

    place = ProcessSpec(None, (), told(PsRole.SCHEDULER, {}), list_ps_processes(1, replace(servers, num=1))[-1])
    of_servers = servers.command or (options.ssh.python, *default_ps_command(PsRole.SERVER)[1:])
    workers = replace(
        options, command=(*_TASK_ID_WRAPPER, *options.command), hosts=_hosts(assignments, lambda each: len(each.ranks))
    )
    others = replace(
        options,
        command=(*_TASK_ID_WRAPPER, *of_servers),
        num_ranks=servers.num,
        hosts=_hosts(assignments, lambda each: sum(servant.role is PsRole.SERVER for servant in each.servants)),
    )
    both = [
        MpirunCall(workers, told(PsRole.WORKER, servers.worker_environ)),
        MpirunCall(others, told(PsRole.SERVER, servers.environ)),
    ]
    return both, (servers.command or default_ps_command(PsRole.SCHEDULER), place)


def _hosts(assignments: Sequence[HostAssignment], count: Callable[[HostAssignment], int]) -> tuple[HostInfo, ...]:
    return tuple(HostInfo(each.host, count(each)) for each in assignments if count(each))
