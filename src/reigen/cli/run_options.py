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

In a job of Slurm's, the ranks run on its nodes, as many as it has tasks; nothing else has to be said. So it is in a
parallel job of Grid Engine's, in jobs of LSF's and of PBS's, with their slots.

Other hosts are reached by ssh, which must work without a password; its configuration and known hosts are respected.
They need the same Reigen. The ranks there have the environment of this shell, but for what belongs to a host or a
login, and the same working directory, or a copy of it (--sync-dst-dir). Nothing starts unless all hosts are ready.

With -s, parameter servers run beside the ranks, which are their workers (`reigen.kv`); they end with the job.

Options win over the environment, and the environment over the configuration file. All other options of horovodrun are
accepted, too; where they can have no effect, `reigen run` says so.

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
            if len(chosen.command) < len(words) - place:  # the command has what is behind it at most
                return chosen
    return parser.parse_args(arguments)


def _add_general(add: AddArgument) -> None:
    add("-v", "--version", action="version", version=f"reigen {__version__}")
    add("-cb", "--check-build", action="store_true", help="say what there is, in the form of horovodrun, and end")
    add(
        "-np",
        "--num-proc",
        dest="num_ranks",
        type=_parse_num_ranks,
        metavar="N",
        help="how many processes; auto, the default in an engine's job: as many as that has slots",
    )
    add("--as-horovod", action="store_true", help="`import horovod` finds Reigen, in the command and what it starts")
    add("--as-mxnet", action="store_true", help="distributed stores of MXNet's are Reigen's, in unmodified scripts")
    add("--torchrun-env", action="store_true", help="set RANK, WORLD_SIZE, MASTER_ADDR ... too, for torch.distributed")
    add("--config-file", type=Path, metavar="FILE", help="settings in YAML, as horovodrun reads them")
    add(
        "--bind",
        choices=CPU_BINDINGS,
        help="bind ranks to processors, or do not (default: where there is at least one for each rank)",
    )
    add(
        "--no-verdict",
        dest="verdict",
        action="store_false",
        help="do not say at the end what bounded the job, where that is known: from a timeline, or from metrics",
    )


def _parse_num_ranks(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _add_servers(add: AddArgument) -> None:
    add("-s", "--num-servers", dest="num_servers", type=int, metavar="N", help="how many (default: none)")
    add("--server-hosts", metavar="HOSTS", help="hosts where they run, in turn: h1,h2 (default: those of the ranks)")
    add_restart_option(add)


def add_restart_option(add: AddArgument) -> None:
    """Add the options for restarts of servers."""
    add(
        "--replicate-servers",
        type=int,
        metavar="N",
        help="2: what a server holds is in the memory of another one, too, from which it is started again (default: 1)",
    )
    add(
        "--server-restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often the scheduler, or a server that keeps snapshots, may be started again (default: 3)",
    )


def add_output_options(add: AddArgument) -> None:
    """Add the options of output, and of the time that processes may take to stop."""
    add(
        "--grace-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="time between asking a process to stop and killing it (default: 5)",
    )
    add(
        "--gpus-per-rank",
        type=int,
        metavar="N",
        help="let each rank see N GPUs of its host alone (default: all see all, and choose by their local rank)",
    )
    add(
        "--requeue-on-notice",
        action="store_true",
        help="when the job has ended after its engine announced an end, run it again (Grid Engine: exit code 99)",
    )
    add("--verbose", action="store_true", help="say what is started, where, and why there")
    add("--no-prefix", dest="prefix", action="store_false", help="print lines without their rank")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        help="print lines with the time",
    )
    add(
        "--output-filename",
        dest="output_directory",
        type=Path,
        metavar="DIR",
        help="keep what each rank prints in DIR/rank.N/stdout and DIR/rank.N/stderr, too",
    )


def add_metrics_options(add: AddArgument) -> None:
    """Add the options about metrics for `parse_metrics_options`."""
    add(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve the metrics of all ranks for Prometheus, at http://127.0.0.1:PORT/metrics; 0: any port. For other "
        "hosts: an address, and REIGEN_METRICS_TOKEN",
    )
    add(
        "--top",
        action="store_true",
        help="show a live table of all ranks below the output; where stderr is no terminal, a line now and then",
    )
    add(
        "--dashboard",
        metavar="[[HOST:]PORT]",
        help="show the same and its history in a browser, at a URL that is printed; without a port: any one. For other "
        "hosts: an address",
    )
    add("--metrics-file", type=Path, metavar="FILE", help="write them as JSON lines, one for each rank and second")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts")
    add = group.add_mutually_exclusive_group().add_argument
    add("-H", "--hosts", metavar="HOST:N", help="hosts and how many ranks each may have: h1:4,h2:4")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="the same in a file, a line each: h1 slots=4")
    group.add_argument(
        "--launcher",
        metavar="NAME",
        help="how ranks are started: local, on this host alone; ssh, on others, too (the default); slurm, in a job of "
        "Slurm's, sge, in one of Grid Engine's, lsf, pbs (the default there); mpi, anywhere by mpirun, of which "
        "--mpi-args and --binding-args hold further options; or one of another package, by its name or as "
        "MODULE:FACTORY",
    )
    group.add_argument(
        "--nodes-from-env",
        action="store_true",
        help="every node of the job runs this command, and finds the others by its engine's variables: pods of "
        "Kubernetes, containers of SageMaker (the same as --launcher nodes)",
    )
    _add_elastic(parser, group, add)


def _add_elastic(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, add_hosts: AddArgument) -> None:
    """Add the options of elastic jobs; ``add_hosts``: one of those that say which hosts there are."""
    add_hosts(
        "--host-discovery-script",
        metavar="FILE",
        help="program that prints the hosts of an elastic job, name:slots each, and is asked again every second",
    )
    add = group.add_argument
    add(
        "--min-np",
        "--min-num-proc",
        dest="min_ranks",
        type=int,
        metavar="N",
        help="an elastic job: it goes on while so many processes are left (default: -np)",
    )
    add("--max-np", "--max-num-proc", dest="max_ranks", type=int, metavar="N", help="and has at most so many")
    witness = parser.add_mutually_exclusive_group().add_argument
    witness(
        "--witness",
        action="store_true",
        help="this command, on a host without ranks, votes where an elastic job has an even number of hosts: then "
        "either half may go on, if it reaches this host",
    )
    witness("--witness-dir", metavar="DIR", help="the same by files in a directory that all hosts share")
    add(
        "--on-launcher-loss",
        choices=LAUNCHER_LOSS_CHOICES,
        default=LAUNCHER_LOSS_CHOICES[0],
        help="whether an elastic job ends when this command is killed or its terminal goes, or continues without it; "
        "`reigen attach` takes its place (default: stop)",
    )
    add(
        "--blacklist",
        choices=BLACKLISTS,
        help="what rests in an elastic job when a process has failed: its place, or its whole host, as with horovodrun "
        "(default: seat; with --as-horovod host)",
    )
    add(
        "--spares",
        metavar="N[:warm]",
        help="so many more processes of an elastic job are started, and wait to take the places of those that die; "
        "with :warm they make a PyTorch hvd.elastic.Job's steps meanwhile, without samples, and have its state",
    )
    add(
        "--eject-stragglers",
        metavar="FACTOR[/STEPS]",
        help="replace a process of an elastic job that has made so many steps in a row (50) so much slower for all (3 "
        "is a good number), if another one can take its place or there are enough; otherwise that is only reported",
    )
    add(
        "--resize-limit",
        type=int,
        metavar="N",
        help="end an elastic job that changes its members on purpose more often (--reset-limit: because of failures)",
    )


def add_ssh_options(add: AddArgument) -> None:
    """Add the options of ssh for `parse_ssh_options`."""
    add("-p", "--ssh-port", type=int, metavar="N", help="where sshd listens (default: what ssh's configuration says)")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key (default: the same)")
    add("--ssh-command", default="ssh", metavar="CMD", help="ssh, with options of its own: 'ssh -F FILE'")
    add("--ssh-no-host-key-check", dest="check_host_keys", action="store_false", help="accept unknown hosts")
    add("--remote-python", metavar="FILE", help="the Python there, with Reigen in it (default: this one's path)")


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
    add("--sync-dst-dir", metavar="DIR", help="copy the working directory there first, by rsync, and run in it")
    add(
        "-x",
        "--env",
        dest="exports",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for all ranks, or let one travel that belongs to the host (HOME, TMPDIR, DISPLAY ...)",
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
