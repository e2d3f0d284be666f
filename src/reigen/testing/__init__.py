"""For tests of what is built on Reigen, and of Reigen: ranks, leak checks, the conformance suite of data planes."""

from reigen.testing.failures import RankError, RankFailure
from reigen.testing.leaks import LeakCheck, LeakError, Resources
from reigen.testing.network import Hub, MemoryNetwork
from reigen.testing.planes import MakePlane, check_plane, check_rank
from reigen.testing.pool import PoolCache, RankPool, run_ranks
from reigen.testing.threads import run_threads

__all__ = [
    "Hub",
    "LeakCheck",
    "LeakError",
    "MakePlane",
    "MemoryNetwork",
    "PoolCache",
    "RankError",
    "RankFailure",
    "RankPool",
    "Resources",
    "check_plane",
    "check_rank",
    "run_ranks",
    "run_threads",
]
