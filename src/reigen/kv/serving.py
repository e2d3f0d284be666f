"""Being a scheduler: what a process does whose part in the job is not to run the user's program."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from reigen import log
from reigen.cluster.environ import PREFIXED_VARIABLE
from reigen.config import LOG_LEVELS, Config
from reigen.errors import ReigenError
from reigen.kv import scheduler
from reigen.kv.roles import Role, Settings, find

_log = logging.getLogger(__name__)


def main(environ: Mapping[str, str], config: Config, role: Role) -> int:
    """`reigen scheduler`: serve; returns the exit code.

    Raises:
        ConfigError: the environment does not say of what job, or contradicts itself.
    """
    settings = find(environ, config, role)
    show_messages(settings, environ)
    return _serve(settings)


def show_messages(settings: Settings, environ: Mapping[str, str]) -> None:
    """Show log messages, those of connections too with PS_VERBOSE=1, and of messages with 2."""
    config = settings.config
    level = min("info" if config.kv_verbose else config.log_level, config.log_level, key=LOG_LEVELS.index)
    node = "" if environ.get(PREFIXED_VARIABLE) else settings.name
    log.attach(level, hide_time=config.log_hide_time, node=node)


def _serve(settings: Settings) -> int:
    """Serve until the job is over; returns the exit code."""
    try:
        return scheduler.run(settings)
    except (ReigenError, OSError) as error:  # told here: a program that catches it must not run on in this process
        _log.critical("%s", error)
        return 1
