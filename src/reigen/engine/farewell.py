"""Before a rank leaves, or lets others down.

Before a rank leaves that has used devices: an operation on devices is over for the engine when it is enqueued. A rank
that left then would take away what its own device, or those of the others, still need: memory, and connections that
carry the rest of its data. So it waits

a. until nothing is flying here. That ends with the deadline of what is flying at the latest, or with the job;
b. until the others have come as far, if they leave as well: a barrier, which they have no reason to come to if they do
   not. Therefore it is given up after a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from reigen.engine.handles import Handle, Task
from reigen.engine.messages import UNNAMED, Kind, Operation
from reigen.engine.outstanding import Outstanding
from reigen.engine.requests import in_set
from reigen.engine.team import Team
from reigen.engine.transport import Watch
from reigen.errors import ArgumentError, CollectiveError, PeerLostError

if TYPE_CHECKING:
    from reigen.engine.engine import Engine

#: For the others to come to the end of what they do.
_GRACE_SECONDS = 2.0
_PAUSE_SECONDS = 0.002


def wait_for_devices(engine: Engine, teams: Mapping[int, Team]) -> None:
    """Steps a and b, on the thread that closes the engine. Raises nothing.

    Args:
        engine: works, and has a thread of its own.
        teams: the process sets by number.
    """
    used = [number for number, team in teams.items() if team.device is not None and team.device.used]
    if not used or engine.device is None:
        return
    while engine.works and engine.device.flying:
        time.sleep(_PAUSE_SECONDS)
    handles = []
    for number in [0] if 0 in used else used:
        name = in_set(f"barrier{UNNAMED}farewell", number)
        handle = Handle(engine, name, Task())
        try:
            engine.submit(Operation(Kind.BARRIER, name, process_set=number), handle, blocking=False)
        except (CollectiveError, ArgumentError):
            return  # the job is over, or this rank has joined and waits for its end
        handles.append(handle)
    until = time.monotonic() + _GRACE_SECONDS
    while engine.works and time.monotonic() < until and not all(handle.done for handle in handles):
        time.sleep(_PAUSE_SECONDS)


class LastMoment:
    """Before anybody here is let down for the first time, ranks that are lost get a moment to end.

    Args:
        watch: knows whether they have.
        outstanding: operations of this rank. When they are closed, it leaves itself, and waits no more.
    """

    def __init__(self, watch: Watch, outstanding: Outstanding) -> None:
        self._watch, self._outstanding = watch, outstanding
        self._lock, self._is_over = threading.Lock(), False

    def give(self, error: PeerLostError) -> None:
        """Somebody is about to hear this error. Any thread."""
        with self._lock:
            if not self._is_over:
                self._watch.linger(error.ranks, lambda: self._outstanding.closed)
                self._is_over = True

    def give_to_outstanding(self, error: CollectiveError) -> None:
        """Whoever waits for an operation, if anybody does, is about to hear it."""
        if isinstance(error, PeerLostError) and self._outstanding.handles:
            self.give(error)


def interrupted(error: BaseException, rank: int) -> CollectiveError:
    """What all ranks are told when something went wrong on one in the middle of an operation."""
    if isinstance(error, CollectiveError):
        return error
    what = "an unreadable control message" if isinstance(error, msgspec.DecodeError) else repr(error)
    known = CollectiveError(f"rank {rank} was interrupted: {what}", ranks=(rank,))
    known.__cause__ = error
    return known
