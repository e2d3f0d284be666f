"""Transport of control messages between the engines of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from reigen.errors import CollectiveError
from reigen.net.doorbells import WaitingThread


class ControlTransport(Protocol):
    """Endpoint of one rank for control messages between rank 0 and the others.

    Rank 0's `send` reaches every other rank, the others' reach rank 0; in order, never blocking.

    `reigen.net.shm_ring.ShmTransport` is one, for ranks that share memory, `reigen.net.tcp_star.TcpStarTransport` the
    other. `reigen.engine.relay_transport.RelayTransport`, which is one of the latter, does more.
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
        """Send integers below 2**32, in order with all messages; `wake_readers` wakes ranks that they need not."""
        ...

    def flush(self) -> None:
        """Send everything that was kept back."""
        ...

    def wake_readers(self) -> None:
        """Wake ranks that have not read everything, as `set_wake_target` and `sleep` do before a rank leaves."""
        ...

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        """Return messages and integers that have come, with their senders."""
        ...

    def pending(self) -> bool:
        """Return whether `receive` would give something."""
        ...

    def token(self) -> int:
        """Read this, then look for work, then sleep on it. While it is the same, nothing more has come."""
        ...

    def look(self, token: int, times: int) -> bool:
        """Look so often whether something has happened since ``token``, before a sleep; whether it has."""
        ...

    def sleep(self, token: int, thread: WaitingThread, timeout_seconds: float) -> None:
        """Sleep until something has happened since ``token``."""
        ...

    def set_wake_target(self, thread: WaitingThread) -> None:
        """From now on wake ``thread`` when something happens."""
        ...

    def release_to_engine(self, urgent: bool) -> bool:
        """A caller, who may soon be back, hands over to the engine's thread, which need not look for work at once.

        Args:
            urgent: something waits for others, whose deadline has to be looked after in a moment.

        Returns:
            whether it will look in time; if not, nothing has changed, and `set_wake_target` comes next.
        """
        ...

    def wake(self, thread: WaitingThread) -> None:
        """Wake a thread of this rank; from any thread."""
        ...

    def clear_wakeup(self) -> None:
        """For who waits on `descriptor`: look for work after this, and it is readable when there is more."""
        ...


class PeerMonitor(Protocol):
    """Membership of the job as the engine sees it: the other ranks, and this one.

    `reigen.cluster.local_peers.LocalPeers` is one, for jobs on one host,
    `reigen.cluster.membership.failure_detector.FailureDetector` the other.
    """

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Return why waiting for these ranks is in vain, or None."""
        ...

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Wait a moment until these ranks, if they have left, have ended, or it is ``over``: this rank leaves, too."""
        ...

    def abort(self, error: CollectiveError) -> None:
        """Tell the others that this rank cannot go on, and why; the first call counts."""
        ...


class SingleRankTransport:
    """Control transport and peer monitor of a job of one rank."""

    backlog = 0
    descriptor = -1
    carries_integers = False

    def send(self, message: bytes) -> None:
        """Do nothing: no other rank listens."""

    def send_integers(self, integers: Sequence[int]) -> None:
        """Do nothing: no other rank listens."""

    def flush(self) -> None:
        """Do nothing: no message is kept back."""

    def wake_readers(self) -> None:
        """Do nothing: no rank sleeps."""

    def receive(self) -> list[tuple[int, bytes | Sequence[int]]]:
        """Return no messages: there is no other rank."""
        return []

    def pending(self) -> bool:
        """Never."""
        return False

    def token(self) -> int:
        """Return 0: no event ever comes."""
        return 0

    def look(self, token: int, times: int) -> bool:
        """Return False: no event ever comes."""
        return False

    def sleep(self, token: int, thread: WaitingThread, timeout_seconds: float) -> None:
        """Do not wait: a rank that is alone completes its operations when it submits them."""

    def set_wake_target(self, thread: WaitingThread) -> None:
        """Do nothing: no rank sleeps."""

    def release_to_engine(self, urgent: bool) -> bool:
        """Return False: no message will come."""
        return False

    def wake(self, thread: WaitingThread) -> None:
        """Do nothing: no rank sleeps."""

    def clear_wakeup(self) -> None:
        """Do nothing: no rank waits."""

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Return None: there is no other rank to lose."""
        return None

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Return no ranks: none leaves."""

    def abort(self, error: CollectiveError) -> None:
        """Do nothing: no rank waits."""
