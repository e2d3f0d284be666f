"""Jobs whose ranks are threads of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reigen.cluster.host_discovery import HostLayout
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.config import Config
from reigen.context import Context
from reigen.engine_factory import JobRendezvous
from reigen.testing import run_threads

_SECRET = bytes(range(32))


def between(
    size: int, act: Callable[[Context], Any], prepare: Callable[[Context], None] = lambda _: None, **knobs: Any
) -> list[Any]:
    """``act(context)`` on ranks of one host; they leave when all have finished. Each is prepared first."""

    def meet(rank: int, rendezvous: Rendezvous) -> JobRendezvous:
        return JobRendezvous(HostLayout(rank, (tuple(range(size)),), ("here",) * size), rendezvous)

    return _run(size, meet, act, prepare, knobs)


def across(machines: Sequence[Sequence[int]], act: Callable[[Context], Any], **knobs: Any) -> list[Any]:
    """``act(context)`` on ranks of several hosts, which are one; they leave when all have finished."""
    size = sum(map(len, machines))
    server = ControlService(_SECRET)
    server.start()

    def meet(rank: int, rendezvous: Rendezvous) -> JobRendezvous:
        layout = HostLayout(rank, tuple(map(tuple, machines)), tuple(f"host{rank}" for rank in range(size)))
        return JobRendezvous(layout, rendezvous, 0, server.address, _SECRET, "test")

    try:
        return _run(size, meet, act, lambda _: None, knobs)
    finally:
        server.close()


def _run(
    size: int,
    meet: Callable[[int, Rendezvous], JobRendezvous],
    act: Callable[[Context], Any],
    prepare: Callable[[Context], None],
    knobs: dict[str, Any],
) -> list[Any]:
    def run(rank: int, rendezvous: Rendezvous) -> Any:
        job = Context(Config(**knobs), meet(rank, rendezvous))
        try:
            prepare(job)
            return act(job)
        finally:
            rendezvous.put(f"done {rank}", b"")
            for other in range(size):
                rendezvous.get(f"done {other}", 30.0)
            job.close()

    return run_threads(run, size)
