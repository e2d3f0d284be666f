"""Stand-in machines on one computer, made of Linux namespaces; their network can be slowed and cut."""

from reigen.testing.hosts.hosts import Host, Hosts
from reigen.testing.hosts.machine import Counters, HostProcess, MachineError
from reigen.testing.hosts.support import Unavailable, why_unavailable

__all__ = ["Counters", "Host", "HostProcess", "Hosts", "MachineError", "Unavailable", "why_unavailable"]
