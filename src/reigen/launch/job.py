"""What the launcher does when something happens: an event goes in, instructions come out. No I/O, no clock.

The life of a job:

a. RUNNING: ranks run. A rank that exits with 0 has done its part, the others go on.
b. A rank fails, or a signal asks the launcher to stop: the rest are asked to stop (Terminate), a timer starts:
   STOPPING.
c. The timer ends, or Ctrl-C is pressed again: what is left is killed (Kill), and the timer starts again.
d. The last rank has exited: processes that ranks left behind are asked to stop (Sweep), and killed when the timer ends:
   SWEEPING.
e. A host is lost (HostLost): its agent ends what runs there; here its ranks count as failed.
f. Nothing is left (Swept): Finish, with the exit code and the failure that ended the job: DONE. So too when the timer
   ends a second time after a Kill: what SIGKILL does not end is stuck in the kernel, and waiting does not help.

The exit code is that of the first failing process, 128 + n where a signal n ended it, 255 where it was lost with its
host, 128 + n when a signal n stopped the launcher, else 0. Ranks that were asked to stop do not fail. When the process
that watches over the launcher has gone (Orphaned), everything is killed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from signal import SIGINT, Signals

#: A terminal, or a tool like `timeout`, may send one request to stop twice; a second Ctrl-C comes later than this.
SAME_REQUEST_SECONDS = 0.2
#: What a rank that was lost with its host counts as having exited with: ssh's own code for a connection that failed.
LOST = 255


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong.

    Attributes:
        rank: whose process.
        exit_code: what it exited with; negative: minus the signal that ended it.
        num_stopped: how many other ranks were running and are stopped because of it.
        reason: why the rank counts as failed although nobody saw its process end; else empty.
    """

    rank: int
    exit_code: int
    num_stopped: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank's process has ended; ``exit_code`` as in ``Failure``."""

    rank: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class HostLost:
    """Nothing more will be heard of these ranks: their host cannot be reached any more, for this ``reason``."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The launcher was sent a signal at ``seconds`` on some steady clock."""

    signum: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The timer that StartGrace started has ended."""


@dataclass(frozen=True, slots=True)
class Orphaned:
    """Nobody watches over the launcher any more: it must end, and everything with it."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Nothing that the ranks started runs any more."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to these ranks and what they started."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to these ranks and to every process below the launcher."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Start the timer, or start it again."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Send SIGTERM to every process that is left below the launcher; say Swept when there is none."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the launcher.

    Attributes:
        exit_code: 0 to 255.
        failure: what ended the job, None where no rank failed by itself.
        signum: the signal that stopped the launcher, or None.
    """

    exit_code: int
    failure: Failure | None
    signum: int | None


Event = Exited | HostLost | SignalReceived | GraceOver | Orphaned | Swept
Instruction = Terminate | Kill | StartGrace | Sweep | Finish


class Phase(Enum):
    """Where the job is in its life."""

    RUNNING = auto()
    STOPPING = auto()
    SWEEPING = auto()
    DONE = auto()


class Job:
    """The state of one job. ``handle`` takes one event at a time."""

    def __init__(self, num_ranks: int) -> None:
        self.phase = Phase.RUNNING
        #: Ranks whose process has not ended.
        self.running = set(range(num_ranks))
        #: Set once, in RUNNING, by the first rank that fails.
        self.failure: Failure | None = None
        #: Set once, in RUNNING, by the first signal.
        self.signum: int | None = None
        self._stopped_at = float("-inf")
        #: Kill was said in this phase.
        self._killed = False

    def handle(self, event: Event) -> list[Instruction]:
        """What to do now, in this order."""
        match event:
            case _ if self.phase is Phase.DONE:
                return []
            case Exited(rank, exit_code):
                return self._exited(rank, exit_code)
            case HostLost(ranks, reason):
                return self._lost(ranks, reason)
            case SignalReceived(signum, seconds):
                return self._signalled(signum, seconds)
            case GraceOver():
                return self._grace_over()
            case Orphaned():
                return self._orphaned()
            case Swept():
                return [] if self.running else self._finish()

    def validate(self) -> None:
        """Assert what must hold between two events."""
        assert self.phase is Phase.DONE or bool(self.running) == (self.phase is not Phase.SWEEPING)
        assert self.phase is not Phase.RUNNING or (self.failure is None and self.signum is None)
        assert self.phase is not Phase.STOPPING or self.failure is not None or self.signum is not None

    def _exited(self, rank: int, exit_code: int) -> list[Instruction]:
        return self._gone({rank}, Failure(rank, exit_code, 0) if exit_code != 0 else None)

    def _lost(self, ranks: tuple[int, ...], reason: str) -> list[Instruction]:
        gone = self.running.intersection(ranks)
        return self._gone(gone, Failure(min(gone), LOST, 0, reason)) if gone else []

    def _gone(self, ranks: set[int], failure: Failure | None) -> list[Instruction]:
        self.running -= ranks
        instructions: list[Instruction] = []
        if failure is not None and self.phase is Phase.RUNNING:
            self.failure = replace(failure, num_stopped=len(self.running))
            if self.running:
                instructions = self._stop()
        if not self.running and self.phase in {Phase.RUNNING, Phase.STOPPING}:
            self.phase, self._killed = Phase.SWEEPING, False
            instructions += [Sweep(), StartGrace()]
        return instructions

    def _signalled(self, signum: int, seconds: float) -> list[Instruction]:
        if self.phase is Phase.RUNNING:
            self.signum, self._stopped_at = signum, seconds
            return self._stop()
        if signum == SIGINT and seconds - self._stopped_at > SAME_REQUEST_SECONDS:
            return self._kill()
        return []

    def _stop(self) -> list[Instruction]:
        self.phase = Phase.STOPPING
        return [Terminate(tuple(sorted(self.running))), StartGrace()]

    def _kill(self) -> list[Instruction]:
        self._killed = True
        return [Kill(tuple(sorted(self.running))), StartGrace()]

    def _grace_over(self) -> list[Instruction]:
        if self.phase is Phase.RUNNING:
            return []
        return self._finish() if self._killed else self._kill()

    def _orphaned(self) -> list[Instruction]:
        if self.phase is Phase.RUNNING:
            self.phase, self.signum = Phase.STOPPING, Signals.SIGKILL
        return self._kill()

    def _finish(self) -> list[Instruction]:
        self.phase = Phase.DONE
        if self.failure is not None:
            code = self.failure.exit_code
            return [Finish(code if code > 0 else 128 - code, self.failure, None)]
        return [Finish(0 if self.signum is None else 128 + self.signum, None, self.signum)]
