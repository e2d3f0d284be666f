"""`reigen run -np N COMMAND ...`: the same command in N processes that form one job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from reigen.compat import as_horovod
from reigen.errors import ConfigError, LaunchError
from reigen.launch.local import BINDINGS
from reigen.launch.options import Options, complain
from reigen.launch.supervise import run_local

_EPILOG = """\
The command and its arguments are passed on as they are, without a shell; `--` may stand before them. Its output comes
line by line with the rank in front. When a process fails, the others are stopped, its last words are printed last, and
its exit code is that of `reigen run` (128 + n for a signal n).

example: reigen run -np 4 python train.py --epochs 3
"""


def main(arguments: Sequence[str]) -> int:
    """Run a job; returns the exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    try:
        options = Options(
            command=tuple(command),
            num_ranks=chosen.num_ranks,
            bind=chosen.bind,
            grace_seconds=chosen.grace_seconds,
            start_timeout_seconds=chosen.start_timeout,
            prefix=chosen.prefix,
            verbose=chosen.verbose,
            output_directory=chosen.output_directory,
        )
    except ConfigError as error:
        parser.error(str(error))
    try:
        return run_local(options, as_horovod(os.environ) if chosen.as_horovod else os.environ)
    except LaunchError as error:
        complain(str(error))
        return error.exit_code


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds greater than 0, not {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reigen run",
        description="Start a job on this machine: the same command in N processes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="reigen run -np N [options] command ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", dest="num_ranks", type=int, required=True, metavar="N", help="how many processes")
    add(
        "--bind",
        choices=BINDINGS,
        help="bind ranks to processors, or do not (default: where there is at least one for each rank)",
    )
    add(
        "--grace-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="time between asking a process to stop and killing it (default: 5)",
    )
    add("--start-timeout", type=_seconds, metavar="S", help="how long init() waits for all ranks")
    add("--no-prefix", dest="prefix", action="store_false", help="print lines without their rank")
    add("--as-horovod", action="store_true", help="`import horovod` finds Reigen, in the command and what it starts")
    add("--verbose", action="store_true", help="say what is started, where, and why there")
    add(
        "--output-filename",
        dest="output_directory",
        type=Path,
        metavar="DIR",
        help="keep what each rank prints in DIR/rank.N/stdout and DIR/rank.N/stderr, too",
    )
    add("command", nargs=argparse.REMAINDER, metavar="command ...", help="what to run in each process")
    return parser
