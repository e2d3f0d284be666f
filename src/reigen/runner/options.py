"""Settings of `reigen.run` from its many arguments. Decides and explains; no I/O but a host file."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import msgspec

from reigen.errors import ConfigError
from reigen.launch.base import find_launcher
from reigen.launch.elastic.options import ElasticOptions, ElasticRequest, check_elastic_hosts, resolve_elastic
from reigen.launch.engines import choose_launcher_in_engine
from reigen.launch.hosts import HostInfo, check_slots, resolve_hosts
from reigen.launch.metrics.options import DashboardAddress, MetricsAddress
from reigen.launch.ssh.command import SshOptions

#: Accepted for the sake of existing calls.
_WITHOUT_EFFECT = ("use_gloo", "use_mpi", "mpi_args", "disable_cache")
#: The same in a job that is not elastic.
_ELASTIC_ONLY = ("slots", "reset_limit", "cooldown_range", "eject_stragglers", "spares")


class RunSettings(msgspec.Struct, frozen=True):
    """Settings of a job, with all defaults filled in, as the launcher's process gets them. Nothing in it is secret.

    Attributes:
        executable: the Python of the ranks, or None for this one.
        network_interfaces: those that may be used, with commas between them; None: as in the environment.
        elastic: what makes the job elastic; None: it is not.
        num_servers: parameter servers that run beside the ranks.
        replicate_servers: 2: what a server holds is in the memory of another one, too; None: as in the environment.
        max_servers: of an elastic job: the greatest number of server processes; None: they stay as many.
        metrics_port, dashboard: addresses at which they are served; None: nowhere.
        metrics_file: where metrics are written; None: nowhere.
    """

    num_ranks: int
    start_timeout_seconds: float | None
    output_directory: str | None
    verbose: bool
    executable: str | None
    hosts: tuple[HostInfo, ...]
    ssh_port: int | None
    ssh_identity_file: str | None
    network_interfaces: str | None
    launcher: str
    prefix: bool = True
    timestamps: bool = False
    grace_seconds: float = 5.0
    elastic: ElasticOptions | None = None
    num_servers: int = 0
    replicate_servers: int | None = None
    max_servers: int | None = None
    metrics_port: str | None = None
    metrics_file: str | None = None
    dashboard: str | None = None


def resolve_arguments(arguments: Mapping[str, Any]) -> tuple[RunSettings, str]:
    """Resolve the arguments of ``run`` but the function's own; returns a warning, too, about those without effect.

    Raises:
        ConfigError: an argument makes no sense, or they contradict each other.
    """
    directory = arguments["output_filename"]
    request = _elastic_request(arguments)
    elastic = resolve_elastic(request)
    num_ranks = request.num_ranks or 1
    if arguments["hosts"] is not None and arguments["hostfile"] is not None:
        raise ConfigError("hosts and hostfile are two ways to say the same thing: give one of them")
    has_hosts = arguments["hosts"] is not None or arguments["hostfile"] is not None
    choice = choose_launcher_in_engine(arguments["launcher"], os.environ, has_hosts=has_hosts)
    launcher, hosts = choice.launcher, []
    if not choice.uses_hosts_of_engine:
        hosts = resolve_hosts(arguments["hosts"], arguments["hostfile"], request.num_places)
        if elastic is None:
            check_slots(hosts, num_ranks)
        else:
            hosts = [] if elastic.discovery is not None else hosts
            check_elastic_hosts(elastic, hosts, as_horovod=False)
    elif elastic is not None and choice.engine_job is not None:
        num_ranks = choice.engine_job.num_slots  # all places may be used, though not at a time
    SshOptions(port=arguments["ssh_port"])  # raises
    find_launcher(launcher)  # raises
    timeout = arguments["start_timeout"]
    if timeout is not None and not 0 < timeout < 1e9:
        raise ConfigError(f"start_timeout must be a number of seconds greater than 0, not {timeout!r}")
    metrics = _check_metrics(arguments, launcher)
    settings = RunSettings(
        num_ranks,
        timeout,
        None if directory is None else os.fspath(directory),
        bool(arguments["verbose"]),
        arguments["executable"],
        tuple(hosts),
        arguments["ssh_port"],
        arguments["ssh_identity_file"],
        _join_interfaces(arguments["network_interface"], arguments["network_interfaces"]),
        launcher,
        elastic=elastic,
        num_servers=check_num_servers(arguments["num_servers"]),
        replicate_servers=_check_replicas(arguments["replicate_servers"], arguments["num_servers"]),
        max_servers=_check_max_servers(arguments, is_elastic=elastic is not None),
        metrics_port=metrics["metrics_port"],
        metrics_file=metrics["metrics_file"],
        dashboard=metrics["dashboard"],
    )
    unused = _WITHOUT_EFFECT + (_ELASTIC_ONLY if elastic is None else ())
    without_effect = [name for name in unused if arguments[name] not in (None, False)]
    return settings, f"no effect: {', '.join(without_effect)}" if without_effect else ""


def _elastic_request(arguments: Mapping[str, Any]) -> ElasticRequest:
    """Collect what makes a job elastic."""
    names = ("min_num_proc", "max_num_proc")
    least, most = (None if arguments[name] is None else _num_ranks(arguments[name], name) for name in names)
    num_ranks, discovery = _num_ranks(arguments["num_proc"]), arguments["host_discovery_script"]
    if least is not None and num_ranks == 1:  # its default; Horovod's callers leave it out
        num_ranks = most or least
    return ElasticRequest(
        num_ranks,
        least,
        most,
        discovery,
        arguments["slots"],
        start_timeout_seconds=arguments["start_timeout"],
        reset_limit=arguments["reset_limit"],
        cooldown_range=arguments["cooldown_range"],
        spares=arguments["spares"],
        eject_stragglers=arguments["eject_stragglers"],
        names=("num_proc", *names, "cooldown_range"),
        straggler_name="eject_stragglers",
        spares_name="spares",
    )


def _join_interfaces(*spellings: object) -> str | None:
    names: list[str] = []
    for value in spellings:
        if isinstance(value, str):
            names += value.split(",")
        elif isinstance(value, Sequence):
            names += map(str, value)
    return ",".join(names) or None


def _check_replicas(replicas: int | None, num_servers: int) -> int | None:
    if replicas not in {None, 1, 2} or (replicas == 2 and num_servers < 2):
        raise ConfigError(
            f"replicate_servers={replicas!r} with num_servers={num_servers}: 2 has the memory of another server hold a "
            "copy of each, and needs two or more; 1 is the default"
        )
    return replicas


def _check_max_servers(arguments: Mapping[str, Any], *, is_elastic: bool) -> int | None:
    given, num_servers = arguments["max_servers"], check_num_servers(arguments["num_servers"])
    if given is None:
        return None
    try:
        most = operator.index(given)
    except TypeError:
        raise ConfigError(f"max_servers must be a number of server processes, not {given!r}") from None
    if not is_elastic or not num_servers or most < max(num_servers, 2):
        raise ConfigError(
            f"max_servers={given!r} with num_servers={num_servers}: it is for elastic jobs (min_num_proc) with "
            "servers, and at least num_servers, and 2"
        )
    if arguments["replicate_servers"] == 2:
        raise ConfigError("max_servers and replicate_servers=2: servers that move have no copies in others' memory")
    return most


def _check_metrics(arguments: Mapping[str, Any], launcher: str) -> dict[str, str | None]:
    """Return the arguments about metrics as the launcher gets them; raise ConfigError."""
    port, file, dashboard = (arguments[name] for name in ("metrics_port", "metrics_file", "dashboard"))
    found = {
        "metrics_port": None if port is None else str(port),
        "metrics_file": None if file is None else os.fspath(file),
        "dashboard": None if dashboard is None or dashboard is False else "" if dashboard is True else str(dashboard),
    }
    if launcher == "mpi" and any(each is not None for each in found.values()):
        raise ConfigError(f"{', '.join(found)}: mpirun starts these ranks, which know no launcher")
    if found["metrics_port"] is not None:
        MetricsAddress.parse(found["metrics_port"], os.environ)
    if found["dashboard"] is not None:
        DashboardAddress.parse(found["dashboard"], os.environ, "dashboard")
    return found


def check_num_servers(num_servers: SupportsIndex, is_elastic: bool = False) -> int:
    """Return the number of parameter servers; raise ConfigError where it is none.

    ``is_elastic``: in an elastic job that an engine's driver runs, which cannot have any.
    """
    try:
        number = operator.index(num_servers)
    except TypeError:
        raise ConfigError(f"num_servers must be a number of servers, not {num_servers!r}") from None
    if number < 0:
        raise ConfigError(f"num_servers must be at least 0, not {number}")
    if number and is_elastic:
        raise ConfigError("num_servers: an elastic job that an engine's driver runs has no parameter servers")
    return number


def _num_ranks(num_proc: SupportsIndex, name: str = "num_proc") -> int:
    try:
        num_ranks = operator.index(num_proc)
    except TypeError:
        raise ConfigError(f"{name} must be a number of processes, not {num_proc!r}") from None
    if num_ranks < 1:
        raise ConfigError(f"{name} must be at least 1, not {num_ranks}")
    return num_ranks
