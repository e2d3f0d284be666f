"""The launcher of `reigen.run`: a process of its own, for the caller may have threads, handlers and no main thread.

It is `reigen run` with another audience: what the command line tells the user, this tells the caller (``runner.line``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from reigen.errors import ConfigError, LaunchError
from reigen.launch.hosts import Host
from reigen.launch.job import LOST, Finish
from reigen.launch.luggage import LINE_WORD, PARCEL_WORD, Luggage
from reigen.launch.network import Network
from reigen.launch.options import Listener, Options
from reigen.launch.processes import die_with
from reigen.launch.ssh import Ssh, key_file
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
        hosts: names and slots; empty: this host alone.
        ssh_port: see ``launch.ssh``.
        ssh_identity_file: the same.
        network_interfaces: those that may be used, with commas between them; None: what the environment says.
    """

    caller: int
    call: int
    line: int
    num_ranks: int
    start_timeout_seconds: float | None = None
    output_directory: str | None = None
    verbose: bool = False
    executable: str | None = None
    hosts: tuple[tuple[str, int], ...] = ()
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Keep the job that ``arguments[0]``, an Order in JSON, speaks of; returns the exit code."""
    order = msgspec.json.decode(arguments[0], type=Order)
    die_with(order.caller)
    line = Line(order.line)
    try:
        environ = dict(os.environ)
        if order.network_interfaces is not None:
            environ["REIGEN_NETWORK_INTERFACES"] = order.network_interfaces
        return run_job(_options(order, environ), environ, _listener(line))
    except (ConfigError, LaunchError) as error:
        _say(line, Complaint(str(error)))
        return 1


def _options(order: Order, environ: Mapping[str, str]) -> Options:
    ssh = Ssh(port=order.ssh_port, identity_file=key_file(order.ssh_identity_file))
    return Options(
        command=command("reigen.runner.task", [PARCEL_WORD, LINE_WORD], order.executable),
        num_ranks=order.num_ranks,
        start_timeout_seconds=order.start_timeout_seconds,
        output_directory=None if order.output_directory is None else Path(order.output_directory),
        verbose=order.verbose,
        luggage=Luggage(order.call, order.line),
        hosts=tuple(Host(name, slots) for name, slots in order.hosts),
        ssh=ssh if order.executable is None else replace(ssh, python=order.executable),
        network=Network.of(environ),
    )


def _listener(line: Line) -> Listener:
    def finished(finish: Finish) -> None:
        _say(line, Ended(finish.signum))

    def lost(ranks: Sequence[int], reason: str) -> None:
        _say(line, Complaint(reason))
        for rank in ranks:
            _say(line, Exited(rank, LOST))

    return Listener(
        complain=lambda text: _say(line, Complaint(text)),
        exited=lambda rank, exit_code: _say(line, Exited(rank, exit_code)),
        lost=lost,
        finished=finished,
    )


def _say(line: Line, message: Message) -> None:
    with suppress(OSError):  # the caller has gone, and so will this process
        line.send(message)
