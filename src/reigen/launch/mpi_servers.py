"""A job with parameter servers that mpirun starts: one for the workers, one for the servers. The scheduler is here.

What they have to know goes by the environment, by name on the command line: mpirun carries the values to other hosts
over connections of its own, which nothing but the site protects. Their numbers are the ranks that mpirun gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reigen.cluster.environ import SECRET_VARIABLE
from reigen.launch.hosts import Host, Seats, assign_with_servers
from reigen.launch.local import OF_A_RANK, Place, own_command
from reigen.launch.options import Options
from reigen.launch.servants import NODE_HOST_VARIABLE, Household, Role, servants_of

#: The name of a process is its rank in its mpirun: Open MPI's words, and everybody else's.
_NUMBERED = ("sh", "-c", 'export DMLC_TASK_ID="${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"; exec "$@"', "sh")


@dataclass(frozen=True, slots=True)
class Call:
    """One mpirun.

    Attributes:
        options: what it starts, and where.
        environ: of what it starts. Not shown in ``repr``: the job's secret is in it.
    """

    options: Options
    environ: Mapping[str, str] = field(repr=False)


def calls(
    options: Options,
    environ: Mapping[str, str],
    scheduler: tuple[str, int],
    secret: bytes,
    is_here: Callable[[str], bool],
) -> tuple[list[Call], tuple[Sequence[str], Place]]:
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
    hosts = options.hosts or (Host("localhost", options.num_ranks),)
    seats = assign_with_servers(hosts, options.num_ranks, servers, is_here)
    household = Household(*scheduler, options.num_ranks, servers.num)
    common = {name: text for name, text in environ.items() if name not in OF_A_RANK}

    def told(role: Role, own: Mapping[str, str]) -> dict[str, str]:
        variables = household.variables(role, 0, scheduler[0])
        if any(not is_here(each.host) for each in seats):  # each host finds out its address by itself
            del variables[NODE_HOST_VARIABLE]
        return {**common, **own, **variables, SECRET_VARIABLE: secret.hex()}

    place = Place(None, (), told(Role.SCHEDULER, {}), servants_of(1, replace(servers, num=1))[-1])
    of_servers = servers.command or (options.ssh.python, *own_command(Role.SERVER)[1:])
    workers = replace(
        options, command=(*_NUMBERED, *options.command), hosts=_hosts(seats, lambda each: len(each.ranks))
    )
    others = replace(
        options,
        command=(*_NUMBERED, *of_servers),
        num_ranks=servers.num,
        hosts=_hosts(seats, lambda each: sum(servant.role is Role.SERVER for servant in each.servants)),
    )
    both = [Call(workers, told(Role.WORKER, servers.worker_environ)), Call(others, told(Role.SERVER, servers.environ))]
    return both, (servers.command or own_command(Role.SCHEDULER), place)


def _hosts(seats: Sequence[Seats], count: Callable[[Seats], int]) -> tuple[Host, ...]:
    return tuple(Host(each.host, count(each)) for each in seats if count(each))
