"""The loop that turns submissions into collectives.

Who does the work
-----------------
Exactly one thread *drives* at a time: it holds ``_driver``, feeds the state machines, executes batches and sleeps on
the doorbell. A thread that waits for its own operation while no other drives does so itself, so a blocking collective
changes threads not once. Otherwise the engine's thread drives: it is woken by asynchronous submissions and by
messages, drives until nothing is outstanding, and parks.

Whom a ring of the doorbell wakes (`WaitingThread`) is written only by the thread that holds ``_driver``. A caller that
has finished driving hands the doorbell back to the parked thread, which begins with what has come in between: at once,
or, where no rank can want anything of rank 0 before its next submission (all process sets have it), in a moment, or
when those that have written it sleep themselves (`ControlTransport.release_to_engine`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reigen.backends.base import Backend, ProgressHook, TunableNetwork
from reigen.backends.device import DeviceBackend
from reigen.cluster.metrics import MetricSample
from reigen.engine.control_channel import BACKLOG_RETRY_SECONDS, CHECK_SECONDS, ControlChannel, NoteListener
from reigen.engine.coordinator import Coordinator
from reigen.engine.counters import DEVICE_WAY, NETWORK_WAY, EngineCounters, NetworkTraffic, SharedSegment
from reigen.engine.eager import EagerAllreduce
from reigen.engine.execution import execute, execute_allreduce, make_neutral_buffers
from reigen.engine.handle import CollectiveResult, Handle
from reigen.engine.messages import (
    MAX_NOTE_BYTES,
    Announcement,
    JobAbort,
    Note,
    Operation,
    OperationKind,
    RankShutdown,
    Response,
    Topic,
    TunedParameters,
)
from reigen.engine.observer import EngineObserver
from reigen.engine.process_set import BatchItem, ProcessSetGroup
from reigen.engine.rank_controller import ExecuteBatch, RankController, abort_error
from reigen.engine.relay_transport import RelayTransport
from reigen.engine.shutdown import PeerExitGrace, clear_frames, interruption_error, wait_for_devices
from reigen.engine.stall.monitor import MonitoredRank, StallMonitor
from reigen.engine.tensor_queue import SHUTDOWN_MESSAGE, TensorQueue
from reigen.engine.transport import ControlTransport, PeerMonitor
from reigen.errors import CollectiveError, DeadlineError, DeviceError, PeerLostError, SharedMemoryError
from reigen.net.doorbells import WaitingThread
from reigen.net.futex import SpinLimit
from reigen.net.shm_ring import ShmTransport

_log = logging.getLogger(__name__)

#: A sleep while nothing is.
IDLE_SECONDS = 5.0
#: How much longer than the coordinator a rank waits for an answer, before it says that the coordinator is stuck.
_GRACE_SECONDS = 2.0


class Engine:
    """One rank's engine.

    Args:
        backend: moves the data; the engine owns it.
        transport: carries control messages; used by the driving thread alone, except ``wake``.
        watch: tells of lost ranks.
        coordinator: on rank 0.
        deadline_seconds: for each operation.
        looks: how often a waiting caller looks for a message before it sleeps; 0 with more ranks than cores.
        device: moves what lies in the memory of devices, if anything may.
    """

    def __init__(
        self,
        backend: Backend,
        transport: ControlTransport,
        watch: PeerMonitor,
        coordinator: Coordinator | None,
        deadline_seconds: float,
        looks: int,
        device: DeviceBackend | None = None,
    ) -> None:
        self._backend = backend
        self.device = device
        #: process sets by number; what they are is the same on all ranks whenever the same operation is carried out
        self._process_set_groups = {0: ProcessSetGroup(tuple(range(backend.size)), backend, device)}
        self._transport = transport
        #: the same, where this rank is a relay: it passes on announcements, and merges reports
        self._relay = transport if isinstance(transport, RelayTransport) else None
        self._channel = ControlChannel(transport, receives_reports=coordinator is not None)
        self._watch = watch
        self._coordinator = coordinator
        #: when this rank has to do something for others: rank 0, which coordinates, or a relay
        deadlines = self._relay.next_release if self._relay else None
        self._next_deadline = deadlines if coordinator is None else coordinator.next_expiry
        self._controller = RankController(backend.rank)
        self._deadline_seconds = deadline_seconds
        self._spin = SpinLimit(looks)
        self._driver = threading.Lock()
        #: every operation of this rank that is not complete
        self._outstanding = TensorQueue()
        self._eager = (
            EagerAllreduce(
                backend.rank,
                transport.eager,
                self._controller,
                coordinator,
                self._outstanding,
                self._spin,
                deadline_seconds + _GRACE_SECONDS,
            )
            if isinstance(transport, ShmTransport)
            else None
        )
        self._exit_grace = PeerExitGrace(watch, self._outstanding)
        #: looks for stalls, if that is enabled
        self._stalls: StallMonitor | None = None
        #: on rank 0: announced while data was being moved, and to be carried out
        self._announced: list[Announcement] = []
        self._progress_hook = ProgressHook(transport.descriptor, self._negotiate) if transport.descriptor >= 0 else None
        #: the collective whose data is being moved, and its deadline
        self._running: tuple[Operation, float] | None = None
        #: gets every event, while there is one
        self._observer: EngineObserver | None = None
        #: of what this rank does; see `count_in`
        self.counters = self._controller.counters
        #: of this rank with other hosts, where there are some
        self.traffic: NetworkTraffic | None = None
        #: the same network, if its parameters can be tuned
        self.tunable: TunableNetwork | None = None
        #: shared memory of this rank, where there is some
        self.segment: SharedSegment | None = None
        #: called with each operation that is refused because nothing works any more, if anybody wants to know
        self.refused: Callable[[], None] | None = None
        #: called with the ranks that a collective has waited for until its deadline; then nothing works any more, for
        #: there is another view to go on in
        self.late: Callable[[Sequence[int]], None] | None = None
        self._read_token = -1  # of the transport, before everything was read that had come
        self._next_check = 0.0  # when to look for dead ranks
        self._thread: threading.Thread | None = None
        if device is not None:
            device.failure = self._failure

    def start(self, cpu: int | None = None) -> None:
        """Start the engine's thread. A job of one rank does without: the submitting thread completes.

        Args:
            cpu: number of the processor to bind it to, None to leave that to the kernel.
        """
        self._thread = threading.Thread(target=self._run, name=f"reigen-engine-{self._backend.rank}", daemon=True)
        self._thread.start()
        if cpu is not None and self._thread.native_id is not None:
            try:
                os.sched_setaffinity(self._thread.native_id, {cpu})
            except (OSError, OverflowError) as error:
                _log.warning("the engine's thread runs where it likes, processor %d cannot be used: %s", cpu, error)

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """The ranks of every process set, by number."""
        return {number: process_set_group.ranks for number, process_set_group in list(self._process_set_groups.items())}

    def ranks_of(self, process_set: int) -> tuple[int, ...] | None:
        """The ranks of a process set; None if there is none of that number."""
        process_set_group = self._process_set_groups.get(process_set)
        return None if process_set_group is None else process_set_group.ranks

    # -- callers ------------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation, handle: Handle, blocking: bool) -> None:
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
        if blocking and self._eager is not None and self._observer is None and self._submit_eagerly(operation, handle):
            return
        try:
            self._outstanding.add(operation, handle, self._observer)
        except CollectiveError as error:
            if isinstance(error, PeerLostError):
                self._exit_grace.give(error)
            if self.refused is not None and operation.kind is not OperationKind.FREE:  # which the program does not see
                self.refused()
            raise
        if self._thread is None:
            self.wait_for(handle)
        elif not blocking and not self._outstanding.is_wakeup_pending:  # a driver that is about to look takes this, too
            self._outstanding.is_wakeup_pending = True
            self._transport.wake(WaitingThread.ANY)

    def _submit_eagerly(self, operation: Operation, handle: Handle) -> bool:
        """Submit a blocking call's operation eagerly, if possible; the handle may be done then."""
        if not self._driver.acquire(blocking=False):
            return False
        try:
            self.counters.begin_wait(operation.name)
            try:
                return self._eager.submit(operation, handle)  # type: ignore[union-attr]  # asked by the caller
            except BaseException as error:  # an interrupt: the others may have this rank's part, or not
                self._give_up(error)
                raise
            finally:
                self.counters.end_wait()
        finally:
            self._driver.release()

    def post(self, topic: Topic, data: bytes) -> None:
        """Send a note: rank 0's go to all others, theirs to rank 0. Any thread; never waits.

        Notes of one rank arrive in order. Those of a rank that is lost or leaves meanwhile may be lost.

        Args:
            topic: whose listener gets it there.
            data: at most `MAX_NOTE_BYTES`.
        """
        if len(data) > MAX_NOTE_BYTES:
            raise AssertionError(f"a note of {len(data)} bytes; the most is {MAX_NOTE_BYTES}")
        if self._thread is None or not self.is_operational:
            return
        self._channel.post(Note(topic, data))
        self._transport.wake(WaitingThread.ANY)

    def listen(self, topic: Topic, listener: NoteListener) -> None:
        """From now on notes on ``topic`` go to ``listener``. Others are dropped."""
        self._channel.listen(topic, listener)

    @property
    def is_operational(self) -> bool:
        """Return whether collectives and notes are still possible: no rank was lost or has left."""
        return self._outstanding.is_operational

    def samples(self) -> Iterator[MetricSample]:
        """Yield the metrics of this rank; any thread."""
        yield from self.counters.samples_now()
        yield "reigen_queue_length", ("submitted",), len(self._outstanding.inbox)
        yield "reigen_queue_length", ("outstanding",), len(self._outstanding.handles)
        yield "reigen_queue_length", ("control",), self.unsent
        if self.segment is not None:
            yield "reigen_memory_bytes", ("segment",), self.segment.reserved_bytes
        yield "reigen_ranks", (), self._backend.size

    @property
    def unsent(self) -> int:
        """Notes, and other control messages, that have not left yet."""
        return len(self._channel.notes) + self._transport.backlog

    def count_in(self, counters: EngineCounters) -> None:
        """Count in these, which other engines have counted in; before the first submission."""
        self.counters = self._controller.counters = counters
        if self._eager is not None:
            self._eager.counters = counters

    def tune(self, parameters: TunedParameters) -> None:
        """On rank 0: change parameters of all ranks with the next batch that is negotiated. Any thread; never waits."""
        assert self._coordinator is not None, "parameters are chosen on rank 0"
        self._coordinator.tune(parameters)

    def observe(self, observer: EngineObserver | None) -> None:
        """Report to ``observer`` alone from now on; None ends it."""
        self._observer = observer

    def enable_stall_check(self, check_seconds: float, shutdown_seconds: float, pids: Mapping[int, int]) -> None:
        """Report collectives that wait too long from now on; before `start`.

        Args:
            check_seconds: how long a collective may wait before rank 0 warns of it.
            shutdown_seconds: how long before rank 0 ends the job; 0 for never.
            pids: process ids by rank, of the ranks of this host.
        """

        def outstanding() -> list[str]:
            submitted = [*(entry.operation for entry in self._controller.pending.values()), *self._outstanding.inbox]
            return [operation.name for operation in submitted if operation.kind is not OperationKind.FREE]

        code = Engine.wait_for.__code__
        monitored_rank = MonitoredRank(self._backend.rank, pids, self.post, outstanding, code, self._coordinator)
        self._stalls = StallMonitor(monitored_rank, check_seconds, shutdown_seconds, self._deadline_seconds)
        self.listen(Topic.STACKS, self._stalls.receive)

    def wait_for(self, handle: Handle) -> None:
        """Return when the handle is done; drive the engine if no other thread does."""
        observer, counters = self._observer, self.counters
        if observer is not None:
            observer.waiting(handle.name)
        counters.begin_wait(handle.name)
        try:
            while not handle.done:
                if not self._outstanding.closed and self._driver.acquire(blocking=False):
                    try:
                        self._drive(WaitingThread.CALLER, handle)
                    finally:
                        self._hand_over(handle)
                    continue
                if self._outstanding.inbox and self._thread is not None:
                    self._transport.wake(WaitingThread.ANY)  # the thread that drives may sleep on something else
                self._outstanding.wait(handle, CHECK_SECONDS)
        finally:
            counters.end_wait()
            if observer is not None:
                observer.waited(handle.name)

    def wait_briefly(self, handle: Handle, seconds: float) -> None:
        """Drive the engine for a handle, so long at most; then the engine's thread looks after it."""
        if not handle.done and not self._outstanding.closed and self._driver.acquire(blocking=False):
            try:
                self._drive(WaitingThread.CALLER, handle, time.monotonic() + seconds)
            finally:
                self._hand_over(handle)
        if self._outstanding.inbox and self._thread is not None:
            self._transport.wake(WaitingThread.ANY)

    def _hand_over(self, handle: Handle) -> None:
        """Give up ``_driver`` after having driven for ``handle``; the engine's thread looks after the rest."""
        waits_for_others = will_look = False
        try:
            broken = self._outstanding.broken
            if broken is not None and not handle.done:  # an interrupt fell between its end and telling it
                handle.complete(broken.of(handle.name))
            if self._next_deadline is not None:
                # The engine's thread sleeps for as long as it chose before: new deadlines are for it to look after.
                waits_for_others = self._next_deadline() is not None
                will_look = len(self._process_set_groups) == 1 and self._transport.release_to_engine(waits_for_others)
        finally:
            if not will_look:
                self._transport.set_wake_target(WaitingThread.PARKED)
            self._driver.release()
            reads = not will_look and (waits_for_others or bool(self._channel.unread) or self._transport.pending())
            if self._outstanding.is_operational and (reads or not self._idle()):
                self._transport.wake(WaitingThread.ENGINE)

    def give_up(self, error: BaseException) -> None:
        """Fail outstanding and later operations of all ranks, this one too, with this error: this rank cannot go on."""
        known = interruption_error(error, self._backend.rank)
        self._exit_grace.end()
        self._watch.abort(known)  # seen here, too, by the thread that drives
        with self._driver:
            if self.is_operational:
                self._give_up(known)

    def close(self) -> None:
        """Leave the job: fail outstanding operations, inform the others, end the thread. Idempotent.

        A thread that is in the middle of a collective gets a moment to finish; then it has to give up.
        """
        if self._thread is not None:
            wait_for_devices(self, self._process_set_groups)
        if not self._outstanding.close():
            return
        self._transport.wake(WaitingThread.ANY)
        free = self._driver.acquire(timeout=_GRACE_SECONDS)
        if not free:
            rank = self._backend.rank
            self._abort(CollectiveError(f"rank {rank} shut down in the middle of a collective", ranks=(rank,)))
            free = self._driver.acquire(timeout=_GRACE_SECONDS)
        try:
            self._fail_all(None)
            if free and self._outstanding.broken is None:
                self._announce_shutdown()
        finally:
            if free:
                self._driver.release()
        self._transport.wake(WaitingThread.ENGINE)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_GRACE_SECONDS)
        if free:
            for number, process_set_group in self._process_set_groups.items():
                process_set_group.close(keep_backend=not number)
            self._channel.close()  # without cycles, memory is freed with its last user, and not at a collection
            self._stalls = self._progress_hook = None

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._driver:
                if self._outstanding.closed:
                    return
                self._drive(WaitingThread.ENGINE, None)
                token = self._transport.token()
                self._transport.set_wake_target(WaitingThread.PARKED)
                if self._outstanding.is_operational and (not self._idle() or self._channel.pending()):
                    continue
                sleep_seconds = self._sleep_until_event(IDLE_SECONDS)
            if not self._outstanding.closed:
                self._transport.sleep(token, WaitingThread.ENGINE, sleep_seconds)

    def _idle(self) -> bool:
        """Return whether no thread waits and no device is at work: deaths and deadlines need no look then."""
        device = self.device
        return not (self._outstanding.handles or self._channel.notes or (device is not None and device.has_pending))

    # -- driving ------------------------------------------------------------------------------------------------------

    def _drive(self, thread: WaitingThread, handle: Handle | None, latest: float = math.inf) -> None:
        """Work until ``handle`` is done or, without one, until nothing is outstanding. The caller holds ``_driver``.

        With ``latest``, a time of `time.monotonic`, not much longer than until then.
        """
        self._transport.set_wake_target(WaitingThread.NONE)
        self._read_token = -1  # parked threads do not see what is submitted eagerly
        try:
            while self._outstanding.is_operational:
                token = self._transport.token()
                announced = self._step(token)
                if announced:
                    for announcement in announced:
                        self._follow(announcement)
                    if self._controller.outgoing:
                        self._report()
                if handle.done if handle is not None else self._idle():
                    return
                looks = self._spin.looks if thread is WaitingThread.CALLER else 0
                if announced is None and not (looks and self._transport.look(token, looks)):
                    longest = CHECK_SECONDS if latest == math.inf else min(CHECK_SECONDS, latest - time.monotonic())
                    if longest <= 0:
                        return
                    self._rest(token, thread, longest)
        except BaseException as error:  # a caller that waits for an operation gets it from its handle
            self._give_up(error)
            if not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit end more than this operation
                raise

    def _step(self, token: int) -> Sequence[Announcement] | None:
        """Take in messages, send those that are due; return the batches to execute, None without any message."""
        received: Sequence[tuple[int, Sequence[Any]]] = ()
        if token != self._read_token or self._channel.unread:  # else the doorbell was not rung since it was read last
            self._read_token = token
            received = self._channel.receive()
            if self._eager is not None:
                self._eager.finish()
        self._outstanding.is_wakeup_pending = False  # before the look: submissions behind it wake anew
        if self._outstanding.inbox:
            self._take_submissions()
        coordinator = self._coordinator
        if coordinator is not None:
            for rank, reports in received:
                coordinator.receive(rank, reports, time.monotonic())
        if self._controller.outgoing:
            self._report()
        sends_notes = bool(self._channel.notes)
        if sends_notes:
            self._channel.send_notes()
        announced: list[Announcement] = []
        if coordinator is not None:
            announced = self._announce(coordinator)
        else:
            for _, messages in received:
                announced += messages
        if self._transport.backlog:
            self._transport.flush()
            if announced and (relay := self._relay) is not None:
                # not for reports: who is to read those may wait for this rank in the same way
                until = time.monotonic() + self._deadline_seconds
                self._channel.empty(self._failure, until, lambda: relay.announcement_backlog)
        return announced if received or announced or sends_notes else None

    def _take_submissions(self) -> None:
        inbox = self._outstanding.inbox
        overdue = time.monotonic() + self._deadline_seconds + _GRACE_SECONDS
        while inbox:
            operation = inbox.popleft()
            if operation.kind is not OperationKind.JOIN:  # which takes as long as the others have data
                self._outstanding.overdue[operation.name] = overdue
            self._controller.submit(operation)

    def _report(self) -> None:
        """Send the coordinator this rank's reports."""
        reports, self._controller.outgoing = self._controller.outgoing, []
        if self._coordinator is not None:
            self._coordinator.receive(self._backend.rank, reports, time.monotonic())
        elif reports:
            self._channel.send(reports)

    def _announce(self, coordinator: Coordinator) -> list[Announcement]:
        """On rank 0: announce to all others what follows from the reports; returns it, to be carried out here."""
        now = time.monotonic()
        if self._stalls is not None and now >= self._stalls.inspector.next_look:
            error = self._look_for_stalls(self._stalls, coordinator, now)
            if error is not None:
                self._give_up(error)
                return []
        ahead, self._announced = self._announced, []
        if announcements := coordinator.announce(now):
            self._channel.send(announcements)
        if self._transport.backlog and (ahead or announcements):
            self._channel.empty(self._failure, time.monotonic() + self._deadline_seconds)
        return ahead + announcements

    def _negotiate(self) -> None:
        """In the middle of a collective that waits for the network: prepare the next, so that it need not wait again.

        Rank 0 announces one batch ahead and no more, or small tensors would no longer travel together.
        """
        self._transport.clear_wakeup()
        self._take_submissions()
        self._receive_while_running()
        self._report()
        if self._coordinator is not None and not self._announced:
            self._announced = self._coordinator.announce(time.monotonic())
            if self._announced:
                self._channel.send(self._announced)
        self._channel.send_notes()
        self._transport.flush()

    def _receive_while_running(self) -> None:
        """Hear reports; read announcements, which cannot be carried out yet, but for one that ends everything."""
        if self._coordinator is not None:
            for rank, reports in self._channel.receive():
                self._coordinator.receive(rank, reports, time.monotonic())
            return
        for announcement in self._channel.peek(Topic.STACKS):
            if isinstance(announcement, JobAbort):
                raise abort_error(announcement)

    def _follow(self, announcement: Announcement) -> None:
        """Carry out what follows from an announcement."""
        instructions = self._controller.receive(announcement)
        if self._controller.broken is not None and self._outstanding.broken is None:
            self._break(self._controller.broken)  # fails all, these too, but not before it is time to
        observer = self._observer
        if instructions and observer is not None:
            observer.announced()
        for instruction in instructions:
            if isinstance(instruction, ExecuteBatch):
                self._execute(instruction.batch)
            elif isinstance(instruction, TunedParameters):
                self.counters.tuned = instruction
                if self.tunable is not None and instruction.tcp_algorithm:
                    self.tunable.tune(instruction.tcp_algorithm, instruction.tcp_sockets)
            else:
                if observer is not None:
                    observer.failed(instruction.name)
                handle = self._outstanding.handles.get(instruction.name)
                ends = self.late is not None or (handle is not None and handle.is_in_program)
                if ends and not instruction.is_release and isinstance(instruction.error, DeadlineError):
                    self._give_up(instruction.error)
                else:
                    self._outstanding.finish([(instruction.name, instruction.error)])

    def _break(self, error: CollectiveError) -> None:
        """From now on nothing works; fail all that is outstanding, taken in or not."""
        self._exit_grace.give_if_outstanding(error)
        self._outstanding.set_broken(error)
        self._exit_grace.give_if_outstanding(error)  # what was handed in just before that
        if self.late is not None and isinstance(error, DeadlineError):
            self.late(error.ranks)
        for process_set_group in self._process_set_groups.values():
            process_set_group.abort_on_device(error)
        self._controller.lose(error)
        self._fail_all(error)

    def _execute(self, batch: Sequence[tuple[Operation, Response]]) -> None:
        counters, first = self.counters, batch[0][0]
        counters.executing_since = began = time.monotonic()
        deadline, kind = began + self._deadline_seconds, first.kind
        process_set_group = self._process_set_groups[first.process_set]
        names, members, num_bytes = self._find_memory(batch, process_set_group)
        observer, backend, traffic = self._observer, process_set_group.backend, self.traffic
        sent_before = 0 if traffic is None else traffic.num_sent_bytes
        self._running = (first, deadline)
        results: Sequence[CollectiveResult | CollectiveError]
        try:
            if backend is not None:
                backend.ranks_missing, backend.progress_hook = self._ranks_missing, self._progress_hook
            if observer is not None:
                observer.began(batch)
                if backend is not None:
                    backend.phase_ended = observer.phase_ended
            on_host = first.kind is OperationKind.ALLREDUCE and not first.device
            results = (
                execute_allreduce(process_set_group, members, deadline)
                if on_host
                else execute(self._process_set_groups, members, deadline)
            )
        except (SharedMemoryError, DeviceError) as error:
            results = [error.of(name) for name in names]
            clear_frames(error)
            if first.kind is OperationKind.ADD_SET:
                self._controller.abandon_set(batch[0][1].value)
                if self._coordinator is not None:
                    self._coordinator.abandon_set(batch[0][1].value)
        finally:
            self._running = None
            counters.execution_seconds += time.monotonic() - began
            counters.executing_since = 0.0
            counters.batches += 1
            counters.operations[kind] += len(members)
            if len(members) > 1:
                counters.fused += len(members)
            counters.bytes[DEVICE_WAY if first.device else process_set_group.way][kind] += num_bytes
            if traffic is not None:
                counters.bytes[NETWORK_WAY][kind] += traffic.num_sent_bytes - sent_before
            if self._stalls is not None and self._stalls.is_stalled:
                self._stalls.resumed()
            if backend is not None:
                backend.ranks_missing = backend.progress_hook = backend.phase_ended = None
            if observer is not None:
                observer.ended(batch)
        self._outstanding.finish(zip(names, results, strict=True))

    def _find_memory(
        self, batch: Sequence[tuple[Operation, Response]], process_set_group: ProcessSetGroup
    ) -> tuple[list[str], list[BatchItem], int]:
        """Return the names of a batch, the batch with this rank's memory, and how many bytes of tensors that is."""
        handles, names, members, num_bytes = self._outstanding.handles, [], [], 0
        for operation, response in batch:
            names.append(operation.name)
            handle = handles.get(operation.name)
            task = make_neutral_buffers(process_set_group, operation) if handle is None else handle.task
            members.append((operation, response, task))
            if task.source is not None:
                num_bytes += task.source.nbytes
            elif task.members:
                num_bytes += task.nbytes
        return names, members, num_bytes

    def _ranks_missing(self, members: Sequence[int]) -> None:
        """In the middle of a collective, on the thread that drives: some of its ranks do not come.

        Reports are taken in, announcements are kept for later, notes about stalls are answered.
        """
        assert self._running is not None
        operation, deadline = self._running
        self._receive_while_running()
        if self._stalls is None:
            return
        ranks = self._process_set_groups[operation.process_set].ranks
        missing = tuple(ranks[member] for member in members)
        ready = tuple(rank for rank in ranks if rank not in missing)
        now, since = time.monotonic(), deadline - self._deadline_seconds
        self._stalls.ranks_missing(operation, since, ready, missing)
        error = None
        if self._coordinator is None:
            error = self._stalls.check_coordinator(operation.name, since, now)
        elif now >= self._stalls.inspector.next_look:
            error = self._look_for_stalls(self._stalls, self._coordinator, now)
        if error is not None:
            raise error
        self._channel.send_notes()
        self._transport.flush()
        self._transport.wake_readers()

    def _look_for_stalls(self, stalls: StallMonitor, coordinator: Coordinator, now: float) -> DeadlineError | None:
        """Return the error with which the job is to end, if it is; all ranks have it then."""
        error = stalls.look(now)
        if error is not None:
            coordinator.stop(error)
            self._channel.send(coordinator.announce(now))
            with contextlib.suppress(CollectiveError):  # they learn it from abort(), in fewer words
                self._channel.empty(self._failure, now + _GRACE_SECONDS)
        return error

    def _rest(self, token: int, thread: WaitingThread, longest: float) -> None:
        """Sleep: there is nothing to do."""
        self._transport.set_wake_target(thread)
        self._transport.sleep(token, thread, self._sleep_until_event(longest))
        self._transport.set_wake_target(WaitingThread.NONE)
        self._spin.slept()
        if time.monotonic() >= self._next_check and not self._transport.pending():
            self._next_check = time.monotonic() + CHECK_SECONDS
            self._check_peers()

    def _sleep_until_event(self, longest: float) -> float:
        if self._outstanding.broken is not None or self._transport.backlog:
            return longest if self._outstanding.broken is not None else BACKLOG_RETRY_SECONDS
        deadline = None if self._next_deadline is None else self._next_deadline()
        until = math.inf if deadline is None else deadline
        if self._stalls is not None:
            until = min(until, self._stalls.due())
        return max(0.0, min(longest, until - time.monotonic()))

    def _failure(self) -> CollectiveError | None:
        return self._watch.failure(range(self._backend.size))

    def _check_peers(self) -> None:
        """Look whether a rank is gone or the coordinator is stuck, after a silence."""
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
            late = self._stalls.check_coordinator(name, since, time.monotonic())
            if late is not None:
                self._give_up(late)

    def _give_up(self, error: BaseException) -> None:
        """Something went wrong in the middle: the ranks may have lost step, so nothing can go on."""
        known = interruption_error(error, self._backend.rank)
        self._abort(known)
        self._break(known)

    def _abort(self, error: CollectiveError) -> None:
        """Tell the others: those that wait for this rank's data, and those that wait for anything else."""
        self._backend.abort(error)
        self._watch.abort(error)

    def _fail_all(self, error: CollectiveError | None) -> None:
        """Fail everything that is outstanding, for this reason or because this rank has left."""
        self._channel.notes.clear()
        if (observer := self._observer) is not None:
            for name in list(self._outstanding.handles):
                observer.failed(name)
        self._outstanding.fail_all(error or CollectiveError(SHUTDOWN_MESSAGE))

    def _announce_shutdown(self) -> None:
        self._controller.leave()
        self._report()
        if self._coordinator is not None:
            self._channel.send(self._coordinator.announce(time.monotonic()))
        with contextlib.suppress(CollectiveError):  # they are gone, or learn it from this rank's end
            until = time.monotonic() + _GRACE_SECONDS
            if self._relay is not None:
                self._relay_shutdown(until)
            self._channel.empty(self._failure, until)
        self._transport.wake_readers()

    def _relay_shutdown(self, until: float) -> None:
        """Pass on what comes until rank 0 has announced that a rank leaves: those below have to hear it from here."""
        while (now := time.monotonic()) < until and self._failure() is None:
            token = self._transport.token()
            for _, messages in self._channel.receive():
                if any(isinstance(message, RankShutdown | JobAbort) for message in messages):
                    return
            self._transport.sleep(token, WaitingThread.CALLER, min(CHECK_SECONDS, until - now))
