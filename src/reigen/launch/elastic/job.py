"""Decisions of the launcher about an elastic job: an event goes in, instructions come out. No I/O, no clock.

While the job runs (RUNNING of ``launch.job_state``, whose other phases are the same here):

a. Hosts are found (HostsFound) and called (CallHost); each is ready (HostPrepared) or cannot take part (HostUnusable).
   When there are places for `min_ranks`, the first processes are started (StartSlots), and are the first view. Where
   there is place for more than `max_ranks`, spares are started behind them, which wait until a member dies; warm ones
   become members, which count for `min_ranks`, and take no samples while there are `max_ranks` others.
b. A process dies: the others go on. Its place, or its whole host, rests; then a candidate is started there. A place
   that has never failed is used before one that has rested. The members announce their views (ViewAnnounced).
c. A host vanishes, or has fewer places: the processes there are asked to leave, the highest local ranks first, and
   killed if they do not; not before the first view is there, in which nobody may be missing. So are those of a host
   that its engine takes away (HostNoticed); with the last such host the job ends as by that signal. A process may
   leave by itself, too (MemberLeaving): that is no failure. A member that makes all steps slower (MemberStraggles) is
   reported, or asked to leave where it can be spared; its place rests.
d. A member has finished (MemberFinished): nothing is started any more; those who are no members are asked to leave.
   When all have ended, so has the job, with 0, or with the exit code of a process that failed meanwhile and was still
   a member: the others go on without one that a view has left out.
e. The job fails: when a process has died and there is still no view; when no process is left; when no process is left
   that holds the state of the training; when there were fewer than `min_ranks` for too long, or there can never be as
   many again; when members changed too often.

f. With parameter servers, which are started with the first processes, what is to be trained is theirs, and members are
   the servers' workers: the scheduler reports who joins (WorkerEntered), that the first ones have (WorkersBegan), and
   who has left in good order (WorkerDeparted), which is the end of a program. From then on others are started whoever
   dies, be it all of them. A server or the scheduler that is killed is started again, as often as ``restarts`` allows
   (RestartProcess); where it may not be, or ends with an error, the job ends. The servers end by themselves when the
   workers have, which the scheduler tells them, and are asked to only when no process is left. Where the program
   announces views, too, members are those of its views. Which of several processes has which servers, where these move,
   is decided in `launch.elastic.server_placement`.

Exit code 0 of a process that has not finished is a death, unless it was asked to leave. Where all have ended so, the
job fails, but for horovodrun, where it is the program's end; so it is in a job that has never formed a view. A process
that its fellows excluded (exit code 75) rests as after a failure, which is not the job's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from signal import SIGCONT, SIGKILL, SIGTERM

import msgspec

from reigen.cluster.membership.views.history import ChangeNote
from reigen.cluster.membership.views.planning import STATE_LOST_TEXT
from reigen.errors import format_ranks
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.elastic.server_placement import (
    ForgetCommands,
    PlacementInstruction,
    ServerPlacement,
    StartServerProcess,
    TellServerProcess,
)
from reigen.launch.elastic.slots import HostPhase, HostSlots, JobSlot, SlotState, SlotTable
from reigen.launch.elastic.stragglers import StragglerEjection
from reigen.launch.elastic.view_line import ChangeLines
from reigen.launch.exit_report import EARLY_END_TEXT, EARLY_SUCCESS_TEXT, describe_exit
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
    SignalReceived,
    StartGraceTimer,
    SweepProcesses,
    was_killed,
)

#: Exit code of a process that its fellows have excluded from the job.
FENCED_EXIT_CODE = 75
#: How long a process that is asked to leave may take: it leaves at the end of a step.
LEAVE_SECONDS = 30.0
#: How long one that a view has left out, as it has died or was excluded, may take to end by itself when the job ends.
LEFT_OUT_SECONDS = 5.0
#: How long candidates may run when the last member that the launcher knows of has gone: another view may be on its way.
ORPHANED_SECONDS = 30.0
#: How long the first view may take to be announced after a process of it has died: it may be on its way.
FIRST_VIEW_SECONDS = 5.0
#: How long a host that could not take part is not called again: at first, doubled each time, and at most.
_REFUSED_SECONDS, _MOST_REFUSED_SECONDS = 10.0, 600.0
#: Horovod's words.
MIN_RANKS_TEXT = (
    "Timed out waiting for minimum number of slots to become available. Please check that you have enough resources "
    "to run at least {} processes."
)
LEFT_EARLY_TEXT = "a process has left before all had called init(), and the others wait for it in vain"
ALL_LEFT_TEXT = "all processes have left the job before its program was done"
ORPHANED_TEXT = (
    "no process is left that is known to have the state of the training: the job ends in "
    f"{ORPHANED_SECONDS:.0f} s, unless a change of members was under way"
)
LOSES_STATE_TEXT = (
    "nobody stays who has the state of the training, and the job ends: a host should stay in the list until processes "
    "of another have joined"
)
RESET_LIMIT_TEXT = "Job has been shutdown because number of resets during elastic job exceeded limit: {}"
RESIZE_LIMIT_TEXT = "the members have changed more often than --resize-limit {} allows"
#: Said where the user's hosts do not suffice from the beginning.
TOO_FEW_TEXT = "the hosts that can take part have {} slots, and {} processes are needed at least; nothing was started"


class HostsFound(JobMessage, frozen=True):
    """Hosts, and how many processes each may have, as they are now."""

    hosts: tuple[tuple[str, int], ...]


class HostPrepared(JobMessage, frozen=True):
    """Processes can be started on a host."""

    host: str


class HostUnusable(JobMessage, frozen=True):
    """Host cannot take part, for this ``reason``."""

    host: str
    reason: str


class ViewAnnounced(JobMessage, frozen=True):
    """View that is run from now on: its epoch, and the members' slots and incarnations in the order of ranks.

    ``step`` have all of them applied; ``completes``: that one was finished by those who are left. ``spares``: ranks of
    those that take no samples.
    """

    epoch: int
    members: tuple[tuple[int, int], ...]
    step: int = 0
    completes: bool = False
    spares: tuple[int, ...] = ()


class ChangeExplained(JobMessage, frozen=True):
    """Rank 0 of a view has explained the change before it; again when it knows the outcome for the step under way."""

    note: ChangeNote


class MemberFinished(JobMessage, frozen=True):
    """Program of this member is done; its process is about to end."""

    slot: int


class MemberLeaving(JobMessage, frozen=True):
    """Process leaves in good order, by itself: it was sent SIGTERM, or its program wants it."""

    slot: int
    incarnation: int


class MemberStraggles(JobMessage, frozen=True):
    """Member makes all steps slower.

    Attributes:
        slot, incarnation: which one.
        step: the latest of those steps.
        num_steps: how many they were, in a row.
        min_ranks: with fewer members the program makes no steps.
        work_seconds: its own work in a step.
        median_seconds: the median of the others'.
    """

    slot: int
    incarnation: int
    step: int
    num_steps: int
    min_ranks: int
    work_seconds: float
    median_seconds: float


class PauseAnnounced(JobMessage, frozen=True):
    """All members are about to wait for so many ``seconds`` (0: not known), while ``slots`` get so many bytes."""

    seconds: float
    num_bytes: int
    slots: tuple[int, ...]


class HostNoticed(JobMessage, frozen=True):
    """Engine has announced the end of a host, by ``signum``, at ``seconds`` on some steady clock."""

    host: str
    signum: int
    seconds: float


class WorkerEntered(JobMessage, frozen=True):
    """Process has become a worker of the parameter servers."""

    slot: int
    incarnation: int


class WorkersBegan(JobMessage, frozen=True):
    """All first processes have become workers of the parameter servers."""


class WorkerDeparted(JobMessage, frozen=True):
    """Worker has left the parameter servers in good order: its program is done."""

    slot: int
    incarnation: int


class ServersWanted(JobMessage, frozen=True):
    """Worker wants the servers to run in so many processes."""

    num: int


class ServerProcessReport(JobMessage, frozen=True):
    """Words of a server process: ``ready``, ``leaving``, ``released SERVER`` or ``failed SERVER REASON``."""

    process: int
    text: str


class TimePassed(JobMessage, frozen=True):
    """Something may be due."""


class CallHost(JobMessage, frozen=True):
    """Prepare a host for processes; answered by HostPrepared or HostUnusable."""

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


class StartServers(JobMessage, frozen=True):
    """Start parameter servers and their scheduler, for so many first workers."""

    num_workers: int


class SayToUser(JobMessage, frozen=True):
    """Tell the user."""

    text: str


ElasticEvent = (
    HostsFound
    | HostPrepared
    | HostUnusable
    | HostNoticed
    | ViewAnnounced
    | ChangeExplained
    | MemberFinished
    | MemberLeaving
    | MemberStraggles
    | PauseAnnounced
    | WorkerEntered
    | WorkersBegan
    | WorkerDeparted
    | ServersWanted
    | ServerProcessReport
    | TimePassed
)
ElasticInstruction = CallHost | StartSlots | StartServers | PlacementInstruction | SayToUser


@dataclass(frozen=True, slots=True)
class TakenOverJob:
    """Job as another launcher has left it.

    Attributes:
        slots: the latest process of each place, by number.
        running: numbers of those that run.
        hosts: that have an agent.
        epoch, members: the latest view that was announced.
        finished: slots whose program is done.
    """

    slots: tuple[SlotStart, ...]
    running: frozenset[int]
    hosts: tuple[str, ...]
    epoch: int | None
    members: tuple[tuple[int, int], ...]
    finished: tuple[int, ...]


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
        servers: numbers of parameter servers and their scheduler, which is the last, above all slots.
        restarts: how often each of these may be started again.
        placement: of servers in processes; None: each has one of its own.
    """

    def __init__(
        self,
        options: ElasticOptions,
        chance: Callable[[], float],
        now: float,
        servers: Sequence[int] = (),
        restarts: Mapping[int, int] | None = None,
        placement: ServerPlacement | None = None,
    ) -> None:
        super().__init__(0)
        self.placement = placement
        self._allowed = dict(restarts or {})
        self._restarted = dict.fromkeys(self._allowed, 0)
        self._num_ranks = min(servers, default=sys.maxsize)
        self._servers, self._scheduler = frozenset(servers), max(servers, default=-1)
        #: The first workers of the servers have joined.
        self._has_workers = False
        #: Processes that have become workers of theirs.
        self._workers: frozenset[tuple[int, int]] = frozenset()
        self._options, self._chance, self._now = options, chance, now
        self.slots = SlotTable()
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
        #: Since when a first process is dead, and no view was announced: the others wait for it in vain.
        self._doomed_since: float | None = None
        #: Hosts that were found before the first view, which all first processes are to come to.
        self._found_early: tuple[tuple[str, int], ...] | None = None
        #: hosts where a process has failed, which others are to leave
        self._left_hosts: set[str] = set()
        self._lines = ChangeLines()
        self._ejection = StragglerEjection(options)
        #: Since when no member is known to run.
        self._orphaned_since: float | None = None
        #: Changes of members: deaths by the epoch in which they happened, and views.
        self._num_resets = self._num_resizes = 0
        self._counted_epoch: int | None = None

    # ---------------------------------------------------------------- events

    def handle_at(self, event: JobEvent | ElasticEvent, now: float) -> list[JobInstruction | ElasticInstruction]:
        """Return the instructions to carry out, in this order."""
        self._now = now
        if isinstance(event, MemberFinished) and self.slots.has(event.slot):
            self.finished.add(event.slot)
        if self.phase is not JobPhase.RUNNING:
            return _answer_late(event) if isinstance(event, ElasticEvent) else list(self.handle(event))
        if (of_servers := self._servers_changed(event)) is not None:
            return of_servers
        instructions = self._say_lines(event)
        match event:
            case HostsFound(hosts):
                instructions += self._found(hosts)
            case HostPrepared() | HostUnusable():
                instructions += self._host_answered(event)
            case ViewAnnounced():
                instructions += self._announced(event)
            case ProcessExited(number, exit_code, cause):
                instructions += self._process_ended(self.slots[number], exit_code, cause)
            case HostLost(_, reason, host):
                instructions += self._host_lost(self.slots.hosts[host], reason)
            case HostNoticed():
                instructions += self._noticed(event)
            case MemberLeaving() | MemberStraggles():
                instructions += self._heard_of_member(event)
            case (
                MemberFinished()
                | TimePassed()
                | ChangeExplained()
                | PauseAnnounced()
                | WorkerEntered()
                | WorkersBegan()
                | WorkerDeparted()
                | ServersWanted()
                | ServerProcessReport()
            ):
                pass
            case _:
                return [*instructions, *self.handle(event)]
        return instructions + self._decide()

    def _say_lines(self, event: JobEvent | ElasticEvent) -> list[JobInstruction | ElasticInstruction]:
        """Say what members tell: a pause; or the latest change, where its line has waited for that, or need not."""
        if isinstance(event, ChangeExplained):
            self._lines.explain(event.note)
        must = isinstance(event, MemberFinished | ViewAnnounced | SignalReceived)
        instructions = _say(self._lines.take_line(self._now, must=must))
        if isinstance(event, PauseAnnounced):
            slots = {slot.number for slot in self.slots.in_state(SlotState.RUNNING)}.intersection(event.slots)
            instructions += _say(self._lines.describe_pause(self.epoch, event.seconds, event.num_bytes, slots))
        return instructions

    def restore(self, taken: TakenOverJob, now: float) -> None:
        """Go on where a launcher that was lost has left the job, before the first event.

        What it knew of failures and rests is lost with it.
        """
        self._now = now
        for start in taken.slots:
            is_running = start.slot in taken.running
            self.slots.restore(start.slot, start.host, start.local_rank, start.incarnation, is_running=is_running)
            if is_running:
                self.running.add(start.slot)
                self.slots.hosts[start.host].phase = HostPhase.READY
        for name in taken.hosts:
            if name in self.slots.hosts:
                self.slots.hosts[name].phase = HostPhase.READY
        self.has_begun, self.epoch, self.members = True, taken.epoch, taken.members
        self.finished |= {slot for slot in taken.finished if self.slots.has(slot)}

    def next_due(self) -> float:
        """Return when TimePassed is due; inf: not at all."""
        if self.phase is not JobPhase.RUNNING:
            return inf
        ends = [self.slots.next_due(self._now), self._lines.due]
        ends += [] if self._short_since is None else [self._short_since + self._timeout_seconds]
        ends += [] if self._doomed_since is None else [self._doomed_since + FIRST_VIEW_SECONDS]
        ends += [] if self._orphaned_since is None else [self._orphaned_since + ORPHANED_SECONDS]
        return min(ends)

    def validate(self) -> None:
        """Assert the invariants between two events."""
        assert self.phase is not JobPhase.SWEEPING or not self.running
        assert self.phase is JobPhase.DONE or self.running - self._servers == {
            slot.number for slot in self.slots if slot.state is not SlotState.FREE
        }
        assert len(self.slots.in_state(SlotState.RUNNING)) <= self._options.max_processes

    @property
    def _timeout_seconds(self) -> float:
        return self._options.timeout_seconds if self.has_begun else self._options.start_timeout_seconds

    def _found(self, hosts: tuple[tuple[str, int], ...]) -> list[JobInstruction | ElasticInstruction]:
        if self.has_begun and self.epoch is None and not self._has_workers:
            self._found_early = hosts
            return []
        _, lost = self.slots.update(HostInfo(*each) for each in hosts)
        leaving = [slot for host in lost for slot in host.slots[host.num_slots :] if slot.state is SlotState.RUNNING]
        if not leaving:
            return []
        names = {slot.host for slot in leaving}
        left = [host for host in lost if host.name in names]
        changes = [f"host {host.name} {'has fewer places' if host.num_slots else 'has vanished'}" for host in left]
        text = f"{', '.join(changes)}: {_format_slots(leaving)} asked to leave"
        staying = [slot for slot in self.slots.in_state(SlotState.RUNNING) if slot not in leaving]
        if self.epoch is not None and not any(slot.id in self.members for slot in staying):
            text += f"; {LOSES_STATE_TEXT}"
        for host, change in zip(left, changes, strict=True):
            self._lines.note_gone((slot.id for slot in leaving if slot.host == host.name), change)
        return [SayToUser(text), *self._ask_to_leave(leaving)]

    def _heed_found_early(self) -> list[JobInstruction | ElasticInstruction]:
        found, self._found_early = self._found_early, None
        return self._found(found) if found is not None else []

    def _ask_to_leave(self, slots: Iterable[JobSlot]) -> list[JobInstruction | ElasticInstruction]:
        numbers = []
        for slot in slots:
            slot.state, slot.leaves_by = SlotState.LEAVING, self._now + LEAVE_SECONDS
            numbers.append(slot.number)
        return [*_ask_to_end(numbers)]

    def _heard_of_member(self, event: MemberLeaving | MemberStraggles) -> list[JobInstruction | ElasticInstruction]:
        slot = self.slots[event.slot] if self.slots.has(event.slot) else None
        if slot is None or slot.state is not SlotState.RUNNING or slot.incarnation != event.incarnation:
            return []
        if isinstance(event, MemberStraggles):
            return self._member_straggles(slot, event)
        slot.state, slot.rests_when_left = SlotState.LEAVING, True  # it ends when its grace is over
        self._lines.note_gone([slot.id], "SIGTERM, or hvd.elastic.leave()")
        return _say(f"{self._name(slot)} leaves; {self._describe_number()}")

    @property
    def _deciding_host(self) -> str:
        """Host of rank 0; empty: it is not known."""
        number = self.members[0][0] if self.members else -1
        return self.slots[number].host if self.slots.has(number) else ""

    def _member_straggles(self, slot: JobSlot, event: MemberStraggles) -> list[JobInstruction | ElasticInstruction]:
        """Report a straggler, or ask it to leave: it does so behind a step, and nothing is done again."""
        text = (
            f"{self._name(slot)} is late: {event.work_seconds:.3g} s of work in each of the last {event.num_steps} "
            f"steps, where the median of the others is {event.median_seconds:.3g} s"
        )
        usable = self.slots.usable(self._now)
        if stays := self._ejection.find_obstacle(
            slot, event.step, event.min_ranks, usable, self.members, self._deciding_host
        ):
            return _say(f"{text}; it stays: {stays}") if self._ejection.is_news(slot, stays) else []
        self._ejection.note_ejection(event.step)
        self._lines.note_gone([slot.id], "ejected as a straggler")
        rest = slot.failures.add(self._now, self._options.cooldown, self._chance())
        signals = self._ask_to_leave([slot])
        return [*_say(f"{text}; it is asked to leave: {self._describe_rest(rest)}"), *signals]

    def _noticed(self, event: HostNoticed) -> list[JobInstruction | ElasticInstruction]:
        host = self.slots.hosts.get(event.host)
        if host is None or host.phase is HostPhase.LEAVING:
            return []
        host.phase = HostPhase.LEAVING
        running = self.slots.in_state(SlotState.RUNNING)
        leaving = [slot for slot in running if slot.host == host.name]
        if len(leaving) == len(running):
            return list(self.handle(SignalReceived(event.signum, event.seconds)))
        if not leaving:
            return []
        self._lines.note_gone((slot.id for slot in leaving), f"its engine takes host {host.name} away")
        return [SayToUser(f"{_format_slots(leaving)} asked to leave"), *self._ask_to_leave(leaving)]

    def _host_answered(self, event: HostPrepared | HostUnusable) -> list[JobInstruction | ElasticInstruction]:
        host = self.slots.hosts[event.host]
        if isinstance(event, HostUnusable):
            return self._refused(host, event.reason)
        host.phase, host.num_refusals = HostPhase.READY, 0
        return []

    def _refused(self, host: HostSlots, reason: str) -> list[JobInstruction | ElasticInstruction]:
        host.phase = HostPhase.GONE
        host.num_refusals += 1
        rest = min(_REFUSED_SECONDS * (1 << min(host.num_refusals - 1, 20)), _MOST_REFUSED_SECONDS)
        host.failures.rests_until = max(host.failures.rests_until, self._now + rest)
        return [SayToUser(f"host {host.name} cannot take part: {reason}; it is called again in {rest:g} s")]

    def _announced(self, view: ViewAnnounced) -> list[JobInstruction | ElasticInstruction]:
        if self.epoch is not None and view.epoch <= self.epoch:
            return []
        # a member that did not ask to leave: its death is noticed later
        is_failure = self.slots.leave_out(set(self.members) - set(view.members), self._now + LEFT_OUT_SECONDS)
        if self.epoch is not None and self._counted_epoch != self.epoch:
            self._num_resizes += not is_failure
            self._num_resets += is_failure or self._options.counts_resizes
        before = None if self.epoch is None else self.members
        completed_step = view.step if view.completes else None
        self._lines.begin_view(
            *(view.epoch, before, view.members, completed_step, self._now, view.spares), least=self._options.min_ranks
        )
        self.epoch, self.members, self._doomed_since = view.epoch, view.members, None
        self._deaths.clear()
        return [*_say(self._lines.take_line(self._now, must=False)), *self._heed_found_early()]

    def _host_lost(self, host: HostSlots, reason: str) -> list[JobInstruction | ElasticInstruction]:
        was_noticed = host.phase is HostPhase.LEAVING
        host.phase = HostPhase.GONE
        instructions: list[JobInstruction | ElasticInstruction] = []
        cooldown = self._options.cooldown
        rest: float | None = cooldown.least_seconds
        if was_noticed:
            host.failures.rests_until = self._now + cooldown.least_seconds
        else:
            rest = host.failures.add(self._now, cooldown, self._chance())
        ended = [slot for slot in host.slots if slot.state is not SlotState.FREE]
        for slot in ended:
            was_leaving = slot.state is SlotState.LEAVING
            self._vacate(slot)
            self._doom(slot)
            if not was_leaving:
                self._count_death(slot, JobFailure(slot.number, HOST_LOST_EXIT_CODE, 0, reason))
        slots = f", with slot{'s' * (len(ended) > 1)} {format_ranks(slot.number for slot in ended)}" if ended else ""
        instructions.append(SayToUser(f"host {host.name} was lost{slots}: {reason}; {self._describe_rest(rest)}"))
        return instructions

    def _servers_changed(self, event: JobEvent | ElasticEvent) -> list[JobInstruction | ElasticInstruction] | None:
        """Handle events of servers and their workers; None: it is another event."""
        if isinstance(event, WorkerEntered | WorkersBegan | WorkerDeparted):
            return self._workers_changed(event) + self._decide()
        if isinstance(event, ServersWanted | ServerProcessReport) and self.placement is not None:
            if isinstance(event, ServersWanted):
                return _note_started(self.running, self._num_ranks, self.placement.resize(event.num))
            if not event.text.startswith("failed "):
                return _note_started(
                    self.running, self._num_ranks, self.placement.handle_report(event.process, event.text)
                )
            if self.finished:  # the job was over before
                return []
            number, reason = self._num_ranks + event.process, event.text.split(" ", 2)[2]
            self.failure = self.failure or JobFailure(number, 1, self._num_running, cause=reason)
            return list(self._stop())
        if isinstance(event, ProcessExited) and event.rank in self._servers:
            return self._server_ended(event)
        return None

    def _workers_changed(
        self, event: WorkerEntered | WorkersBegan | WorkerDeparted
    ) -> list[JobInstruction | ElasticInstruction]:
        """Handle a report of the scheduler about the workers of the servers."""
        if isinstance(event, WorkersBegan):
            if not self._has_workers:  # else a scheduler that was started again reports it anew
                self._deaths.clear()
            self._has_workers, self._doomed_since = True, None
            return self._heed_found_early()
        slot = self.slots[event.slot] if self.slots.has(event.slot) else None
        if slot is None or slot.id != (event.slot, event.incarnation) or self.epoch is not None:
            return []
        if isinstance(event, WorkerDeparted):
            if slot.state is SlotState.RUNNING:
                self.finished.add(slot.number)
            return []
        return [] if slot.state is SlotState.FREE else self._worker_entered(slot)

    def _worker_entered(self, slot: JobSlot) -> list[JobInstruction | ElasticInstruction]:
        self._workers |= {slot.id}
        if slot.id in self.members:
            return []
        self.members = (*self.members, slot.id)
        num_workers = len(self.members)
        words = "workers go" if num_workers != 1 else "worker goes"
        return [SayToUser(f"slot {slot.number} joins; {num_workers} {words} on")]

    def _server_ended(self, event: ProcessExited) -> list[JobInstruction | ElasticInstruction]:
        """Handle the end of a server or of the scheduler, while the job runs."""
        placement = self.placement if event.rank != self._scheduler else None
        process = event.rank - self._num_ranks
        if was_killed(event.exit_code) and (again := self._restart(event)) is not None:
            if placement is None:
                return [again]
            return [
                ForgetCommands(process),
                again,
                *_note_started(self.running, self._num_ranks, placement.process_ended(process, is_restarted=True)),
            ]
        times = self._restarted.get(event.rank, 0)
        self.running.discard(event.rank)
        if event.exit_code == 0:  # all workers have left
            if placement is None or placement.servers_of(process):
                return self._decide()
            instructions = _note_started(
                self.running, self._num_ranks, placement.process_ended(process, is_restarted=False)
            )
            return [SayToUser(f"server process {process} has left"), *instructions, *self._decide()]
        self.failure = self.failure or JobFailure(
            event.rank, event.exit_code, self._num_running, num_restarts=times, cause=event.cause
        )
        return list(self._stop())

    def _vacate(self, slot: JobSlot) -> None:
        self.running.discard(slot.number)
        slot.state, slot.leaves_by = SlotState.FREE, inf

    def _process_ended(self, slot: JobSlot, exit_code: int, cause: str) -> list[JobInstruction | ElasticInstruction]:
        was_leaving = slot.state is SlotState.LEAVING
        self._vacate(slot)
        failure = JobFailure(slot.number, exit_code, 0, cause=cause)
        has_views = self.epoch is not None or slot.id in self._workers
        if exit_code == 0 and not has_views and slot.id in self.members and not was_leaving:
            self.finished.add(slot.number)
        if self.finished:
            is_failure = exit_code not in {0, FENCED_EXIT_CODE} and not was_leaving and slot.id in self.members
            self.failure = self.failure or (failure if is_failure else None)
            is_shown = exit_code != 0 and not was_leaving
            return _say(f"{self._name(slot)}: {_describe_end(exit_code, cause)}" if is_shown else "")
        if was_leaving:
            self._doom(slot)
            end = "" if exit_code in {0, -SIGTERM, 128 + SIGTERM} else f": {_describe_end(exit_code, cause)}"
            if not slot.rests_when_left:
                return [SayToUser(f"{self._name(slot)} has left{end}")]
            seconds = self._options.cooldown.least_seconds
            slot.failures.rests_until, slot.rests_when_left = self._now + seconds, False
            return [SayToUser(f"{self._name(slot)} has left{end}; {self._describe_rest(seconds)}")]
        self._count_death(slot, failure)
        if self._options.blacklist != "host" or exit_code == FENCED_EXIT_CODE:
            rest = slot.failures.add(self._now, self._options.cooldown, self._chance())
            return [SayToUser(f"{self._name(slot)}: {_describe_end(exit_code, cause)}; {self._describe_rest(rest)}")]
        host = self.slots.hosts[slot.host]
        rest = host.failures.add(self._now, self._options.cooldown, self._chance())
        text = f"{self._name(slot)}: {_describe_end(exit_code, cause)}; host {host.name} is not used any more"
        text += "" if rest is None else f" for {rest:.0f} s"
        self._left_hosts.add(host.name)  # `_decide` asks the processes to leave that are there
        return [SayToUser(f"{text}; {self._describe_number(without=host.name)}")]

    def _leave_hosts(self) -> list[JobInstruction | ElasticInstruction]:
        """Ask processes to leave that are on hosts where one has failed, as soon as others have the state."""
        instructions: list[JobInstruction | ElasticInstruction] = []
        running = self.slots.in_state(SlotState.RUNNING)
        for name in sorted(self._left_hosts):
            others = [slot for slot in running if slot.host != name]
            may_come = bool(others) or any(slot.host != name for slot in self.slots.usable(self._now))
            if may_come and not any(slot.id in self.members for slot in others):
                continue  # who comes gets the state from these
            self._left_hosts.discard(name)
            if leaving := [slot for slot in running if slot.host == name]:
                self._lines.note_gone((slot.id for slot in leaving), f"host {name} is not used any more")
                instructions += self._ask_to_leave(leaving)
        return instructions

    def _doom(self, slot: JobSlot) -> None:
        """Note that a first process is gone: without it there is no first view. Workers of servers begin without it."""
        if self.epoch is None and self._doomed_since is None and not self._servers and slot.id in self.members:
            self._doomed_since = self._now

    def _count_death(self, slot: JobSlot, failure: JobFailure) -> None:
        self._doom(slot)
        is_of_host = failure.exit_code == HOST_LOST_EXIT_CODE
        end = f"host {slot.host} was lost" if is_of_host else _describe_end(failure.exit_code, failure.cause)
        self._lines.note_gone([slot.id], end)
        if failure.exit_code != FENCED_EXIT_CODE:
            self._deaths.append(_Death(failure, slot.id))
        if slot.id in self.members:
            self._lines.note_death(self._now)
        if slot.id in self.members and (self.epoch is None or self._counted_epoch != self.epoch):
            self._counted_epoch = self.epoch
            self._num_resets += 1
        if self._servers and self.epoch is None:
            self.members = tuple(each for each in self.members if each != slot.id)

    @property
    def _state_is_elsewhere(self) -> bool:
        """Return whether servers hold the state of the training, and no view's members do."""
        return self._has_workers and self.epoch is None

    # ---------------------------------------------------------------- decisions

    def _decide(self) -> list[JobInstruction | ElasticInstruction]:
        """Decide what follows from the state as it is now."""
        running = self.slots.in_state(SlotState.RUNNING)
        if self.finished:
            return self._decide_ending(running)
        is_short = len(running) < self._options.min_ranks
        self._short_since = None if not is_short else self._now if self._short_since is None else self._short_since
        leaving = self.slots.in_state(SlotState.LEAVING)
        has_members = any(slot.id in self.members for slot in [*running, *leaving])
        is_orphaned = self.has_begun and not has_members and not self._state_is_elsewhere
        is_newly_orphaned = is_orphaned and self._orphaned_since is None
        self._orphaned_since = (
            None if not is_orphaned else self._now if self._orphaned_since is None else self._orphaned_since
        )
        if problem := self._find_problem(running, leaving):
            return self._fail(problem)
        instructions = [*self._leave_hosts(), *self._call_hosts()]
        if is_newly_orphaned:
            instructions.append(SayToUser(ORPHANED_TEXT))
        running = self.slots.in_state(SlotState.RUNNING)
        # with no member that stays there is nobody whom a candidate could join
        has_state = self._state_is_elsewhere or any(slot.id in self.members for slot in running)
        if has_state if self.has_begun else self._can_begin():
            instructions += self._start()
        return instructions + self._kill_late()

    def _kill_late(self) -> list[JobInstruction | ElasticInstruction]:
        """Kill those that were asked to leave long ago."""
        late = [slot for slot in self.slots.in_state(SlotState.LEAVING) if slot.leaves_by <= self._now]
        for slot in late:
            slot.leaves_by = self._now + LEAVE_SECONDS
        return [SignalProcesses(tuple(slot.number for slot in late), SIGKILL)] if late else []

    def _decide_ending(self, running: Sequence[JobSlot]) -> list[JobInstruction | ElasticInstruction]:
        """Decide when a member has finished."""
        self._short_since = self._orphaned_since = self._doomed_since = None
        if not self._num_running:
            return [*self._ended(set(), None), *(self.placement.close() if self.placement is not None else ())]
        others = [slot for slot in running if slot.id not in self.members and slot.number not in self.finished]
        others = [slot for slot in others if slot.ends_by <= self._now]
        instructions = self._ask_to_leave(others) if others else []
        return instructions + self._kill_late()

    def _find_problem(self, running: Sequence[JobSlot], leaving: Sequence[JobSlot]) -> str:
        """Return why the job cannot go on; empty: it can. ``-`` stands for the first failure."""
        options = self._options
        limit = options.reset_limit
        if limit is not None and self._num_resets > limit:
            return RESET_LIMIT_TEXT.format(limit)
        if options.resize_limit is not None and self._num_resizes > options.resize_limit:
            return RESIZE_LIMIT_TEXT.format(options.resize_limit)
        if self.has_begun and not running and not leaving and not self._state_is_elsewhere:
            return "-" if self._deaths else ALL_LEFT_TEXT
        hold_seconds = 0.0 if self.epoch is None else ORPHANED_SECONDS  # without a first view there is no second one
        if self._orphaned_since is not None and self._now >= self._orphaned_since + hold_seconds:
            return "-"
        if self._doomed_since is not None and self._now >= self._doomed_since + FIRST_VIEW_SECONDS:
            return "-" if self._deaths else LEFT_EARLY_TEXT
        if self._short_since is not None and self._now >= self._short_since + self._timeout_seconds:
            return MIN_RANKS_TEXT.format(options.min_ranks)
        is_early_end = self._deaths and not any(each.failure.exit_code for each in self._deaths)  # others may follow
        is_possible = is_early_end or self.slots.num_possible() >= options.min_ranks
        if options.has_fixed_hosts and self.slots.hosts and not is_possible:
            return MIN_RANKS_TEXT.format(options.min_ranks)
        if options.has_fixed_hosts and not self.has_begun and self.slots.hosts and not self._is_calling():
            num_slots = sum(host.num_slots for host in self.slots.hosts.values() if host.phase is HostPhase.READY)
            if num_slots < options.min_ranks:
                return TOO_FEW_TEXT.format(num_slots, options.min_ranks)
        return ""

    def _fail(self, problem: str) -> list[JobInstruction | ElasticInstruction]:
        words, failures = "", [each.failure for each in self._deaths if each.failure.exit_code != 0]
        if problem == "-" and failures:
            self.failure = msgspec.structs.replace(failures[0], num_stopped=len(self.running))
        elif problem == "-" and self._deaths and self._options.accepts_early_end:
            words = EARLY_SUCCESS_TEXT
        else:
            words = self.problem = problem if problem != "-" else EARLY_END_TEXT if self._deaths else STATE_LOST_TEXT
        return _say(words) + list(self._stop())

    def _call_hosts(self) -> list[JobInstruction | ElasticInstruction]:
        calls: list[JobInstruction | ElasticInstruction] = []
        for host in self.slots.hosts.values():
            if host.num_slots and host.phase is HostPhase.GONE and host.failures.rests_until <= self._now:
                host.phase = HostPhase.CALLED
                calls.append(CallHost(host.name))
        return calls

    def _is_calling(self) -> bool:
        """Return whether a host has still to answer, or to be called."""
        return any(
            host.num_slots
            and (host.phase is HostPhase.CALLED or (host.phase is HostPhase.GONE and not host.num_refusals))
            for host in self.slots.hosts.values()
        )

    def _can_begin(self) -> bool:
        if self._is_calling():
            return False
        return len(self.slots.usable(self._now)) >= self._options.min_ranks

    def _start(self) -> list[JobInstruction | ElasticInstruction]:
        """Start the first processes and spares, or candidates, in free places."""
        instructions: list[JobInstruction | ElasticInstruction] = []
        if not self.has_begun:
            first = self._occupy(self._options.max_ranks)
            self.members = tuple(slot.id for slot in first)
            self.has_begun, self._short_since, self._orphaned_since = True, None, None
            if self._servers:
                processes = None if self.placement is None else self.placement.processes
                self.running |= {
                    number
                    for number in self._servers
                    if processes is None or number == self._scheduler or number - self._num_ranks in processes
                }
                instructions.append(StartServers(len(first)))
            instructions.append(StartSlots(tuple(_start_of(slot, len(first)) for slot in first)))
        if candidates := self._occupy(self._options.max_processes):
            instructions.append(SayToUser("; ".join(map(_describe_start, candidates))))
            instructions.append(StartSlots(tuple(map(_start_of, candidates))))
        if len(self.slots.in_state(SlotState.RUNNING)) >= self._options.min_ranks:
            self._short_since = None
        return instructions

    def _occupy(self, most: int) -> list[JobSlot]:
        """Take free places until that many are used."""
        num = max(0, most - len(self.slots.in_state(SlotState.RUNNING)))
        chosen = [slot for slot in self.slots.usable(self._now) if slot.state is SlotState.FREE][:num]
        for slot in chosen:
            self.slots.occupy(slot)
            self.running.add(slot.number)
        return chosen

    # ---------------------------------------------------------------- the end

    def _stop(self) -> list[JobInstruction]:
        """Stop what runs; where nothing does, sweep. Servers run as long as ranks do."""
        if self._num_running:
            for slot in self.slots:
                slot.leaves_by = inf
            self.phase = JobPhase.STOPPING
            return [*_ask_to_end(self.running - self._servers), StartGraceTimer()]
        if self.running:
            return super()._stop()
        self.phase, self._killed = JobPhase.SWEEPING, False
        return [SweepProcesses(), StartGraceTimer()]

    def _exited(self, event: ProcessExited) -> list[JobInstruction]:
        # the last ones leave in good order by it, and servers end
        has_servers = self.phase is JobPhase.ENDING and bool(self.running - {self._scheduler})
        is_needed = has_servers or (self._num_running and not self._killed)
        is_scheduler = event.rank == self._scheduler and was_killed(event.exit_code)
        again = self._restart(event) if is_needed and is_scheduler else None
        if again is not None:
            return [again]
        instructions = super()._exited(event)
        if self.phase is JobPhase.ENDING and self.running == {self._scheduler} and self._restarted.get(self._scheduler):
            instructions += super()._stop()  # it may wait for servers that the one before it has told of the end
        return instructions

    def _ended(self, numbers: set[int], failure: JobFailure | None) -> list[JobInstruction]:
        for number in numbers - self._servers:
            self._vacate(self.slots[number])
        instructions = super()._ended(numbers, failure)
        if self.phase is JobPhase.STOPPING and not self._num_running and numbers - self._servers:
            instructions += super()._stop()  # what is left are servers
        return instructions

    def _finish(self) -> list[JobInstruction]:
        if self.problem and self.failure is None and self.signum is None:
            self.phase = JobPhase.DONE
            return [FinishJob(1, None, None)]
        return super()._finish()

    # ---------------------------------------------------------------- words

    def _name(self, slot: JobSlot) -> str:
        where = f" (host {slot.host})" if len(self.slots.hosts) > 1 else ""
        return f"slot {slot.number}{where}"

    def _describe_number(self, without: str = "") -> str:
        running = [slot for slot in self.slots.in_state(SlotState.RUNNING) if slot.host != without]
        num_members = sum(slot.id in self.members for slot in running)
        has_state = num_members > 0 or self.epoch is None  # others have come and know nothing yet
        num = num_members if self._options.spares or not has_state else len(running)
        return f"{num} process{'es go' if num != 1 else ' goes'} on"

    def _describe_rest(self, rest_seconds: float | None) -> str:
        what = "its place is not used any more" if rest_seconds is None else f"its place rests for {rest_seconds:.0f} s"
        return f"{self._describe_number()}, {what}"


def members_in_order(members: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """Return the members' slots, by rank."""
    return tuple(slot for slot, _ in members)


def _say(text: str) -> list[JobInstruction | ElasticInstruction]:
    """Tell the user, if there is something to tell."""
    return [SayToUser(text)] if text else []


def _note_started(
    running: set[int], first: int, instructions: Iterable[PlacementInstruction]
) -> list[JobInstruction | ElasticInstruction]:
    """Count server processes that are about to be started as running; ``first``: the number of the first one."""
    noted: list[JobInstruction | ElasticInstruction] = []
    for one in instructions:
        if isinstance(one, StartServerProcess):
            running.add(first + one.process)
        noted.append(one)
    return noted


def _answer_late(event: ElasticEvent) -> list[JobInstruction | ElasticInstruction]:
    """Answer a server process that begins, or is asked to leave, when the job ends."""
    if not isinstance(event, ServerProcessReport) or event.text not in {"ready", "leaving"}:
        return []
    return [TellServerProcess(event.process, "end")]


def _ask_to_end(numbers: Iterable[int]) -> list[JobInstruction]:
    """Ask processes to leave after their step. Not their children, without which they might not get there."""
    ordered = tuple(sorted(numbers))
    return [SignalProcesses(ordered, SIGTERM), SignalProcesses(ordered, SIGCONT)]  # the latter for one that is stopped


def _format_slots(slots: Iterable[JobSlot]) -> str:
    numbers = [slot.number for slot in slots]
    return f"slots {format_ranks(numbers)} are" if len(numbers) > 1 else f"slot {numbers[0]} is"


def _describe_end(exit_code: int, cause: str) -> str:
    if exit_code == FENCED_EXIT_CODE:
        return "its fellows have excluded it"
    if exit_code == 0:
        return "it has ended before the job (exit code 0)"
    return describe_exit(exit_code, cause)


def _start_of(slot: JobSlot, first_size: int = 0) -> SlotStart:
    return SlotStart(slot.number, slot.incarnation, slot.host, slot.local_rank, first_size)


def _describe_start(slot: JobSlot) -> str:
    return f"slot {slot.number} is started{' again' if slot.incarnation else ''} (host {slot.host})"
