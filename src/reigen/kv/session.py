"""This process's part in its job with servers, which all its stores share: from the environment to a store."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import select
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reigen.config import VARIABLES, Config, load
from reigen.errors import ArgumentError, ReigenError
from reigen.kv.dist import DistStore
from reigen.kv.nodes import Event, Membership, Peer, Role
from reigen.kv.serving import become_worker

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.wire.tls import Tls

#: Their numbers have 16 bits on the wire.
_MOST_STORES = 1 << 16


class Shared:
    """A `Membership` that several stores share: each hears of every event.

    Args:
        member: the real one.
        others: all of this member's, this one included once it is there: whoever fetches events passes them on.
    """

    def __init__(self, member: Membership, others: list[Shared]) -> None:
        self._member = member
        self._others = others
        self.role: Role = member.role
        self.number, self.incarnation = member.number, member.incarnation
        self.num_workers, self.num_servers = member.num_workers, member.num_servers
        self.is_recovery, self.host = member.is_recovery, member.host
        self.secret: bytes = member.secret
        self.tls: Tls | None = member.tls
        self._lock = threading.Lock()
        self._events: list[Event] = []
        #: readable while others have fetched events for this one
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._either = select.epoll()
        self._either.register(self._bell, select.EPOLLIN)
        self._either.register(member.fileno(), select.EPOLLIN)

    def servers(self, deadline: float) -> Sequence[Peer]:
        """See `Membership.servers`."""
        return self._member.servers(deadline)

    def barrier(self, name: str, deadline: float) -> None:
        """See `Membership.barrier`."""
        self._member.barrier(name, deadline)

    def events(self) -> list[Event]:
        """See `Membership.events`."""
        new = self._member.events()
        for each in list(self._others):
            each.hear(new)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        with self._lock:
            events, self._events = self._events, []
            return events

    def hear(self, events: list[Event]) -> None:
        """Something that another has fetched."""
        with self._lock:
            if events and self._bell >= 0:
                self._events += events
                os.eventfd_write(self._bell, 1)

    def fileno(self) -> int:
        """See `Membership.fileno`."""
        return self._either.fileno()

    def num_dead_nodes(self, timeout: float) -> int:
        """See `Membership.num_dead_nodes`."""
        return self._member.num_dead_nodes(timeout)

    def leave(self) -> None:
        """See `Membership.leave`: the process leaves when it ends."""

    def close(self) -> None:
        """This store needs it no more."""
        with self._lock:
            if self._bell >= 0:
                self._others.remove(self)
                self._either.close()
                os.close(self._bell)
                self._bell = -1


class Session:
    """A worker's process in its job.

    Args:
        member: its place there; it ends with this.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._shared: list[Shared] = []
        self._stores: list[DistStore] = []
        self._num_stores = 0

    def store(self, kind: str, staleness: float, config: Config) -> DistStore:
        """The job's next store: the n-th of this worker is the n-th of all others."""
        number = self._num_stores
        if number >= _MOST_STORES:
            raise ArgumentError(f"a job has at most {_MOST_STORES} stores")
        self._num_stores += 1
        place = Shared(self._member, self._shared)
        self._shared.append(place)

        def closed(store: DistStore) -> None:
            self._stores.remove(store)
            place.close()

        bound = None if math.isinf(staleness) else int(staleness)
        try:
            store = DistStore(kind, place, config, number, bound, closed)
        except BaseException:
            place.close()
            raise
        self._stores.append(store)
        return store

    def leave(self, *, in_good_order: bool = True) -> None:
        """Close what is open and leave the job."""
        for store in list(self._stores):
            if in_good_order:
                with contextlib.suppress(ReigenError):  # whoever wanted to know has closed it
                    store.close()
            else:
                store.abandon()
        if in_good_order:
            self._member.leave()
        self._member.close()


_lock = threading.Lock()
_session: Session | None = None


def _after_fork() -> None:
    """In the child: it is no worker. Locks and the place in the job stay with the parent."""
    global _lock, _session
    _lock, _session = threading.Lock(), None
    atexit.unregister(_at_exit)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def join(kind: str, staleness: float, knobs: Mapping[str, object]) -> DistStore:
    """A store of this process's job. The first one joins the job; the end of the process leaves it, or `leave`.

    Args:
        kind: its type.
        staleness: of it.
        knobs: by the names of `reigen.config.Config`.

    Raises:
        ArgumentError: there is no such knob.
        ConfigError, DeadlineError: see `reigen.kv.create`.
        SystemExit: this process was a server or a scheduler.
    """
    global _session  # noqa: PLW0603  # a process is one worker, however many stores it makes
    if unknown := set(knobs) - set(VARIABLES):
        raise ArgumentError(f"there is no knob {', '.join(sorted(unknown))}; reigen.config.Config lists them")
    with _lock:
        if _session is None:
            _session = Session(become_worker(os.environ, knobs))
            atexit.register(_at_exit)
            _watch_forks()
        return _session.store(kind, staleness, load(os.environ, knobs))


def leave() -> None:
    """Leave the job now and not at the end of the process: close all its stores. Does nothing without any."""
    _leave(in_good_order=True)


def _at_exit() -> None:
    # a script that ends with an exception has not done its part: the others are to learn that
    _leave(in_good_order=getattr(sys, "last_value", None) is None)


def _leave(*, in_good_order: bool) -> None:
    global _session  # see above
    with _lock:
        session, _session = _session, None
    if session is not None:
        atexit.unregister(_at_exit)
        session.leave(in_good_order=in_good_order)
