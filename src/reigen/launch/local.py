"""Launcher of this host, and the base of those that have nothing to allocate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reigen.errors import ConfigError
from reigen.launch.base import AgentStarter, JobPlan, assign_processes
from reigen.launch.hosts import is_this_host
from reigen.launch.options import LaunchOptions


class FixedLauncher:
    """Launcher for the hosts that the user names: its plan follows from the options, and it holds nothing.

    Raises:
        ConfigError: the hosts have too few slots.
    """

    def __init__(self, options: LaunchOptions, agents: AgentStarter | None) -> None:
        self.options = options
        # hosts and places of an elastic job come and go
        self._plan = JobPlan(() if options.elastic is not None else assign_processes(options), agents)

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan, without waiting."""
        return self._plan

    def close(self) -> tuple[str, ...]:
        """Give nothing back."""
        return ()


def local_launcher(options: LaunchOptions, environ: Mapping[str, str]) -> FixedLauncher:
    """Make the launcher without agents; raises ConfigError where there are other hosts, or too few slots."""
    names = [host.name for host in options.hosts]
    names += [] if options.servers is None else options.servers.hosts
    if remote := [name for name in names if not is_this_host(name)]:
        raise ConfigError(f"--launcher local: {', '.join(remote)} cannot be reached without ssh")
    return FixedLauncher(options, None)
