"""Launcher that starts everything on this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reigen.errors import ConfigError
from reigen.launch.base import JobPlan, assign_processes
from reigen.launch.hosts import is_this_host
from reigen.launch.options import LaunchOptions


class LocalLauncher:
    """Ranks and servers as children of the supervisor; no agent.

    Raises:
        ConfigError: there are other hosts among those that were named, or too few slots.
    """

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        names = [host.name for host in options.hosts]
        names += [] if options.servers is None else options.servers.hosts
        if remote := [name for name in names if not is_this_host(name)]:
            raise ConfigError(f"--launcher local: {', '.join(remote)} cannot be reached without ssh")
        self.options = options
        self._plan = JobPlan(assign_processes(options))

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan, without waiting."""
        return self._plan

    def close(self) -> tuple[str, ...]:
        """Hold nothing that has to be given back."""
        return ()
