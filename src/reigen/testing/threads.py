"""Ranks as threads of the test: for logic that needs no processes."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.testing.failures import RankError, RankFailure


def run_threads(func: Callable[[int, LocalRendezvous], Any], size: int, *, timeout: float = 120.0) -> list[Any]:
    """Call ``func(rank, rendezvous)`` in ``size`` threads at the same time, with one rendezvous for all.

    Threads cannot be stopped: those that are late after ``timeout`` seconds stay, as daemons.

    Returns:
        The results, by rank.

    Raises:
        RankError: ranks raised or were late.
    """
    rendezvous = LocalRendezvous()
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []

    def perform(rank: int) -> None:
        try:
            results[rank] = func(rank, rendezvous)
        except BaseException as error:  # noqa: BLE001  reported to the caller below
            failures.append(RankFailure(rank, "raised", traceback.format_exc(), error=error))

    threads = [threading.Thread(target=perform, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = [RankFailure(rank, "late", _stack(thread)) for rank, thread in enumerate(threads) if thread.is_alive()]
    if failures or late:
        raise RankError([*failures, *late], results, size)
    rendezvous.close()
    return [results[rank] for rank in range(size)]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "ended just now"
