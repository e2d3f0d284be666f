"""Scheduler of a job with parameter servers: the control service of its workers and servers, where DMLC_* says.

It carries no data and keeps nothing on a disk. When it is killed, the job goes on without it for a while; one that is
started again at the same place learns from the nodes, which connect again, who is in the job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial

from reigen.cluster.bootstrap.local import LocalBootstrapServer, ServiceEndpoint
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.members import LossPolicy, parameter_server_job
from reigen.cluster.membership.messages import (
    HeldKeys,
    JobEnded,
    MemberLeft,
    MemberLost,
    MemberReturned,
    MembershipEvent,
    RegisterMember,
    WorkerRoster,
    format_members,
)
from reigen.cluster.membership.table import MembershipTable
from reigen.errors import ConfigError
from reigen.kv.membership import discovery
from reigen.kv.membership.environment import ProcessConfig
from reigen.net.auth import Identity, ProcessRole
from reigen.net.listener import join_address

_log = logging.getLogger(__name__)

SCHEDULER_IDENTITY = Identity(ProcessRole.RANK, 0, "kv scheduler")

_READ_BYTES = 1 << 16
#: A pipe takes such lines in one piece.
_MAX_HELD_CHARACTERS = 400
#: How long nodes that were sent the job's end may take to hang up.
_LINGER_SECONDS = 2.0
#: How long a scheduler that may follow another one lets those come first who know the job.
_KNOWN_FIRST_SECONDS = 15.0


class Scheduler(ControlService):
    """Scheduler of one job; connections queue from now on, before `serve`.

    Args:
        settings: of the job, with the role ``scheduler``.
        left_fd: to which the numbers of workers that leave in good order are written, a line each; -1: nowhere.
        death_fd: from which slots and incarnations of processes are read that have ended, a line each; -1: nowhere.

    Raises:
        ConfigError: it cannot listen where the nodes will look for it: this is not that host, or the port is taken.
    """

    def __init__(self, settings: ProcessConfig, left_fd: int = -1, death_fd: int = -1) -> None:
        config = settings.config
        self._settings, self._left_fd = settings, left_fd
        secret, follows = discovery.scheduler_secret(settings)
        wait_seconds, why = recovery_wait_seconds(settings, follows=follows)
        if wait_seconds:
            _log.info("processes that know the job may come first, for up to %g s: %s", wait_seconds, why)
        job, known_first_until = settings.job or 1 + secrets.randbits(62), time.monotonic() + wait_seconds
        heartbeat_timeout = config.kv_heartbeat_seconds and config.kv_heartbeat_timeout_seconds
        spec = parameter_server_job(
            settings.num_workers,
            settings.num_servers,
            policy=LossPolicy(config.kv_on_worker_loss),
            servers_return=config.kv_snapshot_dir is not None or config.kv_replicas > 1,
            heartbeat_timeout_seconds=heartbeat_timeout or math.inf,
            return_seconds=settings.elastic_timeout_seconds or config.start_timeout_seconds,
            start_seconds=config.start_timeout_seconds,
            deadline_seconds=config.deadline_seconds,
            first_workers=settings.first_workers,
        )
        self._table = MembershipTable(spec, job, known_first_until)
        #: in an elastic job, by incarnation, the slots of processes; and the workers that are there, by number
        self._slots: dict[int, tuple[int, int]] = {}
        self._present: dict[int, int] = {}
        self._is_open = False
        #: whether a node has come; and when to look which have not
        self._has_begun = False
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
        while self._table.stop is None:
            self.turn(self._alarm)
            if self._alarm is not None and time.monotonic() >= self._alarm and not self._look_for_the_missing():
                return 1
        stop = self._table.stop
        _log.log(logging.ERROR if stop.exit_code else logging.INFO, "the job is over: %s", stop.reason)
        until = time.monotonic() + _LINGER_SECONDS
        while self._listener.num_clients and time.monotonic() < until:
            self._listener.turn(until)
        return stop.exit_code

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

    def on_register(self, message: RegisterMember) -> None:
        if not self._has_begun:
            self._alarm = time.monotonic() + self._settings.config.start_timeout_seconds
        self._has_begun = True
        if message.slot is not None:
            self._slots[message.incarnation] = message.slot
        which = "" if message.number < 0 else f" {message.number}"
        where = f", which listens at {message.address}" if message.address else ""
        _log.info("%s%s registers from host %s%s", message.role, which, message.host, where)

    def on_held_keys(self, message: HeldKeys) -> None:
        """Tell the launcher, whose message it is if that server dies."""
        text = " ".join(message.text[:_MAX_HELD_CHARACTERS].split())
        if not text or message.server >= self._settings.num_servers:
            return
        self._report(b"holds %d %s\n" % (message.server, text.encode(errors="replace")))

    def on_events(self, events: Sequence[MembershipEvent]) -> None:
        """Log them, and tell the launcher which workers have left."""
        for event in events:
            if self._settings.is_elastic:
                self._report_worker(event)
            elif isinstance(event, MemberLeft) and event.role == "worker":
                self._report(b"%d\n" % event.number)
            if not isinstance(event, JobEnded):
                _log.log(logging.WARNING if isinstance(event, MemberLost) else logging.INFO, "%s", event)

    def _report_worker(self, event: MembershipEvent) -> None:
        """Tell the launcher of an elastic job which slots' processes have joined and left."""
        if isinstance(event, WorkerRoster) and event.is_open and not self._is_open:
            self._is_open = True
            self._report(b"open\n")
        elif isinstance(event, MemberReturned) and event.is_new and event.incarnation in self._slots:
            self._present[event.number] = event.incarnation
            self._report(b"joined %d %d\n" % self._slots[event.incarnation])
        elif isinstance(event, MemberLeft) and event.role == "worker" and event.number in self._present:
            incarnation = self._present.pop(event.number)
            self._report(b"left %d %d\n" % self._slots.pop(incarnation))

    def _read_deaths(self, death_fd: int) -> None:
        """Handle ends of processes; lines are short, so that a pipe takes each in one piece."""
        try:
            text = os.read(death_fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not text:  # the launcher has gone
            self._listener.watch(death_fd, None)
        dead = {(int(slot), int(incarnation)) for slot, incarnation in map(bytes.split, text.splitlines())}
        for incarnation in [each for each, slot in self._slots.items() if slot in dead]:
            self._send(self._table.note_death(incarnation, time.monotonic()))

    def _report(self, line: bytes) -> None:
        if self._left_fd >= 0:
            with contextlib.suppress(OSError):  # the launcher has gone
                os.write(self._left_fd, line)

    def on_refusal(self, reason: str) -> None:
        _log.warning("a process was refused: %s", reason)


def _explain_port(settings: ProcessConfig, address: str, error: OSError) -> str:
    if settings.port_is_held:
        hint = f"The launcher holds this port for processes of its own user; this one is of user {os.geteuid()}"
    else:
        hint = (
            "Is another job's scheduler, or another program, there? DMLC_PS_ROOT_PORT, the same for all processes of a "
            "job, names another port"
        )
    problem = os.strerror(error.errno) if error.errno else str(error)
    return f"the scheduler cannot listen at {address}: {problem}. {hint}"


def recovery_wait_seconds(settings: ProcessConfig, *, follows: bool) -> tuple[float, str]:
    """Return how long unknown processes wait for those that know the job (`cluster.membership.table`, step H), and why.

    Where a job could not survive the loss of its scheduler and another process, no process waits. ``follows``: one of
    the job's processes has kept its secret for this scheduler.
    """
    config = settings.config
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
