"""Stand-in machines on one computer, made of Linux namespaces; their network can be slowed and cut."""

from tests.lab.hosts import Host, Hosts
from tests.lab.machine import Counters, HostProcess, MachineError
from tests.lab.support import Unavailable, why_unavailable

__all__ = ["Counters", "Host", "HostProcess", "Hosts", "MachineError", "Unavailable", "why_unavailable"]
