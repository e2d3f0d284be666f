"""Jobs that an MPI's own launcher starts: which one there is, its command line, and keeping it.

`mpirun` starts the ranks, here and elsewhere; they find each other over MPI (`reigen.cluster.mpi_share`). So nothing of
the job's but names is on its command line, which everybody on the machine can read: variables go by their names, and
the secret is made by rank 0 when all are there.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from reigen.cluster.environ import PREFIXED_VARIABLE, RENDEZVOUS_VARIABLE, SECRET_VARIABLE
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError, LaunchError
from reigen.launch.guard import STOP_SIGNALS, guarded
from reigen.launch.hosts import Host, Seats, is_this_host
from reigen.launch.job import Finish
from reigen.launch.local import OF_A_RANK, START_TIMEOUT_VARIABLE, TERMINAL_VARIABLE, Place, cores_here
from reigen.launch.mpi_servers import calls
from reigen.launch.muster import own_address
from reigen.launch.options import Listener, Options, complain
from reigen.launch.processes import signal_name
from reigen.launch.servants import servants_of
from reigen.launch.spawn import hold_port
from reigen.launch.supervise import Supervisor
from reigen.launch.travel import leaving
from reigen.wire.auth import SECRET_BYTES

_VERSION_SECONDS = 20.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Variables of launchers: those of this one are the ranks' business, others would be another job's.
_OF_LAUNCHERS = re.compile(r"(OMPI|OPAL|PMIX?|PRTE|HYDI?|MPI_LOCAL)[A-Z_]*_.*|PMI_.*")
_OF_A_JOB = OF_A_RANK | {RENDEZVOUS_VARIABLE, SECRET_VARIABLE, TERMINAL_VARIABLE, PREFIXED_VARIABLE}


class Kind(Enum):
    """Families of launchers, by the options that they take."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    HYDRA = "MPICH or Intel MPI"


@dataclass(frozen=True, slots=True)
class Mpirun:
    """A launcher that was found.

    Attributes:
        path: the program.
        kind: its family.
        reason: why it was chosen.
    """

    path: str
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the command line depends on besides the options.

    Attributes:
        is_root: this user is root.
        num_cores: how many processors there are here.
        strangers: there are hosts besides this one.
        variables: names of those that go to other hosts, sorted.
    """

    is_root: bool
    num_cores: int
    strangers: bool
    variables: tuple[str, ...]


def recognised(version: str) -> tuple[Kind | None, str]:
    """``(family, why)`` of a launcher that says this when it is asked for its version.

    Example:
        >>> recognised("mpirun (Open MPI) 5.0.9")
        (<Kind.OPEN_MPI_5: 'Open MPI 5'>, 'mpirun (Open MPI) 5.0.9')
    """
    first = version.strip().partition("\n")[0].strip()
    if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", version):
        return (Kind.OPEN_MPI_5 if int(match[1]) >= 5 else Kind.OPEN_MPI_4), first
    if "IBM Spectrum MPI" in version:
        return Kind.OPEN_MPI_4, first
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return Kind.HYDRA, first
    return None, first


def command_of(mpirun: Mpirun, options: Options, there: Circumstances) -> list[str]:
    """The command line that starts a job.

    Raises:
        ConfigError: this launcher cannot do what is asked for.
    """
    if options.sync_directory is not None:
        raise ConfigError("--sync-dst-dir: mpirun copies nothing; use --launcher ssh, or a directory that all share")
    if options.luggage is not None:
        raise ConfigError("functions cannot be run by mpirun; use the ssh launcher")
    make = _hydra if mpirun.kind is Kind.HYDRA else _open_mpi
    return [mpirun.path, *make(mpirun, options, there), *options.mpi_args, *options.command]


def _open_mpi(mpirun: Mpirun, options: Options, there: Circumstances) -> list[str]:
    is_5 = mpirun.kind is Kind.OPEN_MPI_5
    hosts = options.hosts or (Host("localhost", options.num_ranks),)
    line = ["--allow-run-as-root"] if there.is_root else []
    line += ["-np", str(options.num_ranks), "-H", ",".join(f"{_bracketed(host.name)}:{host.slots}" for host in hosts)]
    line += options.binding_args or ("--bind-to", "core" if options.bind == "cores" else "none", "--map-by", "slot")
    if options.prefix:
        line.append("--tag-output")
    if options.timestamps:
        line.append("--timestamp-output")
    if options.output_directory is not None:
        line += ["--output-filename", str(options.output_directory)]
    if options.num_ranks > there.num_cores:  # who waits shall not keep a processor from who works
        line += ["--mca", "mpi_yield_when_idle", "1"]
    if options.network.interfaces:
        names = ",".join(options.network.interfaces)
        line += ["--mca", "btl_tcp_if_include", names]
        line += ["--prtemca", "prte_if_include", names] if is_5 else ["--mca", "oob_tcp_if_include", names]
    if there.strangers:
        agent = _words(options.ssh.base())
        line += ["--prtemca", "plm_ssh_agent", agent] if is_5 else ["--mca", "plm_rsh_agent", agent]
        prefix = str(Path(mpirun.path).parent.parent)
        line += ["--prefix", prefix] if prefix not in {"/usr", "/"} else []
    for name in there.variables:
        line += ["-x", name]
    return line


def _hydra(mpirun: Mpirun, options: Options, there: Circumstances) -> list[str]:
    if options.output_directory is not None:
        raise ConfigError(f"--output-filename: {mpirun.kind.value} cannot keep what ranks print and show it, too")
    if options.timestamps:
        raise ConfigError(f"--prefix-output-with-timestamp: {mpirun.kind.value} does not tell the time")
    line = ["-np", str(options.num_ranks)]
    if options.hosts:
        line += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in options.hosts)]
    line += options.binding_args or ("-bind-to", "core" if options.bind == "cores" else "none")
    if options.prefix:
        line.append("-prepend-rank")
    if options.network.interfaces:
        if len(options.network.interfaces) > 1:
            raise ConfigError(f"--network-interfaces: {mpirun.kind.value} takes one")
        line += ["-iface", options.network.interfaces[0]]
    if there.strangers:
        line += ["-launcher", "ssh", "-launcher-exec", options.ssh.command[0]]
    if there.variables:
        line += ["-genvlist", ",".join(there.variables)]
    return line


def environ_of(
    kind: Kind, options: Options, environ: Mapping[str, str], *, is_terminal: bool, num_cores: int
) -> dict[str, str]:
    """The environment of `mpirun`, which the ranks of this host inherit."""
    made = {name: text for name, text in environ.items() if name not in _OF_A_JOB}
    if kind is Kind.HYDRA:  # Open MPI gives its ranks a terminal, so that Python writes line by line
        made.setdefault("PYTHONUNBUFFERED", "1")
        made["HYDRA_LAUNCHER_EXTRA_ARGS"] = _words(options.ssh.base()[1:])
    made.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // _num_here(options))))
    if options.start_timeout_seconds is not None:
        made[START_TIMEOUT_VARIABLE] = f"{options.start_timeout_seconds:g}"
    facts = {TERMINAL_VARIABLE: is_terminal, PREFIXED_VARIABLE: options.prefix}
    made |= {name: "1" for name, holds in facts.items() if holds}
    return made


def travelling(environ: Mapping[str, str], exports: Sequence[str]) -> tuple[str, ...]:
    """Names of the variables that go to other hosts, sorted."""
    names = (name for name in leaving(environ, exports) if _NAME.fullmatch(name))
    return tuple(sorted(name for name in names if name in exports or not _OF_LAUNCHERS.fullmatch(name)))


def _num_here(options: Options) -> int:
    """About how many ranks this host will have."""
    here = [host.slots for host in options.hosts if is_this_host(host.name)]
    return max(1, min(options.num_ranks, sum(here) if options.hosts else options.num_ranks))


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _words(words: Sequence[str]) -> str:
    """Words as one, which mpirun cuts at blanks."""
    spaced = next((word for word in words if re.search(r"\s", word)), None)
    if spaced is not None:
        raise ConfigError(f"mpirun cannot call ssh with an option that holds a blank: {spaced!r}")
    return " ".join(words)


# ---------------------------------------------------------------------------------------------- what is done


def find_mpirun(environ: Mapping[str, str]) -> Mpirun:
    """The launcher beside this Python, or else the first in PATH.

    Raises:
        LaunchError: there is none, or it is of no known family.
    """
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun", path=environ.get("PATH"))
    if path is None:
        raise LaunchError("there is no mpirun: pip install 'reigen[mpi]', or install the system's MPI", 127)
    try:
        asked = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version: {error}", 126) from error
    kind, version = recognised((asked.stdout + asked.stderr).decode(errors="replace"))
    if kind is None:
        raise LaunchError(f"{path} is no mpirun of Open MPI, MPICH or Intel MPI; it says: {version or 'nothing'}", 126)
    where = "beside this Python" if path == str(beside) else "in PATH"
    return Mpirun(path, kind, f"{path} ({version}), found {where}")


def run_mpi(options: Options, environ: Mapping[str, str], listener: Listener | None = None) -> int:
    """Run a job by mpirun to its end; returns mpirun's exit code. Call it before any thread is started.

    Nothing that was started here is left when this returns; what is elsewhere is mpirun's to end.

    Raises:
        LaunchError: there is no mpirun, or the kernel refused a process.
        ConfigError: it cannot do what is asked for.
    """
    mpirun = find_mpirun(environ)
    told = listener or Listener()
    if told.finished is None:
        told = replace(told, finished=partial(_report, mpirun.kind))
    plain = replace(options, prefix=False, timestamps=False, verbose=False, output_directory=None)
    try:
        with hold_port() as holder:  # for the scheduler, if there is one
            processes = _processes(mpirun, options, environ, holder.getsockname()[1])
            # mpirun ends all that it has started when one of them dies: a server cannot be started again
            servers = None if options.servers is None else replace(options.servers, num=1, environ={})
            alone = replace(plain, num_ranks=1, servers=servers)
            return guarded(partial(_keep, alone, processes, told), told.complain)
    except OSError as error:
        raise LaunchError(f"cannot start: {error}") from error


def _processes(
    mpirun: Mpirun, options: Options, environ: Mapping[str, str], port: int
) -> list[tuple[Sequence[str], Place]]:
    """What this host starts: command and place of mpirun, or of two of them and the scheduler."""
    topology = Topology.alone()
    if options.servers is None:
        command, variables = _command(mpirun, options, environ)
        return [(command, Place(topology, (), variables))]
    names = [*(host.name for host in options.hosts), *options.servers.hosts]
    stranger = next((name for name in names if not is_this_host(name)), None)
    address = "127.0.0.1" if stranger is None else own_address(options.network.interfaces, stranger, ())[0]
    secret = secrets.token_bytes(SECRET_BYTES)
    (workers, servers), scheduler = calls(options, environ, (address, port), secret, is_this_host)
    processes: list[tuple[Sequence[str], Place]] = []
    for call, servant in ((workers, None), (servers, servants_of(1, options.servers)[0])):
        command, variables = _command(mpirun, call.options, call.environ, (SECRET_VARIABLE,))
        processes.append((command, Place(topology if servant is None else None, (), variables, servant)))
    return [*processes, scheduler]


def _command(
    mpirun: Mpirun, options: Options, environ: Mapping[str, str], kept: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line of one mpirun, and its environment.

    Args:
        mpirun: the program.
        options: what it is to start.
        environ: what that inherits.
        kept: variables that it inherits although they are usually another job's.
    """
    num_cores = max(1, cores_here().num_usable)
    variables = environ_of(mpirun.kind, options, environ, is_terminal=sys.stdout.isatty(), num_cores=num_cores)
    variables |= {name: environ[name] for name in kept}
    strangers = any(not is_this_host(host.name) for host in options.hosts)
    names = travelling(variables, options.exports) if strangers else ()
    command = command_of(mpirun, options, Circumstances(os.geteuid() == 0, num_cores, strangers, names))
    if options.verbose:
        complain(f"{mpirun.reason}: {' '.join(command)}")
    return command, variables


def _keep(options: Options, processes: Sequence[tuple[Sequence[str], Place]], listener: Listener, lifeline: int) -> int:
    servants = tuple(place.servant for _, place in processes if place.servant is not None)
    seats = [Seats("localhost", True, (Topology.alone(),), servants)]
    with Supervisor(options, seats, lifeline, listener, {}) as supervisor:
        supervisor.start_all(processes)
        supervisor.is_mustering = False
        return supervisor.run()


def _report(kind: Kind, finish: Finish) -> None:
    """The last words: mpirun's own stand above them."""
    if finish.failure is not None:
        code = finish.failure.exit_code
        how = f"with exit code {code}" if code > 0 else f"by {signal_name(-code)}"
        who = (f"mpirun ({kind.value})", f"mpirun ({kind.value}) of the servers", "the scheduler")[finish.failure.rank]
        complain(f"{who} ended {how}")
    elif finish.signum in STOP_SIGNALS:
        complain(f"stopped by {signal_name(signal.Signals(finish.signum))}")
