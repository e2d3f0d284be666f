"""Being a server or a scheduler: what a process does whose part in the job is not to run the user's program."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping

from reigen import log
from reigen.cluster.environ import PREFIXED_VARIABLE
from reigen.config import LOG_LEVELS, Config
from reigen.errors import ConfigError, ReigenError
from reigen.kv import scheduler
from reigen.kv.access import own_host
from reigen.kv.member import Member
from reigen.kv.roles import Role, Settings, find

_log = logging.getLogger(__name__)


def take_part(environ: Mapping[str, str], config: Config) -> Settings:
    """What this process is, if it is a worker. A server or a scheduler serves, and then exits: this does not return.

    Raises:
        ConfigError: the environment does not say what it is, or contradicts itself.
        SystemExit: of a server or a scheduler, when the job is over, or if it cannot serve.
    """
    try:
        settings = find(environ, config)
    except ConfigError as error:
        if environ.get("DMLC_ROLE", "").lower() in {"server", "scheduler"}:
            raise SystemExit(f"reigen: {error}") from None
        raise
    show_messages(settings, environ)
    if settings.role == "worker":
        return settings
    raise SystemExit(_serve(settings, environ))


def main(environ: Mapping[str, str], config: Config, role: Role) -> int:
    """`reigen server` and `reigen scheduler`: serve; returns the exit code.

    Raises:
        ConfigError: the environment does not say of what job, or contradicts itself.
    """
    settings = find(environ, config, role)
    show_messages(settings, environ)
    return _serve(settings, environ)


def show_messages(settings: Settings, environ: Mapping[str, str]) -> None:
    """Show log messages, those of connections too with PS_VERBOSE=1, and of messages with 2."""
    config = settings.config
    level = min("info" if config.kv_verbose else config.log_level, config.log_level, key=LOG_LEVELS.index)
    node = "" if environ.get(PREFIXED_VARIABLE) else settings.name
    log.attach(level, hide_time=config.log_hide_time, node=node)


def _serve(settings: Settings, environ: Mapping[str, str]) -> int:
    """Serve until the job is over; returns the exit code."""
    try:
        return scheduler.run(settings) if settings.role == "scheduler" else _be_server(settings, environ)
    except (ReigenError, OSError) as error:  # told here: a program that catches it must not run on in this process
        _log.critical("%s", error)
        return 1


def _be_server(settings: Settings, environ: Mapping[str, str]) -> int:
    from reigen.kv.server import Server, listen

    host, why = own_host(settings)
    listener, address = listen(host)
    with contextlib.closing(listener):
        _log.info("this server listens at %s: %s", address, why)
        deadline = time.monotonic() + settings.config.start_timeout_seconds
        with contextlib.closing(Member.join(settings, address, deadline)) as member:
            show_messages(dataclasses.replace(settings, number=member.number), environ)
            with contextlib.closing(Server(member, settings.config, listener)) as server:
                return server.serve()
