"""The launcher of `reigen.run`: a process of its own, for the caller may have threads, handlers and no main thread.

It is `reigen run` with another audience: what the command line tells the user, this tells the caller
(``runner.result_channel``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from reigen.errors import ConfigError, LaunchError
from reigen.launch.base import DEFAULT_LAUNCHER
from reigen.launch.hosts import HostInfo
from reigen.launch.job_state import HOST_LOST_EXIT_CODE, FinishJob
from reigen.launch.network_options import NetworkOptions
from reigen.launch.options import JobListener, LaunchOptions
from reigen.launch.payload import CHANNEL_PLACEHOLDER, PAYLOAD_PLACEHOLDER, InheritedDescriptors
from reigen.launch.process_tree import die_with_process
from reigen.launch.ssh.command import SshOptions, check_identity_file
from reigen.launch.supervisor import run_job
from reigen.resources.stdio import open_standard_streams
from reigen.runner.interpreter import module_command
from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, RankExited, ResultChannel, ResultMessage


class LauncherConfig(msgspec.Struct, frozen=True, kw_only=True):
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
        ssh_port: see ``launch.ssh.command``.
        ssh_identity_file: the same.
        launcher: its name (``launch.base.find_launcher``).
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
    launcher: str = DEFAULT_LAUNCHER
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Keep the job that ``arguments[0]``, an Order in JSON, speaks of; returns the exit code."""
    open_standard_streams()
    order = msgspec.json.decode(arguments[0], type=LauncherConfig)
    die_with_process(order.caller)
    line = ResultChannel(order.line)
    try:
        environ = dict(os.environ)
        if order.network_interfaces is not None:
            environ["REIGEN_NETWORK_INTERFACES"] = order.network_interfaces
        return run_job(_options(order, environ), environ, _listener(line), launcher=order.launcher)
    except (ConfigError, LaunchError) as error:
        _send_message(line, LauncherComplaint(str(error)))
        return 1


def _options(order: LauncherConfig, environ: Mapping[str, str]) -> LaunchOptions:
    ssh = SshOptions(port=order.ssh_port, identity_file=check_identity_file(order.ssh_identity_file))
    return LaunchOptions(
        command=module_command("reigen.runner.task", [PAYLOAD_PLACEHOLDER, CHANNEL_PLACEHOLDER], order.executable),
        num_ranks=order.num_ranks,
        start_timeout_seconds=order.start_timeout_seconds,
        output_directory=None if order.output_directory is None else Path(order.output_directory),
        verbose=order.verbose,
        inherited=InheritedDescriptors(order.call, order.line),
        hosts=tuple(HostInfo(name, slots) for name, slots in order.hosts),
        ssh=ssh if order.executable is None else replace(ssh, python=order.executable),
        network=NetworkOptions.of(environ),
    )


def _listener(line: ResultChannel) -> JobListener:
    def finished(finish: FinishJob) -> None:
        _send_message(line, LauncherFinished(finish.signum))

    def lost(ranks: Sequence[int], reason: str) -> None:
        _send_message(line, LauncherComplaint(reason))
        for rank in ranks:
            _send_message(line, RankExited(rank, HOST_LOST_EXIT_CODE))

    return JobListener(
        complain=lambda text: _send_message(line, LauncherComplaint(text)),
        exited=lambda rank, exit_code, cause: _send_message(line, RankExited(rank, exit_code, cause)),
        lost=lost,
        finished=finished,
    )


def _send_message(line: ResultChannel, message: ResultMessage) -> None:
    with suppress(OSError):  # the caller has gone, and so will this process
        line.send(message)
