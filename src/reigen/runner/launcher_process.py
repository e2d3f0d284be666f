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
from reigen.launch.job_state import HOST_LOST_EXIT_CODE, FinishJob, ProcessExited
from reigen.launch.local_plan import JobServices
from reigen.launch.metrics.options import DashboardAddress, MetricsAddress, MetricsOptions
from reigen.launch.options import JobListener, LaunchOptions, NetworkOptions
from reigen.launch.payload import CHANNEL_PLACEHOLDER, PAYLOAD_PLACEHOLDER, InheritedDescriptors
from reigen.launch.ps_processes import ServerOptions
from reigen.launch.ssh.command import SshOptions, check_identity_file
from reigen.launch.supervision.process_tree import die_with_process
from reigen.launch.supervision.supervisor import run_job
from reigen.resources.stdio import open_standard_streams
from reigen.runner.engine_channel import EngineChannel, RanksStarted
from reigen.runner.engine_launcher import EngineLauncher, EngineSettings
from reigen.runner.interpreter import module_command
from reigen.runner.options import RunSettings
from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, ResultChannel, ResultMessage


def main(arguments: Sequence[str]) -> int:
    """Run a job; returns the exit code.

    ``arguments`` are RunSettings in JSON, the caller's process id, and the descriptors of the payload with the function
    and of the channel to the caller; where the caller has the hosts of an engine, also those of a payload with
    EngineSettings in JSON, and of the channel for its agents (``runner.engine_channel``).
    """
    open_standard_streams()
    settings = msgspec.json.decode(arguments[0], type=RunSettings)
    caller, payload, channel_fd, *of_engine = map(int, arguments[1:])
    die_with_process(caller)
    channel, inherited = ResultChannel(channel_fd), InheritedDescriptors(payload, channel_fd)
    try:
        environ = dict(os.environ)
        if settings.network_interfaces is not None:
            environ["REIGEN_NETWORK_INTERFACES"] = settings.network_interfaces
        options = _options(settings, inherited, environ)
        environ |= {} if options.servers is None else options.servers.variables
        if not of_engine:
            return run_job(options, environ, _listener(channel), launcher=settings.launcher)
        return _run_on_engine(options, environ, _listener(channel), of_engine)
    except (ConfigError, LaunchError) as error:
        _send_message(channel, LauncherComplaint(str(error)))
        return 1


def _run_on_engine(
    options: LaunchOptions, environ: Mapping[str, str], listener: JobListener, descriptors: Sequence[int]
) -> int:
    """Run a job on the hosts that the caller's engine has given to it."""
    payload, channel_fd = descriptors
    text = os.pread(payload, os.fstat(payload).st_size, 0)
    os.close(payload)
    settings, channel = msgspec.json.decode(text, type=EngineSettings), EngineChannel(channel_fd)

    def tell(services: JobServices) -> None:
        with suppress(OSError):  # the caller has gone, and so will this process
            channel.post(RanksStarted(services.rendezvous, services.secret))

    return run_job(
        options,
        environ,
        replace(listener, started=tell),
        launcher=lambda options, environ: EngineLauncher(options, settings, channel),
    )


def _options(settings: RunSettings, inherited: InheritedDescriptors, environ: Mapping[str, str]) -> LaunchOptions:
    ssh = SshOptions(port=settings.ssh_port, identity_file=check_identity_file(settings.ssh_identity_file))
    return LaunchOptions(
        command=module_command("reigen.runner.task", [PAYLOAD_PLACEHOLDER, CHANNEL_PLACEHOLDER], settings.executable),
        num_ranks=settings.num_ranks,
        start_timeout_seconds=settings.start_timeout_seconds,
        output_directory=None if settings.output_directory is None else Path(settings.output_directory),
        verbose=settings.verbose,
        prefix=settings.prefix,
        timestamps=settings.timestamps,
        grace_seconds=settings.grace_seconds,
        inherited=inherited,
        hosts=settings.hosts,
        servers=ServerOptions(settings.num_servers, replicas=settings.replicate_servers, max_num=settings.max_servers)
        if settings.num_servers
        else None,
        elastic=settings.elastic,
        ssh=ssh if settings.executable is None else replace(ssh, python=settings.executable),
        network=NetworkOptions.from_environ(environ),
        metrics=_metrics(settings, environ),
    )


def _metrics(settings: RunSettings, environ: Mapping[str, str]) -> MetricsOptions:
    return MetricsOptions(
        None if settings.metrics_port is None else MetricsAddress.parse(settings.metrics_port, environ),
        None if settings.metrics_file is None else Path(settings.metrics_file),
        None if settings.dashboard is None else DashboardAddress.parse(settings.dashboard, environ),
    )


def _listener(channel: ResultChannel) -> JobListener:
    def lost(ranks: Sequence[int], reason: str) -> None:
        _send_message(channel, LauncherComplaint(reason))
        for rank in ranks:
            _send_message(channel, ProcessExited(rank, HOST_LOST_EXIT_CODE))

    members: list[tuple[int, ...]] = []
    descriptions: list[str] = []

    def finished(finish: FinishJob) -> None:
        if not members:
            text = "".join(descriptions).removeprefix("reigen run: ").rstrip()
            _send_message(channel, LauncherFinished(finish.signum, server_failure=text))
            return
        failure = finish.failure
        failed, cause = (None, "") if failure is None else (failure.rank, failure.reason or failure.cause)
        _send_message(channel, LauncherFinished(finish.signum, members[0], finish.exit_code, failed, cause))

    return JobListener(
        complain=lambda text: _send_message(channel, LauncherComplaint(text)),
        exited=lambda event: _send_message(channel, event),
        lost=lost,
        members=lambda slots: members.append(tuple(slots)),
        finished=finished,
        described=descriptions.append,
    )


def _send_message(channel: ResultChannel, message: ResultMessage) -> None:
    with suppress(OSError):  # the caller has gone, and so will this process
        channel.post(message)
