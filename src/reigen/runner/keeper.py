"""The launcher of `reigen.run`: a process of its own, for the caller may have threads, handlers and no main thread.

It is `reigen run` with another audience: what the command line tells the user, this tells the caller (``runner.line``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from reigen.errors import ConfigError, LaunchError
from reigen.launch.job import Finish
from reigen.launch.options import Listener, Options
from reigen.launch.processes import die_with
from reigen.launch.supervise import run_job
from reigen.runner.interpreter import command
from reigen.runner.line import Complaint, Ended, Exited, Line, Message


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper is asked for, on its command line. Nothing in it is secret.

    Attributes:
        caller: process id of the caller.
        call: descriptor of the parcel that holds the function and its arguments.
        line: descriptor of the line to the caller.
        num_ranks: how many processes.
        start_timeout_seconds: how long ``init()`` waits for all ranks, None for its default.
        output_directory: see ``launch.options``.
        verbose: see ``launch.options``.
        executable: the Python of the ranks, or None for this one.
    """

    caller: int
    call: int
    line: int
    num_ranks: int
    start_timeout_seconds: float | None = None
    output_directory: str | None = None
    verbose: bool = False
    executable: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Keep the job that ``arguments[0]``, an Order in JSON, speaks of; returns the exit code."""
    order = msgspec.json.decode(arguments[0], type=Order)
    die_with(order.caller)
    line = Line(order.line)
    try:
        return run_job(_options(order), os.environ, _listener(line))
    except (ConfigError, LaunchError) as error:
        _say(line, Complaint(str(error)))
        return 1


def _options(order: Order) -> Options:
    descriptors = order.call, order.line
    return Options(
        command=command("reigen.runner.task", list(map(str, descriptors)), order.executable),
        num_ranks=order.num_ranks,
        start_timeout_seconds=order.start_timeout_seconds,
        output_directory=None if order.output_directory is None else Path(order.output_directory),
        verbose=order.verbose,
        descriptors=descriptors,
    )


def _listener(line: Line) -> Listener:
    def finished(finish: Finish) -> None:
        _say(line, Ended(finish.signum))

    return Listener(
        complain=lambda text: _say(line, Complaint(text)),
        exited=lambda rank, exit_code: _say(line, Exited(rank, exit_code)),
        finished=finished,
    )


def _say(line: Line, message: Message) -> None:
    with suppress(OSError):  # the caller has gone, and so will this process
        line.send(message)
