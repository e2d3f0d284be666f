"""How control messages travel between the engines of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from reigen.errors import CollectiveError
from reigen.net.shm_ring import WaitingThread


class ControlTransport(Protocol):
    """One rank's end. Rank 0's `send` reaches every other rank, the others' reach rank 0; in order, never blocking.

    `reigen.net.shm_ring.ShmTransport` is one, for ranks that share memory, `reigen.net.tcp_star.TcpStarTransport` the
    other.
    """

    #: readable when a message has come, or a caller was woken; -1: there is no such descriptor
    descriptor: int
    #: whether `send_integers` may be called
    carries_integers: bool

    @property
    def backlog(self) -> int:
        """Messages that could not leave yet; `flush` tries again."""
        ...

    def send(self, message: bytes) -> None:
        """Send at most `MAX_MESSAGE_BYTES`."""
        ...

    def send_integers(self, integers: Sequence[int]) -> None:
        """Send integers below 2**32, in order with all messages. Whom they need not wake, `wake_readers` does."""
        ...

    def flush(self) -> None:
        """Send what was kept back."""
        ...

    def wake_readers(self) -> None:
        """Wake ranks that have not read everything, as `set_wake_target` and `sleep` do before somebody leaves."""
        ...

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        """What has come, messages and integers, with its senders."""
        ...

    def pending(self) -> bool:
        """Whether `receive` would give something."""
        ...

    def token(self) -> int:
        """Read this, then look for work, then sleep on it. While it is the same, nothing more has come."""
        ...

    def look(self, token: int, times: int) -> bool:
        """Look so often whether something has happened since ``token``, before a sleep; whether it has."""
        ...

    def sleep(self, token: int, who: WaitingThread, timeout_seconds: float) -> None:
        """Sleep until something has happened since ``token``."""
        ...

    def set_wake_target(self, who: WaitingThread) -> None:
        """From now on wake ``who`` when something happens."""
        ...

    def release_to_engine(self, urgent: bool) -> bool:
        """A caller, who may soon be back, hands over to the engine's thread, which need not look for work at once.

        Args:
            urgent: something waits for others, whose deadline has to be looked after in a moment.

        Returns:
            whether it will look in time; if not, nothing has changed, and `set_wake_target` comes next.
        """
        ...

    def wake(self, who: WaitingThread) -> None:
        """Wake a thread of this rank; from any thread."""
        ...

    def clear_wakeup(self) -> None:
        """For who waits on `descriptor`: look for work after this, and it is readable when there is more."""
        ...


class PeerMonitor(Protocol):
    """Who is asked about the other ranks, and told of this one.

    `reigen.cluster.local_peers.LocalPeers` is one, for jobs on one host,
    `reigen.cluster.membership.failure_detector.FailureDetector` the other.
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


class SingleRankTransport:
    """Transport and watch of a job of one rank."""

    backlog = 0
    descriptor = -1
    carries_integers = False

    def send(self, message: bytes) -> None:
        """Nobody listens."""

    def send_integers(self, integers: Sequence[int]) -> None:
        """Nobody listens."""

    def flush(self) -> None:
        """Nothing was kept back."""

    def wake_readers(self) -> None:
        """Nobody sleeps."""

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        """Nobody speaks."""
        return []

    def pending(self) -> bool:
        """Never."""
        return False

    def token(self) -> int:
        """Nothing ever happens."""
        return 0

    def look(self, token: int, times: int) -> bool:
        """Nothing ever happens."""
        return False

    def sleep(self, token: int, who: WaitingThread, timeout_seconds: float) -> None:
        """There is nothing to wait for: a rank that is alone completes what it submits."""

    def set_wake_target(self, who: WaitingThread) -> None:
        """Nobody sleeps."""

    def release_to_engine(self, urgent: bool) -> bool:
        """Nothing will come."""
        return False

    def wake(self, who: WaitingThread) -> None:
        """Nobody sleeps."""

    def clear_wakeup(self) -> None:
        """Nobody waits."""

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Nobody can be lost."""
        return None

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Nobody leaves."""

    def abort(self, error: CollectiveError) -> None:
        """Nobody waits."""
