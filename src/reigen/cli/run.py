"""`reigen run -np N COMMAND ...`: the same command in N processes that form one job."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from reigen.cli.run_options import parser, ssh_of
from reigen.compat import as_horovod, as_mxnet
from reigen.errors import ConfigError, LaunchError
from reigen.launch.horovodrun import Translation, by_mpirun, translate
from reigen.launch.hosts import Host, check_fixed_size, hosts_of, is_this_host, parse_hosts
from reigen.launch.mpi import run_mpi
from reigen.launch.network import Network
from reigen.launch.options import Options, complain
from reigen.launch.servants import Servers
from reigen.launch.supervise import run_job
from reigen.launch.travel import exported


def main(arguments: Sequence[str]) -> int:
    """Run a job; returns the exit code."""
    made = parser()
    chosen = made.parse_args(arguments)
    if chosen.check_build:
        from reigen.cli.check import build_report

        print(build_report())
        return 0
    if chosen.num_ranks is None and chosen.as_mxnet and os.environ.get("DMLC_ROLE"):
        return _become(chosen)
    if chosen.num_ranks is None:
        made.error("the following arguments are required: -np/--num-proc")
    try:
        document = _document(chosen.config_file)
        translation = translate(vars(chosen), document, os.environ)
        exports = exported(os.environ, chosen.exports)
        environ = {**os.environ, **translation.variables, **exports}
        options = _options(chosen, environ, tuple(exports), translation.wishes)
    except ConfigError as error:
        made.error(str(error))
    _tell(translation)
    launch = run_mpi if by_mpirun(vars(chosen), document) else run_job
    try:
        return launch(options, _disguised(environ, chosen))
    except ConfigError as error:
        made.error(str(error))
    except LaunchError as error:
        complain(str(error))
        return error.exit_code


def _disguised(environ: Mapping[str, str], chosen: argparse.Namespace) -> Mapping[str, str]:
    """What ``--as-horovod`` and ``--as-mxnet`` make of the environment."""
    environ = as_horovod(environ) if chosen.as_horovod else environ
    return as_mxnet(environ) if chosen.as_mxnet else environ


def _become(chosen: argparse.Namespace) -> int:
    """Without ``-np``, where somebody has set DMLC_ROLE by hand and starts each process himself: the command itself."""
    command = _command(chosen)
    try:
        os.execvpe(command[0], command, _disguised(os.environ, chosen))
    except (OSError, IndexError) as error:
        complain(f"cannot run {' '.join(command) or 'nothing'}: {error}")
        return 127


def _command(chosen: argparse.Namespace) -> tuple[str, ...]:
    return tuple(chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command)


def _options(
    chosen: argparse.Namespace, environ: Mapping[str, str], exports: tuple[str, ...], wishes: Mapping[str, str]
) -> Options:
    bounds = {"--min-np": chosen.min_ranks, "--max-np": chosen.max_ranks}
    check_fixed_size(chosen.num_ranks, bounds, "--host-discovery-script" if chosen.host_discovery_script else None)
    return Options(
        command=_command(chosen),
        num_ranks=chosen.num_ranks,
        bind=chosen.bind,
        grace_seconds=chosen.grace_seconds,
        prefix=chosen.prefix,
        timestamps=chosen.timestamps,
        verbose=chosen.verbose,
        output_directory=chosen.output_directory,
        hosts=_hosts(chosen),
        ssh=ssh_of(chosen),
        network=Network.of(environ),
        exports=exports,
        sync_directory=chosen.sync_dst_dir,
        mpi_args=_words("--mpi-args", wishes.get("mpi_args", "")),
        binding_args=_words("--binding-args", wishes.get("binding_args", "")),
        servers=_servers(chosen),
    )


def _servers(chosen: argparse.Namespace) -> Servers | None:
    if chosen.num_servers is None:
        if chosen.server_hosts is not None:
            raise ConfigError("--server-hosts needs -s: how many servers?")
        return None
    hosts = () if chosen.server_hosts is None else tuple(host.name for host in parse_hosts(chosen.server_hosts))
    return Servers(chosen.num_servers, hosts, num_restarts=chosen.server_restarts)


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _hosts(chosen: argparse.Namespace) -> tuple[Host, ...]:
    hosts = hosts_of(chosen.hosts, chosen.hostfile, chosen.num_ranks)
    names = [host.name for host in (*hosts, *parse_hosts(chosen.server_hosts or "localhost"))]
    strangers = [name for name in names if not is_this_host(name)] if chosen.launcher == "local" else []
    if strangers:
        raise ConfigError(f"--launcher local: {', '.join(strangers)} cannot be reached without ssh")
    return tuple(hosts)


def _document(path: Path | None) -> object:
    """What the configuration file holds; None without one."""
    if path is None:
        return None
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} is no YAML: {error}") from None


def _tell(translation: Translation) -> None:
    if translation.without_effect:
        complain(f"accepted, without effect here: {', '.join(translation.without_effect)}")
    if translation.unknown:
        complain(f"the configuration file has settings that mean nothing: {', '.join(translation.unknown)}")
