"""`reigen launch -n N -s M -H HOSTFILE COMMAND ...`: MXNet's launch.py, under the same options.

Every process runs the command, servers and scheduler, too: there `reigen.kv.create` serves, and never returns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reigen.cli.run_options import (
    add_metrics_options,
    add_output_options,
    add_restart_option,
    add_ssh_options,
    parse_arguments,
    parse_command,
    parse_common_options,
    parse_metrics_options,
)
from reigen.cli.submission_options import (
    add_submission_options,
    arguments_before_command,
    parse_submission_options,
)
from reigen.compat import as_mxnet
from reigen.errors import ConfigError, LaunchError
from reigen.files import write_atomically
from reigen.launch.engines import ENGINES, choose_launcher_in_engine
from reigen.launch.env_export import parse_exports
from reigen.launch.hosts import HostInfo, parse_mxnet_hostfile, read_hostfile
from reigen.launch.nodes.launcher import NODES_LAUNCHER, SelfStart
from reigen.launch.options import LaunchOptions, NetworkOptions, complain
from reigen.launch.ps_processes import ServerOptions
from reigen.launch.slurm.allocation import divide_nodes, find_allocation
from reigen.launch.submission import SUBMITTERS, SubmissionRequest, find_submitter, run_submission
from reigen.launch.supervision.supervisor import run_job

_EPILOG = """\
Options stand before the command, which is passed on as it is, without a shell. Every process runs it, and finds its
place in DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER and DMLC_TASK_ID. The
scheduler runs on this host, servers and workers on the hosts in turn, servers first.

With --launcher sge, kubernetes or yarn, outside of their jobs, it makes a job of this, submits it, prints what the job
prints, and ends with its exit code; Ctrl-C cancels the job.

examples: reigen launch -n 4 -s 2 -H hosts python train.py --kvstore dist_sync
          reigen launch --launcher sge -n 4 -s 2 --queue all.q python train.py --kvstore dist_sync
"""
_P3 = ("DMLC_PS_VAN_TYPE=p3", "DMLC_PS_WATER_MARK=10")


def main(arguments: Sequence[str]) -> int:
    """Run a job; returns the exit code."""
    parser = _parser()
    chosen = parse_arguments(parser, arguments)
    try:
        exports = parse_exports(os.environ, [*chosen.exports, *(_P3 if chosen.p3 else ())])
        environ = {**os.environ, **exports}
        if _is_submitted(chosen):
            return _submit(chosen, _request(chosen, list(arguments), environ, tuple(exports)))
        options = _options(chosen, NetworkOptions.from_environ(environ), tuple(exports))
        environ |= {} if options.servers is None else options.servers.variables
        environ = as_mxnet(environ) if chosen.as_mxnet else environ
        if chosen.launcher == NODES_LAUNCHER:
            code = SelfStart(os.environ, options.num_ranks).run(options, environ)
        else:
            code = run_job(options, environ, launcher=chosen.launcher)
    except ConfigError as error:
        parser.error(str(error))
    except LaunchError as error:
        complain(str(error))
        code = error.exit_code
    return _keep_exit_code(code, chosen.exit_code_file)


def _is_submitted(chosen: argparse.Namespace) -> bool:
    """Return whether this process is to submit a job: the launcher submits, and this is not yet in a job of its."""
    if chosen.launcher not in SUBMITTERS:
        if chosen.print_job:
            raise ConfigError(f"--print: --launcher {chosen.launcher} submits no job; {', '.join(SUBMITTERS)} do")
        return False
    if chosen.hostfile is not None:
        raise ConfigError(f"--hostfile: --launcher {chosen.launcher} gives the job its hosts; leave one of the two out")
    is_inside = chosen.launcher in ENGINES and choose_launcher_in_engine(chosen.launcher, os.environ).engine_job
    return chosen.print_job or not is_inside


def _request(
    chosen: argparse.Namespace, arguments: list[str], environ: dict[str, str], exports: tuple[str, ...]
) -> SubmissionRequest:
    options = _options(chosen, NetworkOptions.from_environ(environ), exports)  # what cannot be is said before
    assert options.servers is not None, "MXNet's jobs have servers"
    return SubmissionRequest(
        arguments_before_command(arguments, chosen.command),
        parse_command(chosen),
        options.num_ranks,
        options.servers.num,
        parse_submission_options(chosen),
        environ,
        exports,
        grace_seconds=options.grace_seconds,
    )


def _submit(chosen: argparse.Namespace, request: SubmissionRequest) -> int:
    submission = find_submitter(chosen.launcher)(request)
    if chosen.print_job:
        print(submission.preview)
        return 0
    return run_submission(submission, grace_seconds=request.grace_seconds)


def _keep_exit_code(code: int, file: Path | None) -> int:
    if file is not None:
        write_atomically(file, [f"{code}\n".encode()])
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reigen launch",
        description="Start workers, parameter servers and their scheduler, as MXNet's launch.py does.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="reigen launch -n N [-s M] [-H HOSTFILE] [options] command ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--num-workers", type=int, required=True, metavar="N", help="how many workers")
    add("-s", "--num-servers", type=int, metavar="M", help="how many servers (default: as many as workers)")
    add("-H", "--hostfile", metavar="FILE", help="hosts, one per line; needed unless --launcher is local")
    add(
        "--launcher",
        default="ssh",
        metavar="NAME",
        help="how processes are started: local, on this host only; ssh, on other hosts (the default); slurm, lsf, "
        "pbs, in a job of that system; sge, in a Grid Engine job, which is submitted if this is not in one; "
        "kubernetes, yarn, in a job that is submitted; nodes, in a job that runs this command on every node; mpi, by "
        "mpirun",
    )
    for role in ("worker", "server"):
        add(
            f"--slurm-{role}-nodes",
            type=int,
            metavar="N",
            help=f"Slurm: nodes for {role}s only (default: all nodes for both)",
        )
    add("--sync-dst-dir", metavar="DIR", help="first copy the working directory there with rsync, and run in the copy")
    for role in ("server", "worker"):
        add(
            f"--env-{role}",
            action="append",
            default=[],
            metavar="NAME:VALUE",
            help=f"set a variable for all {role}s only; may be repeated",
        )
    add(
        "--env",
        dest="exports",
        action="append",
        default=[],
        metavar="NAME",
        help="also pass on a variable that belongs to the host (HOME, TMPDIR ...); all others are passed on anyway",
    )
    add(
        "--as-mxnet",
        action="store_true",
        help="use Reigen's stores for MXNet's distributed ones, in unmodified scripts",
    )
    add("--p3", action="store_true", help="set DMLC_PS_VAN_TYPE=p3, for MXNet; Reigen respects priorities anyway")
    add_restart_option(add)
    add_output_options(parser.add_argument_group("output").add_argument)
    add_metrics_options(parser.add_argument_group("metrics").add_argument)
    add_ssh_options(parser.add_argument_group("other hosts").add_argument)
    add_submission_options(parser)
    add("--exit-code-file", type=Path, help=argparse.SUPPRESS)  # the job's, for the process that has submitted it
    add("command", nargs=argparse.REMAINDER, metavar="command ...", help="the command that every process runs")
    return parser


def _options(chosen: argparse.Namespace, network: NetworkOptions, exports: tuple[str, ...]) -> LaunchOptions:
    if chosen.launcher == "local" and chosen.hostfile is not None:
        raise ConfigError("--hostfile: --launcher local starts everything on this host; leave one of the two out")
    if chosen.launcher == "ssh" and chosen.hostfile is None:
        raise ConfigError("--launcher ssh needs a --hostfile; on this host alone, say --launcher local")
    hosts, port = ([], None) if chosen.hostfile is None else parse_mxnet_hostfile(read_hostfile(chosen.hostfile))
    common = parse_common_options(chosen)
    if chosen.num_workers < 1:
        raise ConfigError(f"the number of workers must be at least 1, not {chosen.num_workers}")
    if port is not None and chosen.ssh_port is None:
        common["ssh"] = replace(common["ssh"], port=port)
    hosts, server_hosts = _divide_slurm_nodes(chosen, hosts)
    servers = ServerOptions(
        chosen.num_workers if chosen.num_servers is None else chosen.num_servers,
        server_hosts,
        command=common["command"],
        environ=_pairs("--env-server", chosen.env_server),
        worker_environ=_pairs("--env-worker", chosen.env_worker),
        round_robin_workers=True,
        num_restarts=chosen.server_restarts,
        uses_reigen_scheduler=chosen.as_mxnet,
        replicas=chosen.replicate_servers,
    )
    return LaunchOptions(
        **common,
        num_ranks=chosen.num_workers,
        hosts=tuple(hosts) or (() if chosen.launcher in ENGINES else (HostInfo("localhost", chosen.num_workers),)),
        network=network,
        exports=exports,
        servers=servers,
        metrics=parse_metrics_options(chosen, os.environ),
    )


def _divide_slurm_nodes(chosen: argparse.Namespace, hosts: list[HostInfo]) -> tuple[list[HostInfo], tuple[str, ...]]:
    """Return the hosts of workers and of servers, where they are to have nodes of Slurm's of their own."""
    if chosen.slurm_worker_nodes is None and chosen.slurm_server_nodes is None:
        return hosts, ()
    allocation = find_allocation(os.environ) if chosen.launcher == "slurm" else None
    if allocation is None or hosts:
        raise ConfigError(
            "--slurm-worker-nodes and --slurm-server-nodes divide the nodes of a job of Slurm's: --launcher slurm, in "
            "a script for sbatch or under salloc, without a --hostfile"
        )
    workers, servers = divide_nodes(allocation, chosen.slurm_worker_nodes, chosen.slurm_server_nodes)
    return list(workers), servers


def _pairs(option: str, specs: Sequence[str]) -> dict[str, str]:
    found = {}
    for spec in specs:
        name, has_value, value = spec.partition(":")
        if not has_value or not name.isidentifier():
            raise ConfigError(f"{option} {spec}: it is not of the form NAME:VALUE")
        found[name] = value
    return found
