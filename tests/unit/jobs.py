"""Jobs whose ranks are threads of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reigen.cluster.rendezvous import LocalRendezvous
from reigen.cluster.topology import Topology
from reigen.config import Config
from reigen.context import Context
from reigen.testing import run_threads


def between(size: int, act: Callable[[Context], Any], **knobs: Any) -> list[Any]:
    """``act(context)`` on ranks that are threads; they leave when all have finished."""

    def run(rank: int, rendezvous: LocalRendezvous) -> Any:
        job = Context(Topology.on_one_host(rank, size), Config(plane="shm", **knobs), rendezvous)
        try:
            return act(job)
        finally:
            rendezvous.put(f"done {rank}", b"")
            for other in range(size):
                rendezvous.get(f"done {other}", 30.0)
            job.close()

    return run_threads(run, size)
