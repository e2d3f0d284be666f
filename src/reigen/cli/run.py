"""`reigen run -np N COMMAND ...`: the same command in N processes that form one job."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from reigen.cli.job_verdict import say_verdict, timeline_path
from reigen.cli.run_options import (
    make_parser,
    parse_arguments,
    parse_command,
    parse_common_options,
    parse_metrics_options,
    split_words,
)
from reigen.cluster.environ import ELASTIC_TIMEOUT_VARIABLE
from reigen.compat import as_horovod, as_mxnet
from reigen.errors import ConfigError, LaunchError
from reigen.launch.base import DEFAULT_LAUNCHER
from reigen.launch.elastic.continuation import ContinuedJob
from reigen.launch.elastic.options import (
    ElasticRequest,
    check_elastic_hosts,
    parse_cooldown,
    parse_count,
    resolve_elastic,
)
from reigen.launch.engines import LauncherChoice, choose_launcher_in_engine
from reigen.launch.env_export import parse_exports
from reigen.launch.horovodrun import TranslatedOptions, choose_launcher, translate_options
from reigen.launch.hosts import HostInfo, is_this_host, parse_hosts, resolve_hosts
from reigen.launch.local_plan import TORCHRUN_ENV_VARIABLE
from reigen.launch.nodes.launcher import NODES_LAUNCHER, SelfStart
from reigen.launch.options import LaunchOptions, NetworkOptions, complain
from reigen.launch.ps_processes import ServerOptions
from reigen.launch.supervision.supervisor import run_job


def main(arguments: Sequence[str]) -> int:
    """Run a job; returns the exit code."""
    return run_arguments(arguments, None)


def run_arguments(arguments: Sequence[str], continued: ContinuedJob | None) -> int:
    """Run a job, or take the place of a launcher that was lost; returns the exit code.

    Args:
        arguments: as of `reigen run`.
        continued: the job of that launcher.
    """
    parser = make_parser()
    chosen = parse_arguments(parser, arguments)
    if chosen.check_build:
        from reigen.cli.check import build_report

        print(build_report())
        return 0
    if chosen.num_ranks is None and chosen.as_mxnet and os.environ.get("DMLC_ROLE"):
        return _run_by_dmlc_role(chosen)
    try:
        document = _read_config_file(chosen.config_file)
        translation = translate_options(vars(chosen), document, os.environ)
        exports = parse_exports(os.environ, chosen.exports)
        choice = _choose_launcher(chosen, choose_launcher(vars(chosen), document))
        launcher = choice.launcher
        start = SelfStart(os.environ, chosen.num_ranks) if launcher == NODES_LAUNCHER else None
        is_elastic = chosen.min_ranks is not None or chosen.host_discovery_script is not None
        if start is not None and not is_elastic:
            chosen.num_ranks = start.num_ranks
        if _num_ranks(chosen, choice) is None and not is_elastic:
            raise ConfigError("the following arguments are required: -np/--num-proc")
        environ = {**os.environ, **translation.variables, **exports, **_torchrun_request(chosen, launcher)}
        options = _options(chosen, environ, tuple(exports), translation.launcher_options, choice)
        if options.continues and launcher not in {DEFAULT_LAUNCHER, "local"}:
            raise ConfigError(f"--on-launcher-loss continue: agents of --launcher {launcher} end with this command")
        _print_translation(translation)
        environ |= {} if options.servers is None else options.servers.variables
        seen = _with_compat_path(environ, chosen)
        if options.continues and continued is None:
            continued = ContinuedJob.create(arguments, os.environ)
        begun = time.time()
        if start is None:
            exit_code = run_job(options, seen, launcher=launcher, continued=continued)
        else:
            exit_code = start.run(options, seen)
        is_first_node = start is None or start.job.index == 0
        if not exit_code and chosen.verdict and not chosen.as_horovod and is_first_node:
            say_verdict(environ, begun, complain, options.metrics.file)
        return exit_code
    except ConfigError as error:
        parser.error(str(error))
    except LaunchError as error:
        complain(str(error))
        return error.exit_code


def _choose_launcher(chosen: argparse.Namespace, named: str) -> LauncherChoice:
    """Choose the launcher; ``named`` by the options or the configuration file, or the default one."""
    has_hosts = chosen.hosts is not None or chosen.hostfile is not None
    if chosen.nodes_from_env:
        if chosen.launcher not in {None, NODES_LAUNCHER}:
            raise ConfigError(f"--nodes-from-env and --launcher {chosen.launcher}: leave one of the two out")
        named = chosen.launcher = NODES_LAUNCHER
    if named == NODES_LAUNCHER and has_hosts:
        raise ConfigError("--nodes-from-env: the hosts are the engine's; leave -H and --hostfile out")
    is_named = chosen.launcher is not None or named != DEFAULT_LAUNCHER
    choice = choose_launcher_in_engine(named if is_named else None, os.environ, has_hosts=has_hosts)
    if chosen.verbose:
        complain(f"launcher {choice.launcher}: {choice.reason}")
    return choice


def _num_ranks(chosen: argparse.Namespace, choice: LauncherChoice) -> int | None:
    """Return the number of processes: as given, or the slots of the engine's job; None: the user has to say it."""
    has_hosts = chosen.hosts is not None or chosen.hostfile is not None
    if chosen.num_ranks is not None or has_hosts or choice.engine_job is None:
        return chosen.num_ranks  # type: ignore[no-any-return]
    return choice.engine_job.num_slots


def _torchrun_request(chosen: argparse.Namespace, launcher: str) -> dict[str, str]:
    """Return the variable that asks for torchrun's in the ranks' environment.

    Scripts for Horovod never get torchrun's variables: Accelerate, Transformers, timm and others would start
    torch.distributed because of them, and average a second time.
    """
    if chosen.torchrun_env and chosen.as_horovod:
        raise ConfigError("--torchrun-env: horovodrun does not set these variables, so --as-horovod does not either")
    if chosen.torchrun_env and launcher == "mpi":
        raise ConfigError("--torchrun-env: mpirun starts these ranks, and tells them of itself alone")
    if chosen.as_horovod:
        return {TORCHRUN_ENV_VARIABLE: "0"}
    return {TORCHRUN_ENV_VARIABLE: "1"} if chosen.torchrun_env else {}


def _with_compat_path(environ: Mapping[str, str], chosen: argparse.Namespace) -> Mapping[str, str]:
    environ = as_horovod(environ) if chosen.as_horovod else environ
    return as_mxnet(environ) if chosen.as_mxnet else environ


def _run_by_dmlc_role(chosen: argparse.Namespace) -> int:
    """Run the command itself without ``-np``, where the user has set DMLC_ROLE by hand and starts each process."""
    command = parse_command(chosen)
    try:
        os.execvpe(command[0], command, _with_compat_path(os.environ, chosen))
    except (OSError, IndexError) as error:
        complain(f"cannot run {' '.join(command) or 'nothing'}: {error}")
        return 127


def _options(
    chosen: argparse.Namespace,
    environ: Mapping[str, str],
    exports: tuple[str, ...],
    launcher_options: Mapping[str, str],
    choice: LauncherChoice,
) -> LaunchOptions:
    request = _elastic_request(chosen, environ)
    elastic = resolve_elastic(request)
    num_ranks = _num_ranks(chosen, choice) or (0 if elastic is None else elastic.min_ranks)
    if elastic is not None and choice.uses_hosts_of_engine and choice.engine_job is not None:
        num_ranks = choice.engine_job.num_slots  # all places may be used, though not at a time
    hosts: tuple[HostInfo, ...] = ()
    comes_by_itself = elastic is not None and choice.launcher == NODES_LAUNCHER
    if not choice.uses_hosts_of_engine and chosen.host_discovery_script is None and not comes_by_itself:
        hosts = tuple(resolve_hosts(chosen.hosts, chosen.hostfile, request.num_places or num_ranks))
    if chosen.witness and any(is_this_host(host.name) for host in hosts):
        raise ConfigError(
            "--witness: this host has ranks, and would be lost with them; --witness-dir names a directory"
        )
    if elastic is not None and choice.launcher != NODES_LAUNCHER:
        check_elastic_hosts(elastic, hosts, as_horovod=chosen.as_horovod)
    says_verdict = chosen.verdict and not chosen.as_horovod and timeline_path(environ) is None  # which would say more
    return LaunchOptions(
        **parse_common_options(chosen),
        num_ranks=num_ranks,
        bind=chosen.bind,
        hosts=hosts,
        elastic=elastic,
        continues=chosen.on_launcher_loss == "continue",
        network=NetworkOptions.from_environ(environ),
        exports=exports,
        mpi_args=split_words("--mpi-args", launcher_options.get("mpi_args", "")),
        binding_args=split_words("--binding-args", launcher_options.get("binding_args", "")),
        servers=_servers(chosen),
        gpus_per_rank=chosen.gpus_per_rank,
        metrics=parse_metrics_options(chosen, environ, says_verdict=says_verdict),
    )


def _elastic_request(chosen: argparse.Namespace, environ: Mapping[str, str]) -> ElasticRequest:
    """Collect the options of an elastic job."""
    timeouts = (chosen.elastic_timeout, environ.get(ELASTIC_TIMEOUT_VARIABLE), environ.get("HOROVOD_ELASTIC_TIMEOUT"))
    timeout = next((each for each in timeouts if each), None)
    request = ElasticRequest(
        num_ranks=chosen.num_ranks,
        min_ranks=chosen.min_ranks,
        max_ranks=chosen.max_ranks,
        discovery=chosen.host_discovery_script,
        slots_per_host=parse_count("--slots-per-host", chosen.slots_per_host),
        timeout_seconds=parse_count("--elastic-timeout", timeout),
        start_timeout_seconds=None if chosen.start_timeout is None else float(chosen.start_timeout),
        reset_limit=parse_count("--reset-limit", chosen.reset_limit),
        resize_limit=chosen.resize_limit,
        spares=chosen.spares,
        witness=_witness(chosen),
        eject_stragglers=chosen.eject_stragglers,
        cooldown_range=parse_cooldown(chosen.blacklist_cooldown_range),
        blacklist=chosen.blacklist,
        as_horovod=chosen.as_horovod,
    )
    if request.is_elastic and chosen.torchrun_env:
        raise ConfigError("--torchrun-env: torch.distributed cannot follow the members of an elastic job")
    witness = ("--witness, --witness-dir", request.witness or None)
    only_elastic = ("--blacklist", request.blacklist), ("--spares", request.spares), witness
    limits = ("--resize-limit", request.resize_limit), ("--eject-stragglers", request.eject_stragglers)
    for name, value in (*only_elastic, *limits):
        if value is not None and not request.is_elastic:
            raise ConfigError(f"{name} is about elastic jobs: --min-np makes one")
    return request


def _witness(chosen: argparse.Namespace) -> str:
    """Return the witness of an elastic job, as `launch.elastic.options.ElasticOptions` has it."""
    if chosen.witness:
        return "launcher"
    return f"dir:{Path(chosen.witness_dir).absolute()}" if chosen.witness_dir else ""


def _servers(chosen: argparse.Namespace) -> ServerOptions | None:
    if chosen.num_servers is None:
        if chosen.server_hosts is not None:
            raise ConfigError("--server-hosts needs -s: how many servers?")
        if chosen.replicate_servers is not None:
            raise ConfigError("--replicate-servers needs -s: how many servers?")
        if chosen.max_servers is not None:
            raise ConfigError("--max-servers needs -s: in how many processes are the servers at first?")
        return None
    hosts = () if chosen.server_hosts is None else tuple(host.name for host in parse_hosts(chosen.server_hosts))
    return ServerOptions(
        chosen.num_servers,
        hosts,
        num_restarts=chosen.server_restarts,
        replicas=chosen.replicate_servers,
        max_num=chosen.max_servers,
    )


def _read_config_file(path: Path | None) -> object:
    if path is None:
        return None
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} is no YAML: {error}") from None


def _print_translation(translation: TranslatedOptions) -> None:
    if translation.without_effect:
        complain(f"accepted, without effect here: {', '.join(translation.without_effect)}")
    if translation.unknown:
        complain(f"the configuration file has settings that mean nothing: {', '.join(translation.unknown)}")
