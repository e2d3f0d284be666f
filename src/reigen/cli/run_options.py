"""Parser of `reigen run`: its own options, and all of `horovodrun`'s under the same names."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reigen._version import __version__
from reigen.errors import ConfigError
from reigen.launch.elastic.options import BLACKLISTS, LAUNCHER_LOSS_CHOICES
from reigen.launch.horovodrun import CONTROLLERS, HOROVODRUN_OPTIONS, OPTION_HELP, HorovodrunOption
from reigen.launch.local_plan import CPU_BINDINGS
from reigen.launch.metrics.options import DashboardAddress, MetricsAddress, MetricsOptions
from reigen.launch.ssh.command import SshOptions, check_identity_file

_EPILOG = """\
The command and its arguments are passed on as they are, without a shell; `--` may stand before them. Its output comes
line by line with the rank in front. When a process fails, the others are stopped, its last words are printed last, and
its exit code is that of `reigen run` (128 + n for a signal n).

In a Slurm job, the ranks run on its nodes, as many as it has tasks; no other option is needed. The same holds in a
parallel Grid Engine job and in LSF and PBS jobs, with their slots.

Other hosts are reached by ssh, which must work without a password; its configuration and known hosts are respected.
They need the same version of Reigen. The ranks there have the environment of this shell, except for variables that
belong to a host or a login, and the same working directory, or a copy of it (--sync-dst-dir). Nothing starts until all
hosts are ready.

With -s, parameter servers run in addition to the ranks, which are their workers (`reigen.kv`); they end with the job.

Options win over the environment, and the environment over the configuration file. All other options of horovodrun are
also accepted; `reigen run` says which of them have no effect.

examples: reigen run -np 4 python train.py --epochs 3
          reigen run -np 8 -H h1:4,h2:4 python train.py
"""

#: Other spellings of an option: (spelling, its name, its value or None where it takes one).
_ALIASES: tuple[tuple[tuple[str, ...], str, bool | None], ...] = (
    (("--log-without-timestamp", "--log-hide-timestamp"), "log_with_timestamp", False),
    (("--network-interface",), "network_interfaces", None),
    (("--slots",), "slots_per_host", None),
)

AddArgument = Callable[..., argparse.Action]

_PORT = re.compile(r"(\[?[\w.:]+\]?:)?\d+", re.ASCII)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser. Options that were not given are None, False, or the defaults in `--help`."""
    parser = argparse.ArgumentParser(
        prog="reigen run",
        description="Start a job: the same command in N processes, on this host or on several.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="reigen run -np N [options] command ...",
        allow_abbrev=False,
    )
    _add_general(parser.add_argument)
    add_output_options(parser.add_argument_group("output").add_argument)
    add_metrics_options(parser.add_argument_group("metrics").add_argument)
    _add_hosts(parser)
    _add_servers(parser.add_argument_group("parameter servers").add_argument)
    hosts = parser.add_argument_group("other hosts").add_argument
    add_ssh_options(hosts)
    _add_env_options(hosts)
    groups = {title: parser.add_argument_group(title) for title in (*OPTION_HELP, "")}
    for option in HOROVODRUN_OPTIONS:
        title = next((title for title, texts in OPTION_HELP.items() if option.name in texts), "")
        _add(groups[title], option, OPTION_HELP[title][option.name] if title else argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="command ...", help="what to run in each process")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `reigen run` and `reigen launch`.

    The value of ``--dashboard`` may be left out, also before the command, which argparse would take for it.
    """
    words = list(arguments)
    if "--dashboard" in words:
        place = words.index("--dashboard")
        if not _PORT.fullmatch("".join(words[place + 1 : place + 2])):
            words[place] = "--dashboard="
            chosen = parser.parse_args(words)
            if len(chosen.command) < len(words) - place:  # the command has at most what comes after it
                return chosen
    return parser.parse_args(arguments)


def _add_general(add: AddArgument) -> None:
    add("-v", "--version", action="version", version=f"reigen {__version__}")
    add("-cb", "--check-build", action="store_true", help="show what is available, in horovodrun's format, and exit")
    add(
        "-np",
        "--num-proc",
        dest="num_ranks",
        type=_parse_num_ranks,
        metavar="N",
        help="number of processes; auto, the default in a job of a batch system: as many as it has slots",
    )
    add(
        "--as-horovod",
        action="store_true",
        help="`import horovod` imports Reigen, in the command and in what it starts",
    )
    add(
        "--as-mxnet",
        action="store_true",
        help="use Reigen's stores for MXNet's distributed ones, in unmodified scripts",
    )
    add("--torchrun-env", action="store_true", help="also set RANK, WORLD_SIZE, MASTER_ADDR ..., for torch.distributed")
    add("--config-file", type=Path, metavar="FILE", help="settings in YAML, in horovodrun's format")
    add(
        "--bind",
        choices=CPU_BINDINGS,
        help="whether to bind ranks to processors (default: if there is at least one for each rank)",
    )
    add(
        "--no-verdict",
        dest="verdict",
        action="store_false",
        help="do not report at the end what bounded the job, if a timeline or metrics show it",
    )


def _parse_num_ranks(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _add_servers(add: AddArgument) -> None:
    add("-s", "--num-servers", dest="num_servers", type=int, metavar="N", help="number of servers (default: 0)")
    add(
        "--server-hosts",
        metavar="HOSTS",
        help="hosts on which servers run, round-robin: h1,h2 (default: those of the ranks)",
    )
    add(
        "--max-servers",
        type=int,
        metavar="N",
        help="elastic jobs: maximum number of server processes, which kv.resize_servers() changes (default: fixed)",
    )
    add_restart_option(add)


def add_restart_option(add: AddArgument) -> None:
    """Add the options for restarts of servers."""
    add(
        "--replicate-servers",
        type=int,
        metavar="N",
        help="2: keep a copy of each server's data in another server's memory, to restart it from (default: 1)",
    )
    add(
        "--server-restarts",
        type=int,
        default=3,
        metavar="N",
        help="restarts of the scheduler, and of each server that keeps snapshots or copies, at most (default: 3)",
    )


def add_output_options(add: AddArgument) -> None:
    """Add the options of output, and of the time that processes may take to stop."""
    add(
        "--grace-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between asking a process to stop and killing it (default: 5)",
    )
    add(
        "--gpus-per-rank",
        type=int,
        metavar="N",
        help="give each rank N GPUs of its host (default: ranks see all GPUs, and choose by their local rank)",
    )
    add(
        "--requeue-on-notice",
        action="store_true",
        help="requeue a job that ended because its batch system announced its end (Grid Engine: exit code 99)",
    )
    add("--verbose", action="store_true", help="show what is started, where, and why there")
    add("--no-prefix", dest="prefix", action="store_false", help="print lines without their rank")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        help="print the time before each line",
    )
    add(
        "--output-filename",
        dest="output_directory",
        type=Path,
        metavar="DIR",
        help="also write the output of each rank to DIR/rank.N/stdout and DIR/rank.N/stderr",
    )


def add_metrics_options(add: AddArgument) -> None:
    """Add the options about metrics for `parse_metrics_options`."""
    add(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve the metrics of all ranks for Prometheus, at http://127.0.0.1:PORT/metrics; 0: any free port. To "
        "serve other hosts, give an address, and set REIGEN_METRICS_TOKEN",
    )
    add(
        "--top",
        action="store_true",
        help="show a live table of all ranks below the output; if stderr is not a terminal, a line now and then",
    )
    add(
        "--dashboard",
        metavar="[[HOST:]PORT]",
        help="show the same and its history in a browser, at a URL that is printed; without a port: any free one. To "
        "serve other hosts, give an address",
    )
    add("--metrics-file", type=Path, metavar="FILE", help="write the metrics as JSON lines, one per rank and second")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts")
    add = group.add_mutually_exclusive_group().add_argument
    add("-H", "--hosts", metavar="HOST:N", help="hosts, and the number of ranks that each may have: h1:4,h2:4")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="the same in a file, one host per line: h1 slots=4")
    group.add_argument(
        "--launcher",
        metavar="NAME",
        help="how ranks are started: local, on this host only; ssh, also on others (the default); slurm, sge, lsf, "
        "pbs, in a job of that system (the default there); mpi, by mpirun, with the further options in --mpi-args and "
        "--binding-args; or a launcher of another package, by name or as MODULE:FACTORY",
    )
    group.add_argument(
        "--nodes-from-env",
        action="store_true",
        help="every node of the job runs this command, and finds the others by the variables that the system sets: "
        "Kubernetes pods, SageMaker containers (the same as --launcher nodes)",
    )
    _add_elastic(parser, group, add)


def _add_elastic(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, add_hosts: AddArgument) -> None:
    """Add the options of elastic jobs; ``add_hosts``: one of those that say which hosts there are."""
    add_hosts(
        "--host-discovery-script",
        metavar="FILE",
        help="program that prints the hosts of an elastic job as name:slots; it is run every second",
    )
    add = group.add_argument
    add(
        "--min-np",
        "--min-num-proc",
        dest="min_ranks",
        type=int,
        metavar="N",
        help="make the job elastic: it continues while at least N processes are left (default: -np)",
    )
    add("--max-np", "--max-num-proc", dest="max_ranks", type=int, metavar="N", help="most processes of an elastic job")
    witness = parser.add_mutually_exclusive_group().add_argument
    witness(
        "--witness",
        action="store_true",
        help="let this command, on a host without ranks, vote if an elastic job has an even number of hosts: then "
        "the half that reaches this host may continue",
    )
    witness("--witness-dir", metavar="DIR", help="the same with files in a directory that all hosts share")
    add(
        "--on-launcher-loss",
        choices=LAUNCHER_LOSS_CHOICES,
        default=LAUNCHER_LOSS_CHOICES[0],
        help="whether an elastic job stops or continues when this command is killed or its terminal is closed; "
        "`reigen attach` takes its place (default: stop)",
    )
    add(
        "--blacklist",
        choices=BLACKLISTS,
        help="what an elastic job does not use for a while after a process has failed: its place, or its whole host, "
        "as horovodrun does (default: seat; with --as-horovod host)",
    )
    add(
        "--spares",
        metavar="N[:warm]",
        help="start N more processes of an elastic job, which wait to replace processes that die; with :warm they take "
        "part in the steps of a PyTorch hvd.elastic.Job, without samples, and have its state",
    )
    add(
        "--eject-stragglers",
        metavar="FACTOR[/STEPS]",
        help="replace a process of an elastic job that has slowed down all others by FACTOR (3 is a good value) for "
        "STEPS steps in a row (50), if another can take its place or enough are left; otherwise only report it",
    )
    add(
        "--resize-limit",
        type=int,
        metavar="N",
        help="end an elastic job with more than N planned changes of members (--reset-limit: changes after failures)",
    )


def add_ssh_options(add: AddArgument) -> None:
    """Add the options of ssh for `parse_ssh_options`."""
    add("-p", "--ssh-port", type=int, metavar="N", help="port of sshd (default: from ssh's configuration)")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key (default: from ssh's configuration)")
    add("--ssh-command", default="ssh", metavar="CMD", help="the ssh command, with options: 'ssh -F FILE'")
    add("--ssh-no-host-key-check", dest="check_host_keys", action="store_false", help="accept unknown hosts")
    add(
        "--remote-python",
        metavar="FILE",
        help="path of the Python on other hosts that has Reigen (default: the path of this one)",
    )


def parse_metrics_options(
    chosen: argparse.Namespace, environ: Mapping[str, str], *, says_verdict: bool = False
) -> MetricsOptions:
    """Make the options of metrics.

    Args:
        chosen: the options of the command.
        environ: may have tokens.
        says_verdict: say at the end which ranks were waited for.

    Raises:
        ConfigError: they make no sense.
    """
    address = None if chosen.metrics_port is None else MetricsAddress.parse(chosen.metrics_port, environ)
    dashboard = None if chosen.dashboard is None else DashboardAddress.parse(chosen.dashboard, environ)
    return MetricsOptions(address, chosen.metrics_file, dashboard, top=chosen.top, verdict=says_verdict)


def parse_ssh_options(chosen: argparse.Namespace) -> SshOptions:
    """Make the options of ssh; raises ConfigError."""
    command = split_words("--ssh-command", chosen.ssh_command)
    identity_file = check_identity_file(chosen.ssh_identity_file)
    ssh = SshOptions(command, chosen.ssh_port, identity_file, chosen.check_host_keys)
    return ssh if chosen.remote_python is None else replace(ssh, python=chosen.remote_python)


def parse_common_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of LaunchOptions that are read alike in `reigen run` and `reigen launch`."""
    names = ("grace_seconds", "requeue_on_notice", "prefix", "timestamps", "verbose", "output_directory")
    return {name: getattr(chosen, name) for name in names} | {
        "command": parse_command(chosen),
        "ssh": parse_ssh_options(chosen),
        "sync_directory": chosen.sync_dst_dir,
    }


def parse_command(chosen: argparse.Namespace) -> tuple[str, ...]:
    """Return the user's command, without the ``--`` before it."""
    return tuple(chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command)


def split_words(option: str, text: str) -> tuple[str, ...]:
    """Split an option's value as a shell does; raises ConfigError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _add_env_options(add: AddArgument) -> None:
    add("--sync-dst-dir", metavar="DIR", help="first copy the working directory there with rsync, and run in the copy")
    add(
        "-x",
        "--env",
        dest="exports",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for all ranks, or pass on one that belongs to the host (HOME, TMPDIR, DISPLAY ...)",
    )


def _add(group: argparse._ArgumentGroup, option: HorovodrunOption, text: str) -> None:
    if option.name == "controller":
        exclusive = group.add_mutually_exclusive_group()
        for controller in CONTROLLERS:
            exclusive.add_argument(
                f"--{controller}", dest=option.name, action="store_const", const=controller, help=text
            )
        return
    if not option.is_switch:
        num_values: int | None = 2 if option.name == "blacklist_cooldown_range" else None
        aliases = [flag for flags, name, value in _ALIASES if name == option.name and value is None for flag in flags]
        group.add_argument(*aliases, option.flag, dest=option.name, nargs=num_values, metavar="X", help=text)
        return
    exclusive = group.add_mutually_exclusive_group()
    on = option.flag.replace("[no-]", "")
    exclusive.add_argument(on, dest=option.name, action="store_const", const=True, help=text)
    off = [option.flag.replace("[no-]", "no-")] if on != option.flag else []
    off += [flag for flags, name, value in _ALIASES if name == option.name and value is False for flag in flags]
    if off:
        exclusive.add_argument(
            *off,
            dest=option.name,
            action="store_const",
            const=False,
            help=text if text == argparse.SUPPRESS else f"do not {text}",
        )
