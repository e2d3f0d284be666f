"""The loop that turns submissions into collectives.

Who does the work
-----------------
Exactly one thread *drives* at a time: it holds ``_driver``, feeds the state machines, executes batches and sleeps on
the doorbell. A thread that waits for its own operation while nobody drives does so itself, so a blocking collective
changes threads not once. Otherwise the engine's thread drives: it is woken by asynchronous submissions and by
messages, drives until nothing is outstanding, and parks.

Whom a ring of the doorbell wakes (`Sleeper`) is written only by the thread that holds ``_driver``. A caller that has
finished driving hands the doorbell back to the parked thread, which begins with what has come in between: at once, or
in a moment where nobody can want anything of rank 0 before its next submission (all process sets have it).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence

from reigen.engine.channel import BACKLOG_SECONDS, SLICE_SECONDS, Channel, Listener
from reigen.engine.execution import execute, stand_in
from reigen.engine.farewell import LastMoment, interrupted, wait_for_devices
from reigen.engine.handles import Handle, Outcome
from reigen.engine.messages import (
    MAX_NOTE_BYTES,
    Announcement,
    Kind,
    Leave,
    Note,
    Operation,
    Ready,
    Report,
    Response,
    Stop,
    Submit,
    Topic,
)
from reigen.engine.negotiation import Coordinator
from reigen.engine.observer import Observer
from reigen.engine.outstanding import SHUT_DOWN, Outstanding
from reigen.engine.participant import Execute, Instruction, Participant, stopped
from reigen.engine.stall_watch import Seat, StallWatch
from reigen.engine.team import Team
from reigen.engine.transport import Transport, Watch
from reigen.errors import CollectiveError, DeadlineError, DeviceError, PeerLostError, SharedMemoryError
from reigen.planes.base import DataPlane, Meanwhile
from reigen.planes.device import DevicePlane
from reigen.wire.mailbox import Sleeper

_log = logging.getLogger(__name__)

#: A sleep while nothing is.
IDLE_SECONDS = 5.0
#: How much longer than the coordinator a rank waits for an answer, before it says that the coordinator is stuck.
_GRACE_SECONDS = 2.0


class Engine:
    """One rank's engine.

    Args:
        plane: moves the data; the engine owns it.
        transport: carries control messages; used by the driving thread alone, except ``wake``.
        watch: tells of lost ranks.
        coordinator: on rank 0.
        deadline_seconds: for each operation.
        looks: how often a waiting caller looks for a message before it sleeps; 0 with more ranks than cores.
        device: moves what lies in the memory of devices, if anything may.
    """

    def __init__(
        self,
        plane: DataPlane,
        transport: Transport,
        watch: Watch,
        coordinator: Coordinator | None,
        deadline_seconds: float,
        looks: int,
        device: DevicePlane | None = None,
    ) -> None:
        self._plane = plane
        self.device = device
        #: process sets by number; what they are is the same on all ranks whenever the same operation is carried out
        self._teams = {0: Team(tuple(range(plane.size)), plane, device)}
        self._transport = transport
        self._channel = Channel(transport, hears_reports=coordinator is not None)
        self._watch = watch
        self._coordinator = coordinator
        self._participant = Participant(plane.rank)
        self._deadline_seconds = deadline_seconds
        self._looks = looks
        self._driver = threading.Lock()
        #: every operation of this rank that is not complete
        self._outstanding = Outstanding()
        self._last_moment = LastMoment(watch, self._outstanding)
        #: looks for stalls, if somebody should
        self._stalls: StallWatch | None = None
        #: on rank 0: announced while data was being moved, and to be carried out
        self._announced: list[Announcement] = []
        self._meanwhile = Meanwhile(transport.descriptor, self._negotiate) if transport.descriptor >= 0 else None
        #: the collective whose data is being moved, and its deadline
        self._running: tuple[Operation, float] | None = None
        #: told of everything, while there is one
        self._observer: Observer | None = None
        #: when to look for dead ranks next
        self._look_next = 0.0
        self._thread: threading.Thread | None = None
        if device is not None:
            device.failure = self._failure

    def start(self, cpu: int | None = None) -> None:
        """Start the engine's thread. A job of one rank does without: whoever submits completes.

        Args:
            cpu: number of the processor to bind it to, None to leave that to the kernel.
        """
        self._thread = threading.Thread(target=self._run, name=f"reigen-engine-{self._plane.rank}", daemon=True)
        self._thread.start()
        if cpu is not None and self._thread.native_id is not None:
            try:
                os.sched_setaffinity(self._thread.native_id, {cpu})
            except (OSError, OverflowError) as error:
                _log.warning("the engine's thread runs where it likes, processor %d cannot be used: %s", cpu, error)

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """The ranks of every process set, by number."""
        return {number: team.ranks for number, team in list(self._teams.items())}

    def ranks_of(self, process_set: int) -> tuple[int, ...] | None:
        """The ranks of a process set; None if there is none of that number."""
        team = self._teams.get(process_set)
        return None if team is None else team.ranks

    # -- callers ------------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation, handle: Handle, *, blocking: bool) -> None:
        """Hand in an operation. Any thread.

        Args:
            operation: what is wanted.
            handle: its memory; completed in time.
            blocking: the caller waits for the handle at once, so the engine's thread need not wake up for it.

        Raises:
            DuplicateNameError: an operation of this name is outstanding.
            ArgumentError: a join is outstanding.
            CollectiveError: a rank was lost, or the engine is shut down.
        """
        observer = self._observer
        try:
            self._outstanding.add(operation, handle, None if observer is None else observer.submitted)
        except PeerLostError as error:
            self._last_moment.give(error)
            raise
        if self._thread is None:
            self.wait_for(handle)
        elif not blocking:
            self._transport.wake(Sleeper.ENGINE | Sleeper.CALLER)

    def post(self, topic: Topic, data: bytes) -> None:
        """Send a note: rank 0's go to all others, theirs to rank 0. Any thread; never waits.

        Notes of one rank arrive in order. Those of a rank that is lost or leaves meanwhile may be lost.

        Args:
            topic: whose listener gets it there.
            data: at most `MAX_NOTE_BYTES`.
        """
        if len(data) > MAX_NOTE_BYTES:
            raise AssertionError(f"a note of {len(data)} bytes; the most is {MAX_NOTE_BYTES}")
        if self._thread is None or not self.works:
            return
        self._channel.post(Note(topic, data))
        self._transport.wake(Sleeper.ENGINE | Sleeper.CALLER)

    def listen(self, topic: Topic, listener: Listener) -> None:
        """From now on notes on ``topic`` go to ``listener``. Others are dropped."""
        self._channel.listen(topic, listener)

    @property
    def works(self) -> bool:
        """Whether collectives and notes still go anywhere: no rank was lost, none has left."""
        return self._outstanding.works

    @property
    def unsent(self) -> int:
        """Notes, and other control messages, that have not left yet."""
        return len(self._channel.notes) + self._transport.backlog

    def observe(self, observer: Observer | None) -> None:
        """From now on tell ``observer``, and nobody else; None ends it."""
        self._observer = observer

    def watch_stalls(self, check_seconds: float, shutdown_seconds: float, pids: Mapping[int, int]) -> None:
        """From now on collectives that wait too long are told of; before `start`.

        Args:
            check_seconds: how long a collective may wait before rank 0 warns of it.
            shutdown_seconds: how long before rank 0 ends the job; 0 for never.
            pids: process ids by rank, of the ranks of this host.
        """

        def outstanding() -> list[str]:
            submitted = [*(told.operation for told in self._participant.pending.values()), *self._outstanding.inbox]
            return [operation.name for operation in submitted if operation.kind is not Kind.FREE]

        code = Engine._wait_for.__code__
        seat = Seat(self._plane.rank, pids, self.post, outstanding, code, self._coordinator)
        self._stalls = StallWatch(seat, check_seconds, shutdown_seconds, self._deadline_seconds)
        self.listen(Topic.STACKS, self._stalls.heard)

    def wait_for(self, handle: Handle) -> None:
        """Return when the handle is done; drive if nobody does."""
        observer = self._observer
        if observer is None:
            self._wait_for(handle)
            return
        observer.waiting(handle.name)
        try:
            self._wait_for(handle)
        finally:
            observer.waited(handle.name)

    def _wait_for(self, handle: Handle) -> None:
        while not handle.done:
            if not self._outstanding.closed and self._driver.acquire(blocking=False):
                self._drive_for(handle)
                continue
            if self._outstanding.inbox and self._thread is not None:
                self._transport.wake(Sleeper.ENGINE | Sleeper.CALLER)  # whoever drives may sleep on something else
            self._outstanding.wait(handle, SLICE_SECONDS)

    def _drive_for(self, handle: Handle) -> None:
        """Drive as the caller who waits for ``handle``, then hand over to the engine's thread. Gives up ``_driver``."""
        coordinator, waits_for_others = self._coordinator, False
        try:
            self._transport.take_over(Sleeper.NOBODY)
            self._drive(Sleeper.CALLER, handle)
            # The engine's thread sleeps for as long as it chose before: new deadlines are for it to look after.
            waits_for_others = coordinator is not None and coordinator.next_expiry() is not None
            broken = self._outstanding.broken
            if broken is not None and not handle.done:  # an interrupt fell between its end and telling it
                handle.complete(broken.of(handle.name))
        finally:
            will_look = coordinator is not None and len(self._teams) == 1 and self._transport.hand_back()
            if not will_look:
                self._transport.take_over(Sleeper.ENGINE)
            self._driver.release()
            if self._has_work(reads=not will_look) or (waits_for_others and not will_look):
                self._transport.wake(Sleeper.ENGINE)

    def give_up(self, error: BaseException) -> None:
        """All ranks, this one too, get this error for what is outstanding and what comes: this one cannot go on."""
        known = interrupted(error, self._plane.rank)
        self._watch.abort(known)  # seen here, too, by whoever drives
        with self._driver:
            if self.works:
                self._give_up(known)

    def close(self) -> None:
        """Leave the job: fail what is outstanding, tell the others, end the thread. Idempotent.

        A thread that is in the middle of a collective gets a moment to finish; then it is told to give up.
        """
        if self._thread is not None:
            wait_for_devices(self, self._teams)
        if not self._outstanding.close():
            return
        self._transport.wake(Sleeper.ENGINE | Sleeper.CALLER)
        free = self._driver.acquire(timeout=_GRACE_SECONDS)
        if not free:
            rank = self._plane.rank
            reason = f"rank {rank} shut down in the middle of a collective"
            self._abort(CollectiveError(reason, ranks=(rank,)))
            free = self._driver.acquire(timeout=_GRACE_SECONDS)
        try:
            self._fail_all(None)
            if free and self._outstanding.broken is None:
                self._say_goodbye()
        finally:
            if free:
                self._driver.release()
        self._transport.wake(Sleeper.ENGINE)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_GRACE_SECONDS)
        for number, team in self._teams.items():
            if free:
                team.close(keep_plane=not number)

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._driver:
                if self._outstanding.closed:
                    return
                self._transport.take_over(Sleeper.NOBODY)
                self._drive(Sleeper.ENGINE, None)
                token = self._transport.token()
                self._transport.take_over(Sleeper.ENGINE)
                if self._has_work():
                    continue
                nap = self._nap(IDLE_SECONDS)
            if not self._outstanding.closed:
                self._transport.sleep(token, Sleeper.ENGINE, nap)

    def _has_work(self, *, reads: bool = True) -> bool:
        """Whether somebody waits for something or, if that ``reads``, has said something."""
        return self.works and (not self._idle() or (reads and self._channel.pending()))

    def _idle(self) -> bool:
        """Nobody waits, and no device is at work for anybody: no deaths and deadlines have to be looked at."""
        flying = self.device is not None and self.device.flying
        return not (self._outstanding.handles or self._channel.notes or flying)

    # -- driving ------------------------------------------------------------------------------------------------------

    def _drive(self, who: Sleeper, handle: Handle | None) -> None:
        """Work until ``handle`` is done or, without one, until nothing is outstanding. The caller holds ``_driver``."""
        try:
            while self.works:
                token = self._transport.token()
                worked = self._step()
                if handle.done if handle is not None else self._idle():
                    return
                if not worked:
                    self._rest(token, who)
        except BaseException as error:  # whoever waits for an operation is told by its handle
            self._give_up(error)
            if not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit end more than this operation
                raise

    def _step(self) -> bool:
        """Take in what has come and carry out what follows; False when nothing has come from anybody."""
        self._take_submissions()
        worked = False
        for rank, message in self._channel.receive():
            worked = True
            self._hear(rank, message)
        self._report()
        if self._channel.notes:
            worked = True
            self._channel.send_notes()
        if self._coordinator is not None:
            worked |= self._announce(self._coordinator)
        if self._transport.backlog:
            self._transport.flush()
        return worked

    def _hear(self, rank: int, message: Report | Announcement) -> None:
        """Take in a message of ``rank``."""
        if isinstance(message, Submit | Ready | Leave):
            if self._coordinator is not None:
                self._coordinator.hear(rank, message, time.monotonic())
        else:
            self._carry_out(self._participant.hear(message))

    def _take_submissions(self) -> None:
        for operation in self._outstanding.take(self._deadline_seconds + _GRACE_SECONDS):
            self._participant.submit(operation)

    def _report(self) -> None:
        """Tell the coordinator what the participant has to say."""
        reports = self._participant.outgoing
        if not reports:
            return
        self._participant.outgoing = []
        if self._coordinator is None:
            self._channel.send(reports)
            return
        now = time.monotonic()
        for report in reports:
            self._coordinator.hear(self._plane.rank, report, now)

    def _announce(self, coordinator: Coordinator) -> bool:
        now = time.monotonic()
        if self._stalls is not None and now >= self._stalls.next_look:
            error = self._look_for_stalls(self._stalls, coordinator, now)
            if error is not None:
                self._give_up(error)
                return True
        ahead, self._announced = self._announced, []
        said = coordinator.announce(now)
        if said:
            self._channel.send(said)
        if not (ahead or said):
            return False
        self._channel.empty(self._failure, time.monotonic() + self._deadline_seconds)
        for announcement in (*ahead, *said):
            self._carry_out(self._participant.hear(announcement))
        self._report()
        return True

    def _negotiate(self) -> None:
        """In the middle of a collective that waits for the network: prepare the next, so that it need not wait again.

        Rank 0 announces one batch ahead and no more, or small tensors would no longer travel together.
        """
        self._transport.calm()
        self._take_submissions()
        if self._coordinator is None:
            self._look_for_stop()
            self._report()
        else:
            for rank, report in self._channel.receive():
                self._hear(rank, report)
            self._report()
            if not self._announced:
                self._announced = self._coordinator.announce(time.monotonic())
                if self._announced:
                    self._channel.send(self._announced)
        self._channel.send_notes()
        self._transport.flush()

    def _look_for_stop(self) -> None:
        """Read announcements that cannot be carried out yet, but for one that ends everything."""
        for announcement in self._channel.read_ahead(Topic.STACKS):
            if isinstance(announcement, Stop):
                raise stopped(announcement)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        if self._participant.broken is not None and self._outstanding.broken is None:
            self._break(self._participant.broken)  # fails all, these too, but not before it is time to
        observer = self._observer
        if instructions and observer is not None:
            observer.announced()
        for instruction in instructions:
            if isinstance(instruction, Execute):
                self._execute(instruction.batch)
            else:
                if observer is not None:
                    observer.failed(instruction.name)
                self._outstanding.finish([(instruction.name, instruction.error)])

    def _break(self, error: CollectiveError) -> None:
        """From now on nothing works; fail all that is outstanding, taken in or not."""
        self._last_moment.give_to_outstanding(error)
        self._outstanding.set_broken(error)
        self._last_moment.give_to_outstanding(error)  # what was handed in just before that
        for team in self._teams.values():
            team.abort_on_device(error)
        self._participant.lose(error)
        self._fail_all(error)

    def _execute(self, batch: Sequence[tuple[Operation, Response]]) -> None:
        deadline = time.monotonic() + self._deadline_seconds
        handles = [self._outstanding.handles.get(operation.name) for operation, _ in batch]
        team = self._teams[batch[0][0].process_set]
        members = [
            (operation, response, stand_in(team, operation) if handle is None else handle.task)
            for (operation, response), handle in zip(batch, handles, strict=True)
        ]
        observer, plane = self._observer, team.plane
        self._running = (batch[0][0], deadline)
        results: Sequence[Outcome | CollectiveError]
        try:
            if plane is not None:
                plane.lacking, plane.meanwhile = self._lacking, self._meanwhile
            if observer is not None:
                observer.began(batch)
                if plane is not None:
                    plane.phase_ended = observer.phase_ended
            results = execute(self._teams, members, deadline)
        except (SharedMemoryError, DeviceError) as error:
            results = [error.of(operation.name) for operation, _ in batch]
            first, response = batch[0]
            if first.kind is Kind.ADD_SET:
                self._participant.abandon_set(response.value)
                if self._coordinator is not None:
                    self._coordinator.abandon_set(response.value)
        finally:
            self._running = None
            if self._stalls is not None:
                self._stalls.went_on()
            if observer is not None:
                if plane is not None:
                    plane.phase_ended = None
                observer.ended(batch)
        self._outstanding.finish(
            [(operation.name, result) for (operation, _), result in zip(batch, results, strict=True)]
        )

    def _lacking(self, members: Sequence[int]) -> None:
        """In the middle of a collective, on the thread that drives: some of its ranks do not come.

        Reports are taken in, announcements are kept for later, notes about stalls are answered.
        """
        assert self._running is not None
        operation, deadline = self._running
        if self._coordinator is None:
            self._look_for_stop()
        else:
            for rank, report in self._channel.receive():
                self._hear(rank, report)
        if self._stalls is None:
            return
        ranks = self._teams[operation.process_set].ranks
        missing = tuple(ranks[member] for member in members)
        ready = tuple(rank for rank in ranks if rank not in missing)
        now, since = time.monotonic(), deadline - self._deadline_seconds
        self._stalls.lacking(operation, since, ready, missing)
        error = None
        if self._coordinator is None:
            error = self._stalls.look_at_rank_0(operation.name, since, now)
        elif now >= self._stalls.next_look:
            error = self._look_for_stalls(self._stalls, self._coordinator, now)
        if error is not None:
            raise error
        self._channel.send_notes()
        self._transport.flush()

    def _look_for_stalls(self, stalls: StallWatch, coordinator: Coordinator, now: float) -> DeadlineError | None:
        """The error with which the job is to end, if it is; all have been told then."""
        error = stalls.look(now)
        if error is not None:
            coordinator.stop(error)
            self._channel.send(coordinator.announce(now))
            with contextlib.suppress(CollectiveError):  # they learn it from abort(), in fewer words
                self._channel.empty(self._failure, now + _GRACE_SECONDS)
        return error

    # -- waiting and ending -------------------------------------------------------------------------------------------

    def _rest(self, token: int, who: Sleeper) -> None:
        """Nothing to do: look for a message a few times, then sleep."""
        if who is Sleeper.CALLER:
            for _ in range(self._looks):
                if self._transport.pending():
                    return
        self._transport.take_over(who)
        self._transport.sleep(token, who, self._nap(SLICE_SECONDS))
        self._transport.take_over(Sleeper.NOBODY)
        if time.monotonic() >= self._look_next and not self._transport.pending():
            self._look_next = time.monotonic() + SLICE_SECONDS
            self._look_around()

    def _nap(self, longest: float) -> float:
        if self._outstanding.broken is not None:
            return longest
        if self._transport.backlog:
            return BACKLOG_SECONDS
        expiry = self._coordinator.next_expiry() if self._coordinator is not None else None
        until = math.inf if expiry is None else expiry
        if self._stalls is not None:
            until = min(until, self._stalls.due())
        return max(0.0, min(longest, until - time.monotonic()))

    def _failure(self) -> CollectiveError | None:
        return self._watch.failure(range(self._plane.size))

    def _look_around(self) -> None:
        """Nobody said anything: is somebody gone, or the coordinator stuck?"""
        error = self._failure()
        if self._transport.pending():
            return  # who is gone may have answered just before
        if error is not None:
            self._break(error)
        elif self.device is not None and (crashed := self.device.look()) is not None:
            self._give_up(crashed)
        elif self._outstanding.overdue and time.monotonic() >= next(iter(self._outstanding.overdue.values())):
            self._give_up(DeadlineError("rank 0, which coordinates, does not answer", ranks=(0,)))
        elif self._outstanding.overdue and self._stalls is not None:
            name, overdue = next(iter(self._outstanding.overdue.items()))
            since = overdue - self._deadline_seconds - _GRACE_SECONDS
            late = self._stalls.look_at_rank_0(name, since, time.monotonic())
            if late is not None:
                self._give_up(late)

    def _give_up(self, error: BaseException) -> None:
        """Something went wrong in the middle: the ranks may have lost step, so nothing can go on."""
        known = interrupted(error, self._plane.rank)
        self._abort(known)
        self._break(known)

    def _abort(self, error: CollectiveError) -> None:
        """Tell the others: those that wait for this rank's data, and those that wait for anything else."""
        self._plane.abort(error)
        self._watch.abort(error)

    def _fail_all(self, error: CollectiveError | None) -> None:
        """Nothing that is outstanding will be done, for this reason or because this rank has left."""
        self._channel.notes.clear()
        if (observer := self._observer) is not None:
            for name in list(self._outstanding.handles):
                observer.failed(name)
        self._outstanding.fail_all(error or CollectiveError(SHUT_DOWN))

    def _say_goodbye(self) -> None:
        self._participant.leave()
        self._report()
        if self._coordinator is not None:
            self._channel.send(self._coordinator.announce(time.monotonic()))
        with contextlib.suppress(CollectiveError):  # they are gone, or learn it from this rank's end
            self._channel.empty(self._failure, time.monotonic() + _GRACE_SECONDS)
