"""Launcher whose engine is mpirun: it starts and ends the ranks itself, on all hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reigen.cluster.environ import SECRET_VARIABLE
from reigen.cluster.metrics import METRICS_SECRET_VARIABLE, METRICS_SERVICE_VARIABLE
from reigen.cluster.topology import Topology
from reigen.launch.base import JobPlan
from reigen.launch.hosts import HostAssignment, HostInfo, assign_ranks_and_servers, choose_own_address, is_this_host
from reigen.launch.job_state import FinishJob
from reigen.launch.local_plan import PER_RANK_VARIABLES, ProcessSpec, default_ps_command, detect_cpus
from reigen.launch.metrics.service import report_environ
from reigen.launch.mpi.mpirun import (
    MpirunContext,
    MpirunFamily,
    exported_names,
    find_mpirun,
    mpirun_command,
    mpirun_environ,
)
from reigen.launch.options import LaunchOptions, complain
from reigen.launch.ps_processes import NODE_HOST_VARIABLE, PsJobSpec, PsProcess, PsRole, list_ps_processes
from reigen.launch.supervision.process_tree import signal_name
from reigen.launch.supervision.spawn import reserve_port
from reigen.launch.supervision.watchdog import STOP_SIGNALS
from reigen.net.auth import SECRET_BYTES

_LOOPBACK = "127.0.0.1"
#: The number of a process is its rank in its mpirun: by Open MPI's variable, or by all others'.
_TASK_ID_WRAPPER = ("sh", "-c", 'export DMLC_TASK_ID="${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"; exec "$@"', "sh")


class MpiLauncher:
    """Processes of mpirun on this host: one, or, with parameter servers, two of them and the scheduler.

    Their output is passed on as it is, for mpirun itself puts ranks and times before the lines.

    Raises:
        LaunchError: there is no mpirun.
        ConfigError: it cannot do what is asked for.
    """

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self._mpirun = find_mpirun(environ)
        environ = report_environ(options.metrics, environ)
        is_called = options.servers is not None or options.metrics.is_wanted  # mpirun knows hosts that nobody else does
        self._address = _choose_address(options) if is_called else _LOOPBACK
        # mpirun ends all that it has started when one of them dies: a server cannot be started again
        servers = None if options.servers is None else replace(options.servers, num=1, environ={})
        self.options = replace(
            options, num_ranks=1, servers=servers, prefix=False, timestamps=False, verbose=False, output_directory=None
        )
        # its own would be /tmp/ompi.PID: one that is killed leaves it, and the next one with its pid does not start
        uses_directory = self._mpirun.kind is MpirunFamily.OPEN_MPI_5
        self._session_directory = tempfile.mkdtemp(prefix="reigen-mpirun-") if uses_directory else ""
        is_held = options.servers is not None and options.servers.uses_reigen_scheduler
        self._port_holder = reserve_port(for_reigen=is_held)  # for the scheduler, if there is one
        try:
            self._processes = self._plan_processes(options, environ, self._port_holder.getsockname()[1])
        except BaseException:
            self.close()
            raise

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan: the hosts are mpirun's to reach."""
        ps_processes = tuple(spec.ps_process for spec in self._processes if spec.ps_process is not None)
        own = HostAssignment("localhost", True, (Topology.alone(),), ps_processes)
        return JobPlan([own], processes=self._processes, describe_end=self._describe_end, report_address=self._address)

    def close(self) -> tuple[str, ...]:
        """Release the scheduler's port; mpirun has ended, and with it all that it has started."""
        self._port_holder.close()
        if self._session_directory:
            shutil.rmtree(self._session_directory, ignore_errors=True)
        return ()

    def _plan_processes(self, options: LaunchOptions, environ: Mapping[str, str], port: int) -> list[ProcessSpec]:
        """Plan the processes of this host: mpirun, or two of them and the scheduler."""
        if options.servers is None:
            return [self._plan_mpirun(options, environ)]
        secret = secrets.token_bytes(SECRET_BYTES)
        (workers, servers), scheduler = plan_mpirun_calls(options, environ, (self._address, port), secret, is_this_host)
        calls = ((workers, None), (servers, list_ps_processes(1, options.servers)[0]))
        kept = (SECRET_VARIABLE,)
        return [*(self._plan_mpirun(call.options, call.environ, process, kept) for call, process in calls), scheduler]

    def _plan_mpirun(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        process: PsProcess | None = None,
        kept: Sequence[str] = (),
    ) -> ProcessSpec:
        """Plan one mpirun, as the job's rank or in the place of ``process``; ``kept`` variables pass to it."""
        num_cores = max(1, detect_cpus().num_usable)
        variables = mpirun_environ(
            self._mpirun.kind, options, environ, is_terminal=sys.stdout.isatty(), num_cores=num_cores
        )
        variables |= {name: environ[name] for name in kept}
        has_remote_hosts = any(not is_this_host(host.name) for host in options.hosts)
        reports = (METRICS_SERVICE_VARIABLE, METRICS_SECRET_VARIABLE) if options.metrics.is_wanted else ()
        names = exported_names({**variables, **dict.fromkeys(reports, "")}, options.exports) if has_remote_hosts else ()
        command = mpirun_command(
            self._mpirun,
            options,
            MpirunContext(os.geteuid() == 0, num_cores, has_remote_hosts, names, self._session_directory),
        )
        if options.verbose:
            complain(f"{self._mpirun.reason}: {' '.join(command)}")
        topology = Topology.alone() if process is None else None
        return ProcessSpec(topology, (), variables, process, command=command)

    def _describe_end(self, finish: FinishJob) -> str:
        """Name the program that has ended, and how: mpirun's own message about the rank stands above."""
        name = f"mpirun ({self._mpirun.kind.value})"
        if finish.failure is not None:
            code = finish.failure.exit_code
            exit_text = f"with exit code {code}" if code > 0 else f"by {signal_name(-code)}"
            return f"{(name, f'{name} of the servers', 'the scheduler')[finish.failure.rank]} ended {exit_text}"
        if finish.signum in STOP_SIGNALS:
            return f"stopped by {signal_name(signal.Signals(finish.signum))}"
        return ""


def _choose_address(options: LaunchOptions) -> str:
    """Choose the address at which the job's processes find this one."""
    names = [*(host.name for host in options.hosts), *(options.servers.hosts if options.servers is not None else ())]
    remote = next((name for name in names if not is_this_host(name)), None)
    return _LOOPBACK if remote is None else choose_own_address(options.network.interfaces, remote, ())[0]


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
) -> tuple[list[MpirunCall], ProcessSpec]:
    """Plan the mpirun of the workers, that of the servers, and the scheduler, which is local.

    Variables go by the environment, by name on the command line: mpirun carries the values to other hosts over
    connections of its own, which nothing but the site protects. The processes' numbers are the ranks that mpirun gives.
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

    process = list_ps_processes(1, replace(servers, num=1))[-1]
    command = servers.command or default_ps_command(PsRole.SCHEDULER)
    spec = ProcessSpec(None, (), environ_of(PsRole.SCHEDULER, {}), process, command=command)
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
    return calls, spec


def _hosts(assignments: Sequence[HostAssignment], count: Callable[[HostAssignment], int]) -> tuple[HostInfo, ...]:
    return tuple(HostInfo(each.host, count(each)) for each in assignments if count(each))
