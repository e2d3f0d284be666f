"""Decisions of the launcher about an elastic job: an event goes in, instructions come out. No I/O, no clock.

While the job runs (RUNNING of ``launch.job_state``, whose other phases are the same here):

a. Hosts are found (HostsFound) and called (CallHost); each is ready (HostPrepared) or cannot take part (HostRefused).
   When there are places for `min_ranks`, the first processes are started (StartSlots), and are the first view.
b. A process dies: the others go on. Its place, or its whole host, rests; then a candidate is started there. A place
   that has never failed is used before one that has rested. The members announce their views (ViewAnnounced).
c. A host vanishes, or has fewer places: the processes there are asked to leave, the highest local ranks first, and
   killed if they do not.
d. A member has finished (MemberFinished): nothing is started any more; those who are no members are asked to leave.
   When all have ended, so has the job, with 0, or with the exit code of a member that failed meanwhile.
e. The job fails: when no process is left; when no process is left that holds the state of the training; when there were
   fewer than `min_ranks` for too long, or there can never be as many again; when members changed too often.

Exit code 0 of a process that has not finished is a death, unless it was asked to leave; in a job that has never formed
a view it is the end of a program that does not know of elastic jobs. A process that its fellows excluded (exit code 75)
rests as after a failure, which is not the job's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from signal import SIGKILL

import msgspec

from reigen.errors import format_ranks
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.elastic.seats import HostPhase, Seat, SeatedHost, SeatState, SeatTable
from reigen.launch.exit_report import describe_exit
from reigen.launch.hosts import HostInfo
from reigen.launch.job_state import (
    HOST_LOST_EXIT_CODE,
    FinishJob,
    HostLost,
    JobEvent,
    JobFailure,
    JobInstruction,
    JobMessage,
    JobPhase,
    JobState,
    ProcessExited,
    SignalProcesses,
    StartGraceTimer,
    SweepProcesses,
    TerminateProcesses,
)

#: Exit code of a process that its fellows have excluded from the job.
FENCED_EXIT_CODE = 75
#: How long a process that is asked to leave may take: it leaves at the end of a step.
LEAVE_SECONDS = 30.0
#: How long candidates may run when the last member that the launcher knows of has gone: another view may be on its way.
ORPHANED_SECONDS = 30.0
#: How long a host that could not take part is not called again.
_REFUSED_SECONDS = 10.0
#: Texts of Horovod's.
MIN_RANKS_TEXT = (
    "Timed out waiting for minimum number of slots to become available. Please check that you have enough resources "
    "to run at least {} processes."
)
RESET_LIMIT_TEXT = "Job has been shutdown because number of resets during elastic job exceeded limit: {}"


class HostsFound(JobMessage, frozen=True):
    """Hosts, and how many processes each may have, as they are now."""

    hosts: tuple[tuple[str, int], ...]


class HostPrepared(JobMessage, frozen=True):
    """Processes can be started on a host."""

    host: str


class HostRefused(JobMessage, frozen=True):
    """Host cannot take part, for this ``reason``."""

    host: str
    reason: str


class ViewAnnounced(JobMessage, frozen=True):
    """View that is run from now on: its epoch, and the members' slots and incarnations in the order of ranks."""

    epoch: int
    members: tuple[tuple[int, int], ...]


class MemberFinished(JobMessage, frozen=True):
    """Program of this member is done; its process is about to end."""

    slot: int


class TimePassed(JobMessage, frozen=True):
    """Something may be due."""


class CallHost(JobMessage, frozen=True):
    """Prepare a host for processes; answered by HostPrepared or HostRefused."""

    host: str


class SlotStart(JobMessage, frozen=True):
    """Process to start: its place, and, where it belongs to the first view, its rank there and the view's size."""

    slot: int
    incarnation: int
    host: str
    local_rank: int
    first_size: int = 0


class StartSlots(JobMessage, frozen=True):
    """Start these processes; those of the first view, or candidates."""

    starts: tuple[SlotStart, ...]


class SayToUser(JobMessage, frozen=True):
    """Tell the user."""

    text: str


ElasticEvent = HostsFound | HostPrepared | HostRefused | ViewAnnounced | MemberFinished | TimePassed
ElasticInstruction = CallHost | StartSlots | SayToUser


@dataclass(frozen=True, slots=True)
class _Death:
    """End of a process that was not to end."""

    failure: JobFailure
    member: tuple[int, int]


class ElasticJobState(JobState):
    """State of one elastic job. Numbers of processes are slots.

    Args:
        options: of the job.
        chance: returns random numbers from 0 to 1.
        now: when the job begins.
    """

    def __init__(self, options: ElasticOptions, chance: Callable[[], float], now: float) -> None:
        super().__init__(0)
        self._num_ranks = sys.maxsize  # all numbers are those of ranks
        self._options, self._chance, self._now = options, chance, now
        self.seats = SeatTable()
        self.has_begun = False
        #: Epoch of the latest view; None: none was announced.
        self.epoch: int | None = None
        #: Members of the latest view, by rank; until one is announced, the first processes.
        self.members: tuple[tuple[int, int], ...] = ()
        #: Slots whose program is done.
        self.finished: set[int] = set()
        #: What has ended the job, if it was no process's failure.
        self.problem = ""
        self._deaths: list[_Death] = []
        #: Since when there are fewer processes than needed; None: there are enough.
        self._short_since: float | None = now
        #: Since when no member is known to run.
        self._orphaned_since: float | None = None
        #: Changes of members: deaths by the epoch in which they happened, and views.
        self._num_resets = 0
        self._counted_epoch: int | None = None

    # ---------------------------------------------------------------- events

    def handle_at(self, event: JobEvent | ElasticEvent, now: float) -> list[JobInstruction | ElasticInstruction]:
        """Return the instructions to carry out, in this order."""
        self._now = now
        if isinstance(event, MemberFinished) and self.phase is not JobPhase.DONE:
            self.finished.add(event.slot)
        if self.phase is not JobPhase.RUNNING:
            return [] if isinstance(event, ElasticEvent) else list(self.handle(event))
        instructions: list[JobInstruction | ElasticInstruction] = []
        match event:
            case HostsFound(hosts):
                instructions += self._found(hosts)
            case HostPrepared(name):
                self.seats.hosts[name].phase = HostPhase.READY
            case HostRefused(name, reason):
                instructions += self._refused(self.seats.hosts[name], reason)
            case ViewAnnounced(epoch, members):
                self._announced(epoch, members)
            case ProcessExited(slot, exit_code, cause):
                instructions += self._process_ended(self.seats[slot], exit_code, cause)
            case HostLost(_, reason, host):
                instructions += self._host_lost(self.seats.hosts[host], reason)
            case MemberFinished() | TimePassed():
                pass
            case _:
                return list(self.handle(event))
        return instructions + self._decide()

    def next_due(self) -> float:
        """Return when TimePassed is due; inf: not at all."""
        if self.phase is not JobPhase.RUNNING:
            return inf
        ends = [self.seats.next_due(self._now)]
        ends += [] if self._short_since is None else [self._short_since + self._timeout_seconds]
        ends += [] if self._orphaned_since is None else [self._orphaned_since + ORPHANED_SECONDS]
        return min(ends)

    def validate(self) -> None:
        """Assert the invariants between two events."""
        assert self.phase is not JobPhase.SWEEPING or not self.running
        assert self.phase is JobPhase.DONE or self.running == {
            seat.slot for seat in self.seats if seat.state is not SeatState.FREE
        }
        assert len(self.seats.in_state(SeatState.RUNNING)) <= self._options.max_ranks

    @property
    def _timeout_seconds(self) -> float:
        return self._options.timeout_seconds if self.has_begun else self._options.start_timeout_seconds

    def _found(self, hosts: Sequence[tuple[str, int]]) -> list[JobInstruction | ElasticInstruction]:
        _, lost = self.seats.update(HostInfo(*each) for each in hosts)
        leaving = [seat for host in lost for seat in host.seats[host.num_slots :] if seat.state is SeatState.RUNNING]
        if not leaving:
            return []
        names = ", ".join(sorted({seat.host for seat in leaving}))
        slots = format_ranks(sorted(seat.slot for seat in leaving))
        why = f"host{'s' if ',' in names else ''} {names} {'have' if ',' in names else 'has'} fewer places"
        return [SayToUser(f"{why}: slots {slots} are asked to leave"), self._ask_to_leave(leaving)]

    def _ask_to_leave(self, seats: Iterable[Seat]) -> TerminateProcesses:
        slots = []
        for seat in seats:
            seat.state, seat.leaves_by = SeatState.LEAVING, self._now + LEAVE_SECONDS
            slots.append(seat.slot)
        return TerminateProcesses(tuple(sorted(slots)))

    def _refused(self, host: SeatedHost, reason: str) -> list[JobInstruction | ElasticInstruction]:
        host.phase = HostPhase.GONE
        host.failures.rests_until = max(host.failures.rests_until, self._now + _REFUSED_SECONDS)
        return [SayToUser(f"host {host.name} cannot take part: {reason}; it is called again later")]

    def _announced(self, epoch: int, members: tuple[tuple[int, int], ...]) -> None:
        if self.epoch is not None and epoch <= self.epoch:
            return
        if self.epoch is not None and self._options.counts_resizes and self._counted_epoch != self.epoch:
            self._num_resets += 1
        self.epoch, self.members = epoch, members
        self._deaths.clear()

    def _host_lost(self, host: SeatedHost, reason: str) -> list[JobInstruction | ElasticInstruction]:
        host.phase = HostPhase.GONE
        instructions: list[JobInstruction | ElasticInstruction] = []
        rest = host.failures.add(self._now, self._options.cooldown, self._chance())
        ended = [seat for seat in host.seats if seat.state is not SeatState.FREE]
        for seat in ended:
            was_leaving = seat.state is SeatState.LEAVING
            self._vacate(seat)
            if not was_leaving:
                self._count_death(seat, JobFailure(seat.slot, HOST_LOST_EXIT_CODE, 0, reason))
        slots = f", with slots {format_ranks(sorted(seat.slot for seat in ended))}" if ended else ""
        instructions.append(SayToUser(f"host {host.name} was lost{slots}: {reason}; {self._describe_rest(rest)}"))
        return instructions

    def _vacate(self, seat: Seat) -> None:
        self.running.discard(seat.slot)
        seat.state, seat.leaves_by = SeatState.FREE, inf

    def _process_ended(self, seat: Seat, exit_code: int, cause: str) -> list[JobInstruction | ElasticInstruction]:
        was_leaving = seat.state is SeatState.LEAVING
        self._vacate(seat)
        failure = JobFailure(seat.slot, exit_code, 0, cause=cause)
        if exit_code == 0 and self.epoch is None and seat.id in self.members:
            self.finished.add(seat.slot)
        if self.finished:
            is_failure = exit_code not in {0, FENCED_EXIT_CODE} and not was_leaving and seat.id in self.members
            self.failure = self.failure or (failure if is_failure else None)
            return []
        if was_leaving:
            return [SayToUser(f"{self._name(seat)} has left")]
        self._count_death(seat, failure)
        neighbours = self._neighbours_to_stop(seat, exit_code)
        if neighbours is None:
            rest = seat.failures.add(self._now, self._options.cooldown, self._chance())
            return [SayToUser(f"{self._name(seat)}: {_describe_end(exit_code, cause)}; {self._describe_rest(rest)}")]
        host = self.seats.hosts[seat.host]
        rest = host.failures.add(self._now, self._options.cooldown, self._chance())
        text = f"{self._name(seat)}: {_describe_end(exit_code, cause)}; host {host.name} is not used any more"
        text += "" if rest is None else f" for {rest:.0f} s"
        stop = [self._ask_to_leave(neighbours)] if neighbours else []
        return [SayToUser(f"{text}; {self._describe_number()}"), *stop]

    def _neighbours_to_stop(self, seat: Seat, exit_code: int) -> list[Seat] | None:
        """Return the places whose processes end with this one; None: their host is used further."""
        if self._options.blacklist != "host" or exit_code == FENCED_EXIT_CODE:
            return None
        return [each for each in self.seats.hosts[seat.host].seats if each.state is SeatState.RUNNING]

    def _count_death(self, seat: Seat, failure: JobFailure) -> None:
        if failure.exit_code != FENCED_EXIT_CODE:
            self._deaths.append(_Death(failure, seat.id))
        if seat.id in self.members and (self.epoch is None or self._counted_epoch != self.epoch):
            self._counted_epoch = self.epoch
            self._num_resets += 1

    # ---------------------------------------------------------------- decisions

    def _decide(self) -> list[JobInstruction | ElasticInstruction]:
        """Decide what follows from the state as it is now."""
        running = self.seats.in_state(SeatState.RUNNING)
        if self.finished:
            return self._decide_ending(running)
        is_short = len(running) < self._options.min_ranks
        self._short_since = None if not is_short else self._now if self._short_since is None else self._short_since
        has_members = any(seat.id in self.members for seat in running)
        is_orphaned = self.has_begun and not has_members
        self._orphaned_since = (
            None if not is_orphaned else self._now if self._orphaned_since is None else self._orphaned_since
        )
        if problem := self._find_problem(running):
            return self._fail(problem)
        instructions = self._call_hosts()
        if self.has_begun or self._can_begin():
            instructions += self._start()
        return instructions + self._kill_late()

    def _kill_late(self) -> list[JobInstruction | ElasticInstruction]:
        """Kill those that were asked to leave long ago."""
        late = [seat for seat in self.seats.in_state(SeatState.LEAVING) if seat.leaves_by <= self._now]
        for seat in late:
            seat.leaves_by = self._now + LEAVE_SECONDS
        return [SignalProcesses(tuple(seat.slot for seat in late), SIGKILL)] if late else []

    def _decide_ending(self, running: Sequence[Seat]) -> list[JobInstruction | ElasticInstruction]:
        """Decide when a member has finished."""
        self._short_since = self._orphaned_since = None
        if not self.running:
            return list(self._ended(set(), None))
        others = [seat for seat in running if seat.id not in self.members and seat.slot not in self.finished]
        instructions: list[JobInstruction | ElasticInstruction] = [self._ask_to_leave(others)] if others else []
        return instructions + self._kill_late()

    def _find_problem(self, running: Sequence[Seat]) -> str:
        """Return why the job cannot go on; empty: it can. ``-`` stands for the first failure."""
        options = self._options
        limit = options.reset_limit
        if limit is not None and self._num_resets > limit:
            return RESET_LIMIT_TEXT.format(limit)
        if self.has_begun and not running:
            return "-"
        if self._orphaned_since is not None and self._now >= self._orphaned_since + ORPHANED_SECONDS:
            return "-"
        if self._short_since is not None and self._now >= self._short_since + self._timeout_seconds:
            return MIN_RANKS_TEXT.format(options.min_ranks)
        if options.discovery is None and self.seats.hosts and self.seats.num_possible() < options.min_ranks:
            return MIN_RANKS_TEXT.format(options.min_ranks)
        return ""

    def _fail(self, problem: str) -> list[JobInstruction | ElasticInstruction]:
        num_stopped = len(self.running)
        if problem == "-" and self._deaths:
            self.failure = msgspec.structs.replace(self._deaths[0].failure, num_stopped=num_stopped)
        else:
            self.problem = problem if problem != "-" else "no process is left that holds the state of the training"
        said: list[JobInstruction | ElasticInstruction] = [SayToUser(self.problem)] if self.problem else []
        return said + list(self._stop())

    def _call_hosts(self) -> list[JobInstruction | ElasticInstruction]:
        calls: list[JobInstruction | ElasticInstruction] = []
        for host in self.seats.hosts.values():
            if host.num_slots and host.phase is HostPhase.GONE and host.failures.rests_until <= self._now:
                host.phase = HostPhase.CALLED
                calls.append(CallHost(host.name))
        return calls

    def _can_begin(self) -> bool:
        if any(host.phase is HostPhase.CALLED and host.num_slots for host in self.seats.hosts.values()):
            return False
        return len(self.seats.usable(self._now)) >= self._options.min_ranks

    def _start(self) -> list[JobInstruction | ElasticInstruction]:
        """Start the first processes, or candidates, in free places."""
        usable = self.seats.usable(self._now)[: self._options.max_ranks]
        chosen = [seat for seat in usable if seat.state is SeatState.FREE]
        if not chosen:
            return []
        size = 0 if self.has_begun else len(chosen)
        starts = []
        for seat in chosen:
            self.seats.occupy(seat)
            self.running.add(seat.slot)
            starts.append(SlotStart(seat.slot, seat.incarnation, seat.host, seat.local_rank, size))
        said: list[JobInstruction | ElasticInstruction] = []
        if self.has_begun:
            said = [SayToUser("; ".join(map(_describe_start, starts)))]
        else:
            self.members = tuple(seat.id for seat in chosen)
        self.has_begun = True
        if len(self.seats.in_state(SeatState.RUNNING)) >= self._options.min_ranks:
            self._short_since = None
        self._orphaned_since = None if size else self._orphaned_since
        return [*said, StartSlots(tuple(starts))]

    # ---------------------------------------------------------------- the end

    def _stop(self) -> list[JobInstruction]:
        """Stop what runs; where nothing does, sweep."""
        if self.running:
            for seat in self.seats:
                seat.leaves_by = inf
            return super()._stop()
        self.phase, self._killed = JobPhase.SWEEPING, False
        return [SweepProcesses(), StartGraceTimer()]

    def _ended(self, numbers: set[int], failure: JobFailure | None) -> list[JobInstruction]:
        for slot in numbers:
            self._vacate(self.seats[slot])
        return super()._ended(numbers, failure)

    def _finish(self) -> list[JobInstruction]:
        if self.problem and self.failure is None and self.signum is None:
            self.phase = JobPhase.DONE
            return [FinishJob(1, None, None)]
        return super()._finish()

    # ---------------------------------------------------------------- words

    def _name(self, seat: Seat) -> str:
        where = f" (host {seat.host})" if len(self.seats.hosts) > 1 else ""
        return f"slot {seat.slot}{where}"

    def _describe_number(self) -> str:
        num = len(self.seats.in_state(SeatState.RUNNING))
        return f"{num} process{'es go' if num != 1 else ' goes'} on"

    def _describe_rest(self, rest_seconds: float | None) -> str:
        what = "its place is not used any more" if rest_seconds is None else f"its place rests for {rest_seconds:.0f} s"
        return f"{self._describe_number()}, {what}"


def members_in_order(members: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """Return the members' slots, by rank."""
    return tuple(slot for slot, _ in members)


def _describe_end(exit_code: int, cause: str) -> str:
    if exit_code == FENCED_EXIT_CODE:
        return "its fellows have excluded it"
    if exit_code == 0:
        return "it has ended before the job (exit code 0)"
    return describe_exit(exit_code, cause)


def _describe_start(start: SlotStart) -> str:
    if start.incarnation:
        return f"slot {start.slot} is started again (host {start.host})"
    return f"slot {start.slot} is started (host {start.host})"
