"""Tools for tests of Reigen and of packages on top: ranks, leak checks, suites for backends, adapters and launchers."""

from reigen.testing.adapters import Differentiate, check_adapter
from reigen.testing.backends import MakeBackend, check_backend, check_rank
from reigen.testing.failures import RankError, RankFailure
from reigen.testing.launchers import check_launcher
from reigen.testing.leaks import LeakCheck, LeakError, Resources
from reigen.testing.memory_network import Hub, MemoryNetwork
from reigen.testing.pool import PoolCache, RankPool, run_ranks
from reigen.testing.threads import run_threads

__all__ = [
    "Differentiate",
    "Hub",
    "LeakCheck",
    "LeakError",
    "MakeBackend",
    "MemoryNetwork",
    "PoolCache",
    "RankError",
    "RankFailure",
    "RankPool",
    "Resources",
    "check_adapter",
    "check_backend",
    "check_launcher",
    "check_rank",
    "run_ranks",
    "run_threads",
]
