"""Launcher of `reigen.run`: a process of its own, for the caller may have threads, handlers and no main thread.

It is `reigen run`, but for its messages: they go to the caller (``runner.result_channel``), not to the user.
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
from reigen.launch.job_state import HOST_LOST_EXIT_CODE, FinishJob, ProcessExited
from reigen.launch.network_options import NetworkOptions
from reigen.launch.options import JobListener, LaunchOptions
from reigen.launch.payload import CHANNEL_PLACEHOLDER, PAYLOAD_PLACEHOLDER, InheritedDescriptors
from reigen.launch.ssh.command import SshOptions, check_identity_file
from reigen.launch.supervision.process_tree import die_with_process
from reigen.launch.supervision.supervisor import run_job
from reigen.resources.stdio import open_standard_streams
from reigen.runner.interpreter import module_command
from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, ResultChannel, ResultMessage


class LauncherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the launcher, on its command line. Nothing in it is secret.

    Attributes:
        caller: process id of the caller.
        payload: descriptor of the payload with the function and its arguments.
        channel: descriptor of the channel to the caller.
        executable: the Python of the ranks, or None for this one.
        hosts: names and slots; empty: this host alone.
        network_interfaces: those that may be used, with commas between them; None: as in the environment.
    """

    caller: int
    payload: int
    channel: int
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
    """Run the job of ``arguments[0]``, a LauncherConfig in JSON; return the exit code."""
    open_standard_streams()
    config = msgspec.json.decode(arguments[0], type=LauncherConfig)
    die_with_process(config.caller)
    channel = ResultChannel(config.channel)
    try:
        environ = dict(os.environ)
        if config.network_interfaces is not None:
            environ["REIGEN_NETWORK_INTERFACES"] = config.network_interfaces
        return run_job(_options(config, environ), environ, _listener(channel), launcher=config.launcher)
    except (ConfigError, LaunchError) as error:
        _send_message(channel, LauncherComplaint(str(error)))
        return 1


def _options(config: LauncherConfig, environ: Mapping[str, str]) -> LaunchOptions:
    ssh = SshOptions(port=config.ssh_port, identity_file=check_identity_file(config.ssh_identity_file))
    return LaunchOptions(
        command=module_command("reigen.runner.task", [PAYLOAD_PLACEHOLDER, CHANNEL_PLACEHOLDER], config.executable),
        num_ranks=config.num_ranks,
        start_timeout_seconds=config.start_timeout_seconds,
        output_directory=None if config.output_directory is None else Path(config.output_directory),
        verbose=config.verbose,
        inherited=InheritedDescriptors(config.payload, config.channel),
        hosts=tuple(HostInfo(name, slots) for name, slots in config.hosts),
        ssh=ssh if config.executable is None else replace(ssh, python=config.executable),
        network=NetworkOptions.from_environ(environ),
    )


def _listener(channel: ResultChannel) -> JobListener:
    def finished(finish: FinishJob) -> None:
        _send_message(channel, LauncherFinished(finish.signum))

    def lost(ranks: Sequence[int], reason: str) -> None:
        _send_message(channel, LauncherComplaint(reason))
        for rank in ranks:
            _send_message(channel, ProcessExited(rank, HOST_LOST_EXIT_CODE))

    return JobListener(
        complain=lambda text: _send_message(channel, LauncherComplaint(text)),
        exited=lambda event: _send_message(channel, event),
        lost=lost,
        finished=finished,
    )


def _send_message(channel: ResultChannel, message: ResultMessage) -> None:
    with suppress(OSError):  # the caller has gone, and so will this process
        channel.send(message)
