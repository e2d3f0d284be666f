"""Part of this process in its job with servers, which all its stores share: from the environment to a store."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Mapping

from reigen.config import VARIABLES, Config, load_config
from reigen.context import report_metrics
from reigen.errors import ArgumentError, ReigenError
from reigen.kv.client.dist_store import DistStore
from reigen.kv.membership.scheduler_client import SchedulerClient
from reigen.kv.run_role import join_as_worker
from reigen.resources.stdio import occupy_standard_descriptors

#: Their numbers have 16 bits on the wire.
_MOST_STORES = 1 << 16


class JobSession:
    """Worker's process in its job.

    Args:
        member: its place there; it ends with this.
    """

    def __init__(self, member: SchedulerClient) -> None:
        self._member = member
        self._stores: list[DistStore] = []
        self._num_stores = 0
        #: stores that were closed without having said to the servers that this worker leaves
        self._num_abandoned = 0

    @property
    def has_closed_all_stores(self) -> bool:
        """Return whether this worker has closed all its stores in good order, so that it is not waited for."""
        return not self._stores and not self._num_abandoned

    def store(self, kind: str, staleness: float, config: Config, until: float) -> DistStore:
        """Return the job's next store, by then: the n-th of this worker is the n-th of all others."""
        number = self._num_stores
        if number >= _MOST_STORES:
            raise ArgumentError(f"a job has at most {_MOST_STORES} stores")
        self._num_stores += 1

        def closed(store: DistStore) -> None:
            self._stores.remove(store)
            self._num_abandoned += not store.has_left

        bound = None if math.isinf(staleness) else int(staleness)
        store = DistStore(kind, self._member, config, number, bound, closed, until)
        self._stores.append(store)
        return store

    def leave(self, *, in_good_order: bool = True) -> None:
        """Close open stores and leave the job."""
        until: float | None = None
        for store in list(self._stores):
            if in_good_order:
                # whoever wanted to know has closed it
                with contextlib.suppress(ReigenError), store.one_deadline(until) as until:
                    store.close()
            else:
                store.abandon()
        if in_good_order:
            self._member.leave()
        self._member.close()


_lock = threading.Lock()
_session: JobSession | None = None


def _after_fork() -> None:
    """Forget the job in a child, which is no worker: locks and the place in the job stay with the parent."""
    global _lock, _session
    _lock, _session = threading.Lock(), None
    atexit.unregister(_at_exit)


@functools.cache
def _register_fork_handler() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def create_dist_store(kind: str, staleness: float, knobs: Mapping[str, object]) -> DistStore:
    """Return a store of this process's job. The first one joins it; the end of the process leaves it.

    Raises:
        ArgumentError: ``knobs`` has one that `reigen.config.Config` has not.
        ConfigError, DeadlineError: see `reigen.kv.create`.
        SystemExit: this process was a server or a scheduler.
    """
    global _session  # noqa: PLW0603  # a process is one worker, however many stores it makes
    if unknown := set(knobs) - set(VARIABLES):
        raise ArgumentError(f"there is no knob {', '.join(sorted(unknown))}; reigen.config.Config lists them")
    with _lock:
        begun = time.monotonic()
        if _session is None:
            occupy_standard_descriptors()
            _session = JobSession(join_as_worker(os.environ, knobs))
            atexit.register(_at_exit)
            _register_fork_handler()
            report_metrics(os.environ, load_config(os.environ, knobs))
        config = load_config(os.environ, knobs)
        return _session.store(kind, staleness, config, begun + config.start_timeout_seconds)


def _at_exit() -> None:
    """Close all stores and leave the job."""
    global _session  # see above
    with _lock:
        session, _session = _session, None
    if session is not None:
        # a script that ends with an exception before it has closed its stores: the others are to learn that
        is_error = getattr(sys, "last_value", None) is not None
        session.leave(in_good_order=not is_error or session.has_closed_all_stores)
