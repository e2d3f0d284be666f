"""Roles in a job with parameter servers: workers join it, servers and the scheduler serve until its end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping

from reigen import log
from reigen.cluster.environ import PREFIXED_VARIABLE
from reigen.cluster.membership.messages import SavedJob
from reigen.config import LOG_LEVELS, Config, load_config
from reigen.context import report_metrics
from reigen.errors import ConfigError, ReigenError
from reigen.kv.membership.discovery import choose_listen_host
from reigen.kv.membership.environment import KVRole, ProcessConfig, read_process_config
from reigen.kv.membership.scheduler import Scheduler
from reigen.kv.membership.scheduler_client import SavedJobFinder, SchedulerClient
from reigen.observe.metrics import add_source, finish_reporting

_log = logging.getLogger(__name__)


def join_as_worker(environ: Mapping[str, str], knobs: Mapping[str, object]) -> SchedulerClient:
    """Join the job as a worker. A server or a scheduler serves instead, and then exits: this does not return.

    ``knobs``, by the names of `reigen.config.Config`, win over ``environ``.

    Raises:
        ConfigError: the environment does not say what this process is, or contradicts itself.
        SystemExit: of a server or a scheduler, when the job is over, or if it cannot serve.
        AuthenticationError, DeadlineError: see `SchedulerClient`.
    """
    try:
        settings = read_process_config(environ, load_config(environ, knobs))
    except ConfigError as error:
        if environ.get("DMLC_ROLE", "").lower() in {"server", "scheduler"}:
            raise SystemExit(f"reigen: {error}") from None
        raise
    configure_logging(settings, environ)
    if settings.role != "worker":
        code = 1
        try:
            code = _run_role(settings, environ)
        except Exception:  # noqa: BLE001  a program that catches it would run on in this process
            _log.critical("this %s has failed", settings.name, exc_info=True)
        raise SystemExit(code)
    return _join_job(settings, "", environ)


def run_role(environ: Mapping[str, str], config: Config, role: KVRole) -> int:
    """`reigen server` and `reigen scheduler`: serve; returns the exit code.

    Raises:
        ConfigError: the environment does not say of what job, or contradicts itself.
    """
    settings = read_process_config(environ, config, role)
    configure_logging(settings, environ)
    return _run_role(settings, environ)


def configure_logging(settings: ProcessConfig, environ: Mapping[str, str]) -> None:
    """Show log messages, those of connections too with PS_VERBOSE=1, and of messages with 2."""
    config = settings.config
    level = min("info" if config.kv_verbose else config.log_level, config.log_level, key=LOG_LEVELS.index)
    node = "" if environ.get(PREFIXED_VARIABLE) else settings.name
    log.attach(level, hide_time=config.log_hide_time, node=node)


def _run_role(settings: ProcessConfig, environ: Mapping[str, str]) -> int:
    """Serve until the job is over; returns the exit code."""
    try:
        if settings.role == "scheduler":
            with contextlib.closing(Scheduler(settings, environ)) as scheduler:
                return scheduler.serve()
        if settings.servers_move:
            from reigen.kv.server.server_process import ServerProcess

            return ServerProcess(settings, environ).run()
        return _run_server(settings, environ)
    except (ReigenError, OSError) as error:
        _log.critical("%s", error)
        return 1


def _run_server(settings: ProcessConfig, environ: Mapping[str, str]) -> int:
    from reigen.kv.server.server import KVServer, limit_garbage_collection
    from reigen.kv.server.snapshots import find_saved_jobs
    from reigen.net.listener import open_listening_socket

    host, why = choose_listen_host(settings)
    listening, address = open_listening_socket(host)
    with contextlib.closing(listening):
        _log.info("this server listens at %s: %s", address, why)
        directory = settings.config.kv_snapshot_dir
        saved: list[SavedJob] = []

        def find_saved(secret: bytes) -> tuple[SavedJob, ...]:
            saved[:] = () if directory is None else find_saved_jobs(directory, secret)
            return tuple(saved)

        with (
            contextlib.closing(_join_job(settings, address, environ, find_saved)) as member,
            contextlib.closing(KVServer(member, settings.config, listening)) as server,
        ):
            if earlier := [f"{each.job:016x}" for each in saved if each.job != member.job]:
                text = "%s has snapshots of earlier jobs with this secret, which this one does not read: job-*-%s"
                _log.warning(text, directory, ", ".join(earlier))
            add_source(server)
            report_metrics(environ, settings.config, "server")
            limit_garbage_collection()
            try:
                return server.serve()
            finally:
                finish_reporting()


def _join_job(
    settings: ProcessConfig,
    address: str,
    environ: Mapping[str, str],
    find_saved: SavedJobFinder = lambda secret: (),
) -> SchedulerClient:
    member = SchedulerClient(settings, address, time.monotonic() + settings.config.start_timeout_seconds, find_saved)
    configure_logging(dataclasses.replace(settings, number=member.number), environ)
    return member
