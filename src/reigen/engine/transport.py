"""How control messages travel between the engines of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from reigen.errors import CollectiveError
from reigen.wire.mailbox import Sleeper


class Transport(Protocol):
    """One rank's end. Rank 0's `send` reaches every other rank, the others' reach rank 0; in order, never blocking.

    `reigen.wire.mailbox.Mailbox` is one, for ranks that share memory, `reigen.wire.star.Star` the other.
    """

    #: readable when a message has come, or a caller was woken; -1: there is no such descriptor
    descriptor: int

    @property
    def backlog(self) -> int:
        """Messages that could not leave yet; `flush` tries again."""
        ...

    def send(self, message: bytes) -> None:
        """Send at most `MAX_MESSAGE_BYTES`."""
        ...

    def flush(self) -> None:
        """Send what was kept back."""
        ...

    def receive(self) -> list[tuple[int, bytes]]:
        """What has come, with its senders."""
        ...

    def pending(self) -> bool:
        """Whether `receive` would give something."""
        ...

    def token(self) -> int:
        """Read this, then look for work, then sleep on it."""
        ...

    def sleep(self, token: int, who: Sleeper, timeout_seconds: float) -> None:
        """Sleep until something has happened since ``token``."""
        ...

    def take_over(self, who: Sleeper) -> None:
        """From now on wake ``who`` when something happens."""
        ...

    def hand_back(self) -> bool:
        """A caller, who may soon be back, hands over to the engine's thread: that looks for work in a moment.

        Returns:
            whether it will; if not, nothing has changed, and `take_over` comes next.
        """
        ...

    def wake(self, who: Sleeper) -> None:
        """Wake a thread of this rank; from any thread."""
        ...

    def calm(self) -> None:
        """For who waits on `descriptor`: look for work after this, and it is readable when there is more."""
        ...


class Watch(Protocol):
    """Who is asked about the other ranks, and told of this one.

    `reigen.cluster.neighbours.Neighbours` is one, for jobs on one host, `reigen.cluster.lookout.Lookout` the other.
    """

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Why waiting for these ranks is in vain, or None."""
        ...

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Wait a moment until these ranks, if they have left, have ended, or it is ``over``: this rank leaves, too."""
        ...

    def abort(self, error: CollectiveError) -> None:
        """Tell the others that this rank cannot go on, and why; the first call counts."""
        ...


class Solitude:
    """Transport and watch of a job of one rank."""

    backlog = 0
    descriptor = -1

    def send(self, message: bytes) -> None:
        """Nobody listens."""

    def flush(self) -> None:
        """Nothing was kept back."""

    def receive(self) -> list[tuple[int, bytes]]:
        """Nobody speaks."""
        return []

    def pending(self) -> bool:
        """Never."""
        return False

    def token(self) -> int:
        """Nothing ever happens."""
        return 0

    def sleep(self, token: int, who: Sleeper, timeout_seconds: float) -> None:
        """There is nothing to wait for: a rank that is alone completes what it submits."""

    def take_over(self, who: Sleeper) -> None:
        """Nobody sleeps."""

    def hand_back(self) -> bool:
        """Nothing will come."""
        return False

    def wake(self, who: Sleeper) -> None:
        """Nobody sleeps."""

    def calm(self) -> None:
        """Nobody waits."""

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Nobody can be lost."""
        return None

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Nobody leaves."""

    def abort(self, error: CollectiveError) -> None:
        """Nobody waits."""
