"""Scheduler of a job with parameter servers: the control service of its workers and servers, where DMLC_* says.

It carries no data and keeps nothing on a disk. When it is killed, the job goes on without it for a while; one that is
started again at the same place learns from the nodes, which connect again, who is in the job. In an elastic job it
reads that in the record that the one before it has left (`kv.membership.roster_record`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import secrets
import termios
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from reigen.cluster.bootstrap.local import LocalBootstrapServer, ServiceEndpoint
from reigen.cluster.environ import DEATH_FD_VARIABLE, DEPARTURE_FD_VARIABLE, ROSTER_FD_VARIABLE
from reigen.cluster.inherited_files import find_inherited
from reigen.cluster.membership.control_service import ControlService, StoreReply
from reigen.cluster.membership.members import LossPolicy, parameter_server_job
from reigen.cluster.membership.messages import (
    HeldKeys,
    JobEnded,
    MemberLeft,
    MemberLost,
    MemberReturned,
    MembershipEvent,
    MembershipReply,
    RegisterMember,
    ResizeServers,
    WorkerRoster,
    format_members,
)
from reigen.cluster.membership.recorded_job import RecordedEvent, RecordedJob
from reigen.cluster.membership.table import MembershipTable
from reigen.errors import ConfigError
from reigen.kv.membership import discovery
from reigen.kv.membership.environment import ProcessConfig
from reigen.kv.membership.roster_record import RosterRecord
from reigen.net.auth import Identity, ProcessRole
from reigen.net.listener import join_address

_log = logging.getLogger(__name__)

SCHEDULER_IDENTITY = Identity(ProcessRole.RANK, 0, "kv scheduler")

_READ_BYTES = 1 << 16
#: A pipe takes such lines in one piece.
_MAX_HELD_CHARACTERS = 400
#: How long nodes that were sent the job's end may take to hang up.
_LINGER_SECONDS = 2.0
#: Between two words to the launcher, which kills a scheduler that is silent for REIGEN_PEER_TIMEOUT.
_REPORT_SECONDS = 0.5
#: How long a scheduler that may follow another one lets those come first who know the job.
_KNOWN_FIRST_SECONDS = 15.0


class Scheduler(ControlService):
    """Scheduler of one job; connections queue from now on, before `serve`.

    Args:
        settings: of the job, with the role ``scheduler``.
        environ: tells the descriptors that it has of its launcher, if any: REIGEN_LEFT_FD, to which it reports, a line
            each, workers that leave in good order, and what else the launcher is to hear; and in an elastic job also
            REIGEN_ENDED_FD, from which it reads slots and incarnations of processes that have ended, a line each, and
            REIGEN_ROSTER_FD, the roster's record, which the job's schedulers share.

    Raises:
        ConfigError: it cannot listen where the nodes will look for it: this is not that host, or the port is taken. Or
            it follows another one of an elastic job, and its launcher's record of the roster has got lost. Or one of
            the launcher's descriptors is another file's.
    """

    #: when to tell the launcher again that this process runs
    _next_report_at = 0.0

    def __init__(self, settings: ProcessConfig, environ: Mapping[str, str] | None = None) -> None:
        config, environ = settings.config, environ or {}
        self._settings = settings
        self._left_fd = find_inherited(environ, DEPARTURE_FD_VARIABLE, "the pipe to the launcher")
        death_fd = find_inherited(environ, DEATH_FD_VARIABLE, "the pipe from the launcher")
        roster_fd = find_inherited(environ, ROSTER_FD_VARIABLE, "the launcher's record of the job's workers")
        secret, follows = discovery.scheduler_secret(settings)
        self._record = _open_record(settings, roster_fd)
        wait_seconds, why = recovery_wait_seconds(settings, follows=follows, has_record=self._record is not None)
        if wait_seconds:
            _log.info("processes that know the job may come first, for up to %g s: %s", wait_seconds, why)
        job, known_first_until = settings.job or 1 + secrets.randbits(62), time.monotonic() + wait_seconds
        heartbeat_timeout = config.kv_heartbeat_seconds and config.kv_heartbeat_timeout_seconds
        spec = parameter_server_job(
            settings.num_workers,
            settings.num_servers,
            policy=LossPolicy(config.kv_on_worker_loss),
            servers_return=config.kv_snapshot_dir is not None or config.kv_replicas > 1 or settings.servers_move,
            heartbeat_timeout_seconds=heartbeat_timeout or math.inf,
            return_seconds=settings.elastic_timeout_seconds or config.start_timeout_seconds,
            start_seconds=config.start_timeout_seconds,
            deadline_seconds=config.deadline_seconds,
            first_workers=settings.first_workers,
        )
        recorded = None if self._record is None else RecordedJob.replay(self._record.entries)
        self._table = MembershipTable(spec, job, known_first_until, recorded, time.monotonic())
        #: in an elastic job, by incarnation, the slots of processes; the workers that are there, by number; and by slot
        #: the latest incarnation of which the launcher has said that it has ended
        self._slots: dict[int, tuple[int, int]] = {}
        self._present: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        #: incarnations of processes that have registered, and had ended before
        self._late: list[int] = []
        self._is_open = False
        #: numbers of servers that have come when the job was over
        self._informed_servers: set[int] = set()
        #: it may tell nothing more: another one has its place, or what it would tell cannot be recorded
        self._is_silenced = False
        #: whether a node has come; and when to look which have not
        self._has_begun = recorded is not None and bool(recorded.workers)
        self._alarm: float | None = time.monotonic() + config.deadline_seconds
        address = discovery.scheduler_host(settings), settings.scheduler[1]
        try:
            super().__init__(
                secret,
                *address,
                me=SCHEDULER_IDENTITY,
                table=self._table,
                peer_timeout_seconds=config.peer_timeout_seconds,
                must_speak=True,
                port_is_held=settings.port_is_held,
                tls=settings.create_tls_context(),
            )
        except OSError as error:
            raise ConfigError(_explain_port(settings, join_address(*address), error)) from None
        if recorded is not None:
            self._report_recorded(recorded)
        if death_fd >= 0:
            os.set_blocking(death_fd, False)
            self._listener.watch(death_fd, partial(self._read_deaths, death_fd))
        self._handover: LocalBootstrapServer | None = None
        try:
            until = time.monotonic() + config.start_timeout_seconds
            self._handover = discovery.publish_scheduler(settings, ServiceEndpoint(self.address, secret), until)
        except BaseException:
            super().close()
            raise
        _log.info("scheduler of %d worker(s) and %d server(s) at %s: %s", settings.num_workers, settings.num_servers,
                  self.address, settings.reason)  # fmt: skip

    def serve(self) -> int:
        """Serve until the job is over; returns the exit code: 0 if all workers left in good order."""
        was_over = self._table.stop is not None  # some may not have been told
        while self._table.stop is None and not self._is_silenced:
            look_at = min(self._alarm or math.inf, self._report_alive())
            self.turn(None if look_at == math.inf else look_at)
            while self._late:
                self._send(self._table.note_death(self._late.pop(), time.monotonic()))
            if self._alarm is not None and time.monotonic() >= self._alarm and not self._look_for_the_missing():
                return 1
        stop = self._table.stop
        if stop is None or self._is_silenced:
            return 1
        _log.log(logging.ERROR if stop.exit_code else logging.INFO, "the job is over: %s", stop.reason)
        self._await_the_rest(was_over=was_over)
        return stop.exit_code

    def _report_alive(self) -> float:
        """Let the launcher of an elastic job know that this process runs, if it is time to; return when it is next."""
        if not self._settings.is_elastic or self._left_fd < 0:
            return math.inf
        if (now := time.monotonic()) >= self._next_report_at:
            if not _has_unread(self._left_fd):  # else that is heard, and a pipe that is full would lose the next report
                self._report(b"alive\n")
            self._next_report_at = now + _REPORT_SECONDS
        return self._next_report_at

    def _await_the_rest(self, *, was_over: bool) -> None:
        """Stay until all have hung up; behind another scheduler also for servers that have still to come.

        Those that the one before has told do not come: when they have ended, the launcher ends this process.
        """
        now = time.monotonic()
        soon = late = now + _LINGER_SECONDS
        if was_over:
            late = max(soon, now + self._settings.config.peer_timeout_seconds)
        while (now := time.monotonic()) < late:
            is_early = was_over and now < soon
            are_awaited = was_over and len(self._informed_servers) < self._settings.num_servers
            if not (self._listener.num_clients or is_early or are_awaited):
                return
            self._listener.turn(min(soon if is_early else late, self._report_alive()))

    def _look_for_the_missing(self) -> bool:
        """Log the absent members of a long start; returns False if all are absent."""
        self._alarm, config = None, self._settings.config
        if not self._has_begun:
            _log.error("no worker and no server came within %g s (REIGEN_DEADLINE)", config.deadline_seconds)
            return False
        workers, servers = self._table.absent()
        if missing := format_members(workers=workers, servers=servers):
            # a program may take its time until it makes a store, but then all workers do
            level = logging.INFO if len(workers) == self._settings.num_workers else logging.WARNING
            text = (
                "missing %g s after the first process came: %s. Workers are waited for until REIGEN_DEADLINE (%.10g s)"
            )
            _log.log(level, text, config.start_timeout_seconds, missing, config.deadline_seconds)
        return True

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._handover is not None:
            self._handover.close()
        super().close()
        if self._record is not None:
            self._record.close()

    def _send(self, replies: Sequence[tuple[Any, StoreReply | MembershipReply]]) -> None:
        """Record what has happened, tell the launcher, and then the others."""
        events, self._table.announced = self._table.announced, []
        if self._record is not None and not self._is_silenced:
            entries = [RecordedEvent(event, self._table.epoch, self._slot_of(event)) for event in events]
            try:
                self._is_silenced = not self._record.append(entries)
            except OSError as error:
                self._is_silenced = True
                _log.critical("%s", error)
            else:
                if self._is_silenced:
                    _log.error("another scheduler has been started in place of this one, which ends")
        if self._is_silenced:
            return
        for event in events:
            self._report_worker(event)
        super()._send(replies)

    def _slot_of(self, event: MembershipEvent) -> tuple[int, int] | None:
        return self._slots.get(event.incarnation) if isinstance(event, MemberReturned) else None

    def _report_recorded(self, recorded: RecordedJob) -> None:
        """Report to the launcher again: the scheduler before this one may not have got to it."""
        for number, worker in recorded.workers.items():
            if worker.slot is None:
                continue
            self._present[number] = worker.came.incarnation
            self._slots[worker.came.incarnation] = worker.slot
            self._report(b"joined %d %d\n" % worker.slot)
        if recorded.has_opened:
            self._report_open()
        for number, worker in recorded.workers.items():
            if worker.slot is not None and worker.has_left:
                self._report_departure(number)

    def on_register(self, message: RegisterMember) -> None:
        if not self._has_begun:
            self._alarm = time.monotonic() + self._settings.config.start_timeout_seconds
        self._has_begun = True
        if message.role == "server" and self._table.stop is not None:
            self._informed_servers.add(message.number)
        if message.slot is not None:
            self._slots[message.incarnation] = message.slot
            if message.slot[1] <= self._ended.get(message.slot[0], -1):  # what it has sent is still read
                self._late.append(message.incarnation)
            self._count_awaited()
        which = "" if message.number < 0 else f" {message.number}"
        where = f", which listens at {message.address}" if message.address else ""
        _log.info("%s%s registers from host %s%s", message.role, which, message.host, where)

    def on_held_keys(self, message: HeldKeys) -> None:
        """Tell the launcher, whose message it is if that server dies."""
        text = " ".join(message.text[:_MAX_HELD_CHARACTERS].split())
        if not text or message.server >= self._settings.num_servers:
            return
        self._report(b"holds %d %s\n" % (message.server, text.encode(errors="replace")))

    def on_resize(self, message: ResizeServers) -> None:
        """Tell the launcher, which starts and ends processes."""
        self._report(b"servers %d\n" % message.num)

    def on_events(self, events: Sequence[MembershipEvent]) -> None:
        """Log them, and tell the launcher which workers have left."""
        for event in events:
            if not self._settings.is_elastic and isinstance(event, MemberLeft) and event.role == "worker":
                self._report(b"%d\n" % event.number)
            if not isinstance(event, JobEnded):
                is_loss = isinstance(event, MemberLost) and not event.is_move
                _log.log(logging.WARNING if is_loss else logging.INFO, "%s", event)

    def _report_worker(self, event: MembershipEvent) -> None:
        """Tell the launcher of an elastic job which slots' processes have joined and left."""
        if isinstance(event, WorkerRoster) and event.is_open:
            self._report_open()
        elif isinstance(event, MemberReturned) and event.is_new and event.incarnation in self._slots:
            self._present[event.number] = event.incarnation
            self._report(b"joined %d %d\n" % self._slots[event.incarnation])
        elif isinstance(event, MemberLeft) and event.role == "worker" and event.number in self._present:
            self._report_departure(event.number)

    def _report_open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._report(b"open\n")

    def _report_departure(self, number: int) -> None:
        self._report(b"left %d %d\n" % self._slots.pop(self._present.pop(number)))

    def _read_deaths(self, death_fd: int) -> None:
        """Handle ends of processes; lines are short, so that a pipe takes each in one piece."""
        try:
            text = os.read(death_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not text:  # the launcher has gone
            self._listener.watch(death_fd, None)
        for slot, ended in (map(int, line.split()) for line in text.splitlines()):
            self._ended[slot] = max(ended, self._ended.get(slot, -1))
        for incarnation, (slot, attempt) in list(self._slots.items()):
            if attempt <= self._ended.get(slot, -1):
                self._send(self._table.note_death(incarnation, time.monotonic()))
        self._count_awaited()
        self._send(self._table.tick(time.monotonic()))

    def _count_awaited(self) -> None:
        """Let the others not wait for those of the first workers that have ended."""
        first = self._settings.first_workers
        self._table.first_workers = count_awaited(first, self._ended, self._slots.values())

    def _report(self, line: bytes) -> None:
        if self._left_fd >= 0:
            with contextlib.suppress(OSError):  # the launcher has gone
                os.write(self._left_fd, line)

    def on_refusal(self, reason: str) -> None:
        _log.warning("a process was refused: %s", reason)


def _has_unread(pipe: int) -> bool:
    """Return whether something is in a pipe that its reader has not read."""
    with contextlib.suppress(OSError):
        return any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return False


def count_awaited(num_first: int, ended: Mapping[int, int], registered: Collection[tuple[int, int]]) -> int:
    """Return how many workers an elastic job begins with, of whose first processes some have ended.

    One that has ended is not waited for; the process that is started in its place counts when it has come.

    Args:
        num_first: number of the first processes, which have the first slots.
        ended: by slot, the latest incarnation of which no process is left.
        registered: slots and incarnations of processes that have come.
    """
    followed = {slot for slot, incarnation in registered if incarnation > ended.get(slot, -1)}
    return max(1, num_first - sum(slot < num_first and slot not in followed for slot in ended))


def _open_record(settings: ProcessConfig, descriptor: int) -> RosterRecord | None:
    """Return the record of an elastic job's roster; None: the job has no such record.

    Raises:
        ConfigError: it is needed, and is not to be had.
    """
    if not settings.is_elastic:
        return None
    record = None
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            record = RosterRecord(descriptor)
    if record is None and settings.is_restart:
        raise ConfigError(
            "this scheduler was started again, and does not have the record of the job's workers that its launcher "
            f"keeps ({ROSTER_FD_VARIABLE}): a script that starts it must leave descriptors open"
        )
    if record is not None and record.generation > 1:
        _log.info("this is scheduler %d of the job; %d events are recorded", record.generation, len(record.entries))
    return record


def _explain_port(settings: ProcessConfig, address: str, error: OSError) -> str:
    if settings.port_is_held:
        hint = f"The launcher holds this port for processes of its user; this one belongs to user {os.geteuid()}"
    else:
        hint = (
            "Is another job's scheduler, or another program, there? DMLC_PS_ROOT_PORT, the same for all processes of a "
            "job, names another port"
        )
    problem = os.strerror(error.errno) if error.errno else str(error)
    return f"the scheduler cannot listen at {address}: {problem}. {hint}"


def recovery_wait_seconds(settings: ProcessConfig, *, follows: bool, has_record: bool = False) -> tuple[float, str]:
    """Return how long unknown processes wait for those that know the job (`cluster.membership.table`, step H), and why.

    Where a job could not survive the loss of its scheduler and another process, no process waits. ``follows``: one of
    the job's processes has kept its secret for this scheduler; ``has_record``: the launcher keeps who is in the job.
    """
    config = settings.config
    if has_record:
        return 0.0, "the launcher keeps a record of the job's workers"
    # half of what a node waits for its place at most
    seconds = min(_KNOWN_FIRST_SECONDS, config.start_timeout_seconds / 2)
    if follows:
        return seconds, "one of them has kept the secret for this scheduler"
    if settings.is_restart:
        return seconds, "this scheduler was started again (DMLC_NUM_ATTEMPT)"
    if settings.job or settings.secret is None:
        return 0.0, "this is the job's first scheduler"
    servers_return = config.kv_snapshot_dir is not None or config.kv_replicas > 1
    if servers_return or config.kv_on_worker_loss == LossPolicy.WAIT.value:
        return seconds, "this may not be the job's first scheduler, and processes of the job may be replaced"
    return 0.0, "processes of this job cannot be replaced"
