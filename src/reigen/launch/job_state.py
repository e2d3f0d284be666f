"""Decisions of the launcher: an event goes in, instructions come out. No I/O, no clock.

The life of a job:

a. RUNNING: ranks run, and perhaps *PS processes*: parameter servers and their scheduler, whose numbers come behind
   those of the ranks. A process that exits with 0 has done its part, the others go on.
b. A rank fails, or a signal asks the launcher to stop: the rest are asked to stop (Terminate), a timer starts:
   STOPPING.
c. A PS process is killed: it is started again (Restart), if it may be; else it ends the job as a rank would. One that
   ends by itself with an error ends the job in any case: it has a reason, such as that the others are lost. Ranks may
   be started again, too, or the job may go on without those that fail, if the user wants it so: the parameter server's
   policies for lost workers. A failure that stops no other still gives the exit code. A PS process that says, by its
   exit code, that the ranks are lost has noticed it before they have ended: a timer starts, and the first rank that
   fails is the failure; the PS process is, when the timer ends and none has failed. A rank that has left the parameter
   server's job (Left) has no place to come back to: it is not started again. Of one that was started again in vain, the
   first failure counts.
d. The last rank has exited, and PS processes still run: they end by themselves, a timer starts: ENDING. They
   are asked to stop when it ends, or when a signal comes: STOPPING. How they exit does not matter any more.
e. The timer ends in STOPPING, or Ctrl-C is pressed again: what is left is killed (Kill), and the timer starts again.
f. The last process has exited: what they left behind is asked to stop (Sweep), and killed when the timer ends:
   SWEEPING.
g. A host is lost (HostLost): its agent ends what runs there; here its processes count as failed. None of them can be
   started again.
h. Nothing is left (Swept): Finish, with the exit code and the failure that ended the job: DONE. So too when the timer
   ends a second time after a Kill: what SIGKILL does not end is stuck in the kernel, and waiting does not help.

While the job runs, SIGUSR1 and SIGUSR2 are passed on to the ranks (Signal): their meaning is the program's.

The exit code is that of the first failing process, 128 + n where a signal n ended it, 255 where it was lost with its
host, 128 + n when a signal n stopped the launcher, else 0. Processes that were asked to stop do not fail. When the
process that watches over the launcher has gone (Orphaned), everything is killed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from math import inf
from signal import SIGINT, SIGKILL, SIGUSR1, SIGUSR2

import msgspec

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE

#: A terminal, or a tool like `timeout`, may send one request to stop twice; a second Ctrl-C comes later than this.
REPEATED_SIGNAL_SECONDS = 0.2
#: A signal for the ranks may come several times at once, from each host: within this time it is the same.
SAME_SIGNAL_SECONDS = 1.0
#: Exit code of a process that was lost with its host: ssh's own code for a connection that failed.
HOST_LOST_EXIT_CODE = 255
#: The exit codes of a process that SIGKILL has ended, and of a shell that ran it.
KILLED_EXIT_CODES = (-SIGKILL, 128 + SIGKILL)


class JobMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of events and instructions; those with a tag of ``launch.agent.agent_protocol`` go to other processes."""


class JobFailure(JobMessage, frozen=True):
    """First failure of a job.

    Attributes:
        rank: whose process: a rank, or a PS process's number.
        exit_code: its exit code; negative: minus the signal that ended it.
        num_stopped: how many other ranks were running and are stopped because of it.
        reason: why it counts as failed although its end was not seen; else empty.
        num_restarts: how often it was started again, before that; of a rank, whose first failure this is, behind it.
        cause: the kernel's part in the end of a process that was killed (``resources.oom``); else empty.
    """

    rank: int
    exit_code: int
    num_stopped: int
    reason: str = ""
    num_restarts: int = 0
    cause: str = ""


class ProcessExited(JobMessage, tag=15, frozen=True):
    """Process of a rank, or a PS process, has ended; ``exit_code`` and ``cause`` as in ``JobFailure``."""

    rank: int
    exit_code: int
    cause: str = ""


class PsWorkerLeft(JobMessage, frozen=True):
    """Rank has left the parameter server's job in good order; its process goes on, or is about to end."""

    rank: int


class HostLost(JobMessage, frozen=True):
    """Host cannot be reached any more, for this ``reason``, with these processes on it."""

    ranks: tuple[int, ...]
    reason: str
    host: str = ""


class SignalReceived(JobMessage, frozen=True):
    """Signal was sent to the launcher at ``seconds`` on some steady clock."""

    signum: int
    seconds: float


class GraceExpired(JobMessage, frozen=True):
    """Timer that StartGraceTimer started has ended."""


class WatchdogLost(JobMessage, frozen=True):
    """Watchdog of the launcher has gone: it must end, and everything with it."""


class ProcessesSwept(JobMessage, tag=16, frozen=True):
    """Job has left no process behind; from an agent: on its host."""


class RestartProcess(JobMessage, tag=23, frozen=True):
    """Start this process again, for the ``attempt``-th time, since it has ended; the rest as in ``ProcessExited``."""

    number: int
    attempt: int
    exit_code: int
    cause: str = ""


class TerminateProcesses(JobMessage, tag=4, frozen=True):
    """Send SIGTERM to these processes and their descendants."""

    ranks: tuple[int, ...]


class SignalProcesses(JobMessage, tag=25, frozen=True):
    """Send a signal to these processes alone."""

    ranks: tuple[int, ...]
    signum: int


class KillProcesses(JobMessage, tag=5, frozen=True):
    """Send SIGKILL to these processes and to every process below the launcher, or the agent."""

    ranks: tuple[int, ...]


class SweepProcesses(JobMessage, tag=6, frozen=True):
    """Send SIGTERM to every process that is left below the launcher; answered by ProcessesSwept when there is none."""


class StartGraceTimer(JobMessage, frozen=True):
    """Start the timer, or start it again."""


class FinishJob(JobMessage, frozen=True):
    """End the launcher with an exit code of 0 to 255.

    ``failure`` is what ended the job, if a process failed by itself; ``signum`` the signal that stopped the launcher.
    """

    exit_code: int
    failure: JobFailure | None
    signum: int | None


JobEvent = ProcessExited | PsWorkerLeft | HostLost | SignalReceived | GraceExpired | WatchdogLost | ProcessesSwept
ProcessInstruction = RestartProcess | SignalProcesses | TerminateProcesses | KillProcesses | SweepProcesses
JobInstruction = ProcessInstruction | StartGraceTimer | FinishJob


def was_killed(exit_code: int) -> bool:
    """Return whether a signal ended a process, or, if it is a shell, the program that it ran: -9, 137."""
    return exit_code < 0 or exit_code > 128


class JobPhase(Enum):
    """Phase in the life of a job."""

    RUNNING = auto()
    ENDING = auto()
    STOPPING = auto()
    SWEEPING = auto()
    DONE = auto()


class JobState:
    """State of one job. ``handle`` takes one event at a time.

    Args:
        num_ranks: how many ranks there are, from 0.
        restarts: how often each PS process may be started again, by its number; numbers of ranks are in it only where
            those may be started again.
        continue_on_failure: a rank that fails does not stop the others.
    """

    def __init__(
        self, num_ranks: int, restarts: Mapping[int, int] | None = None, *, continue_on_failure: bool = False
    ) -> None:
        self._num_ranks = num_ranks
        self._continue_on_failure = continue_on_failure
        self._allowed = dict(restarts or {})
        #: How often each of them has been started again.
        self._restarted = dict.fromkeys(self._allowed, 0)
        #: How ranks that were started again had ended at first.
        self._first_ends: dict[int, ProcessExited] = {}
        #: Ranks that have left the parameter server's job.
        self._departed: set[int] = set()
        self.phase = JobPhase.RUNNING
        #: Ranks and PS processes that have not ended.
        self.running = {*range(num_ranks), *self._allowed}
        #: Set once, in RUNNING, by the first process that fails. Stops the others, unless the job goes on.
        self.failure: JobFailure | None = None
        #: Set once, in RUNNING, by the first PS process that says that the ranks are lost.
        self._reported_loss: JobFailure | None = None
        #: Set once, in RUNNING, by the first signal.
        self.signum: int | None = None
        self._stopped_at = -inf
        #: When each signal was last passed on.
        self._passed_on: dict[int, float] = {}
        #: A KillProcesses was returned in this phase.
        self._killed = False

    def handle(self, event: JobEvent) -> list[JobInstruction]:
        """Return the instructions to carry out, in this order."""
        match event:
            case _ if self.phase is JobPhase.DONE:
                return []
            case ProcessExited():
                return self._exited(event)
            case PsWorkerLeft(number):
                self._departed.add(number)
                return []
            case HostLost(numbers, reason):
                return self._lost(numbers, reason)
            case SignalReceived(signum, seconds):
                return self._signalled(signum, seconds)
            case GraceExpired():
                return self._grace_over()
            case WatchdogLost():
                return self._watchdog_lost()
            case ProcessesSwept():
                return [] if self.running else self._finish()

    def validate(self) -> None:
        """Assert the invariants between two events."""
        assert self.phase is JobPhase.DONE or bool(self.running) == (self.phase is not JobPhase.SWEEPING)
        assert self.phase is not JobPhase.RUNNING or self.signum is None
        assert self.phase is not JobPhase.RUNNING or self.failure is None or self._continue_on_failure
        assert self.phase is not JobPhase.RUNNING or self._num_running
        assert self.phase is not JobPhase.ENDING or not self._num_running
        assert self.phase is not JobPhase.STOPPING or self._has_reason
        assert all(self._restarted[number] <= allowed for number, allowed in self._allowed.items())

    @property
    def _num_running(self) -> int:
        return sum(number < self._num_ranks for number in self.running)

    @property
    def _has_reason(self) -> bool:
        return self.failure is not None or self.signum is not None or not self._num_running

    def _exited(self, event: ProcessExited) -> list[JobInstruction]:
        number, exit_code = event.rank, event.exit_code
        if exit_code == 0:
            return self._ended({number}, None)
        times = self._restarted.get(number, 0)
        may_return = number not in self._departed if number < self._num_ranks else was_killed(exit_code)
        if self.phase is JobPhase.RUNNING and may_return and (again := self._restart(event)) is not None:
            if number < self._num_ranks:
                self._first_ends.setdefault(number, event)
            return [again]
        first = self._first_ends.get(number, event)
        failure = JobFailure(number, first.exit_code, 0, num_restarts=times, cause=first.cause)
        if self.phase is JobPhase.RUNNING and number >= self._num_ranks and exit_code == WORKERS_LOST_EXIT_CODE:
            self.running.discard(number)
            if self._reported_loss is not None:
                return []
            self._reported_loss = failure
            return [StartGraceTimer()]
        return self._ended({number}, failure)

    def may_restart(self, number: int) -> bool:
        """Return whether a process may be started again once more."""
        return self._restarted.get(number, 0) < self._allowed.get(number, 0)

    def _restart(self, event: ProcessExited) -> RestartProcess | None:
        """Have a process started again, if that is allowed once more."""
        if not self.may_restart(event.rank):
            return None
        self._restarted[event.rank] = times = self._restarted.get(event.rank, 0) + 1
        return RestartProcess(event.rank, times, event.exit_code, event.cause)

    def _lost(self, numbers: Iterable[int], reason: str) -> list[JobInstruction]:
        ended = self.running.intersection(numbers)
        return self._ended(ended, JobFailure(min(ended), HOST_LOST_EXIT_CODE, 0, reason)) if ended else []

    def _ended(self, numbers: set[int], failure: JobFailure | None) -> list[JobInstruction]:
        self.running -= numbers
        instructions: list[JobInstruction] = []
        if failure is not None and self.phase is JobPhase.RUNNING:
            is_alone = self._continue_on_failure and max(numbers) < self._num_ranks and self._num_running > 0
            num_stopped = 0 if is_alone else self._num_running
            self.failure = self.failure or msgspec.structs.replace(failure, num_stopped=num_stopped)
            if self.running and not is_alone:
                instructions = self._stop()
        elif self.phase is JobPhase.RUNNING and self.running and not self._num_running:
            self.phase = JobPhase.ENDING
            instructions = [StartGraceTimer()]
        if not self.running and self.phase in {JobPhase.RUNNING, JobPhase.ENDING, JobPhase.STOPPING}:
            self.phase, self._killed = JobPhase.SWEEPING, False
            instructions += [SweepProcesses(), StartGraceTimer()]
        return instructions

    def _signalled(self, signum: int, seconds: float) -> list[JobInstruction]:
        if signum in {SIGUSR1, SIGUSR2}:
            return self._pass_on(signum, seconds)
        if self.phase is JobPhase.RUNNING:
            self.signum = signum
        if self.phase in {JobPhase.RUNNING, JobPhase.ENDING}:
            self._stopped_at = seconds
            return self._stop()
        if signum == SIGINT and seconds - self._stopped_at > REPEATED_SIGNAL_SECONDS:
            return self._kill()
        return []

    def _pass_on(self, signum: int, seconds: float) -> list[JobInstruction]:
        """Pass a signal on to the ranks, once."""
        last = self._passed_on.get(signum, -inf)
        if self.phase is not JobPhase.RUNNING or seconds - last < SAME_SIGNAL_SECONDS:
            return []
        self._passed_on[signum] = seconds
        ranks = tuple(number for number in sorted(self.running) if number < self._num_ranks)
        return [SignalProcesses(ranks, signum)]

    def _stop(self) -> list[JobInstruction]:
        self.phase = JobPhase.STOPPING
        return [TerminateProcesses(tuple(sorted(self.running))), StartGraceTimer()]

    def _kill(self) -> list[JobInstruction]:
        self._killed = True
        return [KillProcesses(tuple(sorted(self.running))), StartGraceTimer()]

    def _grace_over(self) -> list[JobInstruction]:
        if self.phase is JobPhase.RUNNING:
            return [] if self._reported_loss is None else self._ended({self._reported_loss.rank}, self._reported_loss)
        if self.phase is JobPhase.ENDING:
            return self._stop()
        return self._finish() if self._killed else self._kill()

    def _watchdog_lost(self) -> list[JobInstruction]:
        if self.phase is JobPhase.RUNNING:
            self.signum = SIGKILL
        if self.phase in {JobPhase.RUNNING, JobPhase.ENDING}:
            self.phase = JobPhase.STOPPING
        return self._kill()

    def _finish(self) -> list[JobInstruction]:
        self.phase = JobPhase.DONE
        if (failure := self.failure or (None if self.signum else self._reported_loss)) is not None:
            code = failure.exit_code
            return [FinishJob(code if code > 0 else 128 - code, failure, None)]
        return [FinishJob(0 if self.signum is None else 128 + self.signum, None, self.signum)]
