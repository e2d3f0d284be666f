"""State of an elastic training function: saved in memory, restored after an error, synchronized in a new view."""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reigen.api.objects import dumps
from reigen.elastic import membership
from reigen.errors import ArgumentError, HostsUpdatedInterrupt, ReigenError

BroadcastObject = Callable[[Any], Any]


class HostUpdateResult(enum.IntFlag):
    """Change of the hosts of a job, for `State.on_hosts_updated`."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


@dataclass(frozen=True, slots=True)
class Departure:
    """Departure of a process that leaves its elastic job in good order, after a notice.

    Attributes:
        rank, size: what they were. There is no rank and no size any more, and there are no collectives.
        all_leave: so do all other members at this commit: nobody goes on with the state.
    """

    rank: int
    size: int
    all_leave: bool


class State(ABC):
    """Base of states, from which a training function goes on where it was.

    Args:
        bcast_object: returns rank 0's object on every rank, given each rank's own.
        get_rank: returns this rank.
    """

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._leave_callbacks: list[Callable[[Departure], None]] = []
        self._update: HostUpdateResult | None = None
        #: how often `commit` was called
        self.num_commits = 0

    if TYPE_CHECKING:
        # A program gives it the attributes that it likes.
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions called, in this order, whenever the members of the job have changed.

        They find the new ``rank()`` and ``size()``: the place to scale a learning rate, or to divide data anew.
        """
        self._reset_callbacks.extend(callbacks)

    def register_leave_callbacks(self, callbacks: Iterable[Callable[[Departure], None]]) -> None:
        """Have functions called, in this order, when this process leaves the job after a notice, before it ends.

        The state is that of the last commit, and has been applied by all members: the place for a checkpoint, where
        nobody goes on with it::

            state.register_leave_callbacks([lambda left: save(state) if left.all_leave and left.rank == 0 else None])

        The process is ended when its grace is over (REIGEN_NOTICE_GRACE).
        """
        self._leave_callbacks.extend(callbacks)

    def on_leave(self, departure: Departure) -> None:
        """Follow the departure of this process: the callbacks."""
        for callback in self._leave_callbacks:
            callback(departure)

    def on_reset(self) -> None:
        """Follow a change of members: `reset`, then the callbacks."""
        self._update = None
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Have this rank's next `check_host_updates` interrupt the training; any thread may say so.

        Nobody has to: in an elastic job the members learn of changes by themselves, all at the same commit.

        Args:
            timestamp: accepted for Horovod's sake.
            update_res: a `HostUpdateResult`.
        """
        del timestamp
        self._update = HostUpdateResult(update_res) | (self._update or HostUpdateResult.no_update)

    def commit(self) -> None:
        """Save the state, to which an error goes back, and let members come and go now if they want to.

        All members commit equally often. It costs a copy of the state in memory, and no communication.

        Raises:
            HostsUpdatedInterrupt: the members change now. `run` handles it.
        """
        self.save()
        self.num_commits += 1
        membership.step_applied()
        self._interrupt()

    def check_host_updates(self) -> None:
        """Let members come and go now, without a commit: then the newcomers get the state as it is now.

        Raises:
            HostsUpdatedInterrupt: the members change now. `run` handles it.
        """
        membership.check()
        self._interrupt()

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy that was kept last."""

    @abstractmethod
    def sync(self) -> None:
        """Collective: every rank's state becomes rank 0's, and is saved."""

    def reset(self) -> None:  # noqa: B027 - most states have nothing to do
        """Follow a change of members, before the callbacks; the state itself stays."""

    def _interrupt(self) -> None:
        update, self._update = self._update, None
        if update:
            raise HostsUpdatedInterrupt(skip_sync=update is HostUpdateResult.removed)


class ObjectState(State):
    """State of plain objects: each keyword argument is an attribute.

    Copies are deep ones: what changes in a list after `save` is undone by `restore`.

    Args:
        bcast_object: see `State`.
        get_rank: see `State`.
        kwargs: names and first values of the attributes. pickle must be able to write them.

    Raises:
        ArgumentError: a value cannot be copied.
    """

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = tuple(kwargs)
        self._saved_state: Mapping[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keep copies of the attributes."""
        self._saved_state = {name: _copy(name, getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Set the attributes to copies of the saved values."""
        for name, value in self._saved_state.items():
            setattr(self, name, _copy(name, value))

    def sync(self) -> None:
        """Collective: every rank's attributes become rank 0's; then everything is saved."""
        if self._names:
            received = self._send({name: getattr(self, name) for name in self._names})
            for name in self._names:
                setattr(self, name, received[name])
        self.save()

    def _send(self, values: dict[str, Any]) -> Any:
        try:
            return self._bcast_object(values)
        except ReigenError:
            raise
        except Exception as error:
            bad = [name for name, value in values.items() if not _can_be_sent(value)]
            names = f"attribute{'s' * (len(bad) > 1)} {', '.join(bad)}" if bad else "attributes"
            raise ArgumentError(
                f"the state's {names} cannot be given to other ranks ({type(error).__name__}: {error}): keep what it "
                "can be made of in the state, and itself outside"
            ) from error


def _can_be_sent(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001  of any class of the user's
        return False
    return True


def _copy(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise ArgumentError(
            f"the state's {name} cannot be copied, so that it could be neither restored nor given to other ranks "
            f"({type(error).__name__}: {error}): keep what it can be made of in the state, and itself outside"
        ) from error
