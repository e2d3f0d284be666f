"""`reigen COMMAND ...`: finds the command's module and gives it the rest of the line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from reigen._version import __version__
from reigen.resources.stdio import open_standard_streams

#: Command -> its description. Module ``reigen.cli.COMMAND`` has ``main(arguments) -> exit code`` and is imported when
#: it is needed: `reigen run` must start fast.
COMMANDS = {
    "run": "start a job: the same command in several processes",
    "attach": "take the place of a launcher that was lost, or list jobs that go on without one",
    "top": "show the ranks of a running job as a live table",
    "launch": "the same with parameter servers, and with the options of MXNet's launch.py",
    "server": "run a parameter server of the job that the environment describes",
    "scheduler": "run the scheduler of that job",
    "check": "show what is installed here, and whether and how jobs can run",
    "migrate": "find what to change in a project for Horovod, torch.distributed or MXNet, and change it",
    "bench": "measure Reigen and its peers in one run",
    "trace": "summarize a timeline: what bounded the job, and what to do about it",
    "plan": "predict speed and cost on a described cluster, and the best number of servers",
}


#: Commands that only write a text, which may be read in part; and the exit code of programs that end by SIGPIPE.
_REPORTS = ("check", "migrate", "plan", "trace")
_OF_SIGPIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with ``arguments``, by default this process's; returns the exit code."""
    open_standard_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in COMMANDS:
        module = importlib.import_module(f"reigen.cli.{arguments[0]}")
        try:
            code: int = module.main(arguments[1:])
            if arguments[0] in _REPORTS:
                sys.stdout.flush()
        except BrokenPipeError:
            if arguments[0] not in _REPORTS:
                raise
            # `reigen migrate . | head`: what is left to be written at exit goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return _OF_SIGPIPE
        return code
    parser = argparse.ArgumentParser(
        prog="reigen",
        description="Data-parallel training of one model on many processes.",
        epilog="\n".join(["commands:", *(f"  {name:10}{text}" for name, text in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"reigen {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), help="see below; `reigen COMMAND --help` says more")
    parser.parse_args(arguments)
    return 2
