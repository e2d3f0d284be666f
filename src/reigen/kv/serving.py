"""Taking one's part in a job with parameter servers: workers join it, servers and the scheduler serve until its end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Mapping

from reigen import log
from reigen.cluster.environ import PREFIXED_VARIABLE
from reigen.config import LOG_LEVELS, Config, load
from reigen.errors import ConfigError, ReigenError
from reigen.kv import scheduler
from reigen.kv.access import own_host
from reigen.kv.member import Member
from reigen.kv.roles import Role, Settings, find

_log = logging.getLogger(__name__)


def become_worker(environ: Mapping[str, str], knobs: Mapping[str, object]) -> Member:
    """Join the job as a worker. A server or a scheduler serves instead, and then exits: this does not return.

    Args:
        environ: environment variables.
        knobs: by the names of `reigen.config.Config`; they win over ``environ``.

    Raises:
        ConfigError: the environment does not say what this process is, or contradicts itself.
        SystemExit: of a server or a scheduler, when the job is over, or if it cannot serve.
        AuthenticationError, DeadlineError: see `Member.join`.
    """
    try:
        settings = find(environ, load(environ, knobs))
    except ConfigError as error:
        if environ.get("DMLC_ROLE", "").lower() in {"server", "scheduler"}:
            raise SystemExit(f"reigen: {error}") from None
        raise
    show_messages(settings, environ)
    if settings.role != "worker":
        code = 1
        try:
            code = _serve(settings, environ)
        except Exception:  # noqa: BLE001  a program that catches it would run on in this process
            _log.critical("this %s has failed", settings.name, exc_info=True)
        raise SystemExit(code)
    return _joined(settings, None, environ)


#: New objects after which Python looks for cycles; requests under way are among them.
_OBJECTS_TILL_COLLECTION = 20_000


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
    except (ReigenError, OSError) as error:
        _log.critical("%s", error)
        return 1


def _be_server(settings: Settings, environ: Mapping[str, str]) -> int:
    from reigen.kv.server import Server, listen

    host, why = own_host(settings)
    listener, address = listen(host)
    with contextlib.closing(listener):
        _log.info("this server listens at %s: %s", address, why)
        with (
            contextlib.closing(_joined(settings, address, environ)) as member,
            contextlib.closing(Server(member, settings.config, listener)) as server,
        ):
            # What was imported stays, and what serves requests leaves no cycles: there is little to be collected.
            gc.freeze()
            gc.set_threshold(_OBJECTS_TILL_COLLECTION)
            return server.serve()


def _joined(settings: Settings, address: str | None, environ: Mapping[str, str]) -> Member:
    member = Member.join(settings, address, time.monotonic() + settings.config.start_timeout_seconds)
    show_messages(dataclasses.replace(settings, number=member.number), environ)
    return member
