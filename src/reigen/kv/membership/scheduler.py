"""Scheduler of a job with parameter servers: one thread that listens and does as `membership_table` decides.

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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reigen.cluster.bootstrap.local import LocalBootstrapServer, ServiceEndpoint
from reigen.errors import ConfigError
from reigen.kv.consistency.events import LossPolicy
from reigen.kv.membership import discovery
from reigen.kv.membership.environment import ProcessConfig
from reigen.kv.membership.membership_table import MembershipTable
from reigen.kv.membership.messages import (
    MAX_MESSAGE_BYTES,
    NODE_MESSAGE_CODEC,
    SCHEDULER_IDENTITY,
    SCHEDULER_MESSAGE_CODEC,
    MembershipNews,
    NodeRefused,
    RegisterNode,
    SchedulerMessage,
    format_nodes,
)
from reigen.kv.membership.node_state import JobSpec
from reigen.kv.membership.nodes import JobEnded, MembershipEvent, NodeLeft, NodeLost
from reigen.net.connection import Connection
from reigen.net.listener import MessageListener, join_address

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

_log = logging.getLogger(__name__)

#: How long nodes that were told of the job's end may take to hang up.
_LINGER_SECONDS = 2.0
#: How long a scheduler that may follow another one lets those come first who know the job.
_KNOWN_FIRST_SECONDS = 15.0


class Scheduler:
    """The scheduler; connections queue from now on, before `serve`.

    Args:
        settings: of the job, with the role ``scheduler``.
        tls: encrypt all connections.
        left_fd: a descriptor to which the numbers of workers that leave in good order are written, a line each; -1:
            none.

    Attributes:
        address: where it listens, ``host:port``.

    Raises:
        ConfigError: it cannot listen where the nodes will look for it: this is not that host, or the port is taken.
    """

    def __init__(self, settings: ProcessConfig, tls: TlsContext | None = None, left_fd: int = -1) -> None:
        config = settings.config
        self._settings, self._left_fd = settings, left_fd
        secret, follows = discovery.scheduler_secret(settings)
        patience, why = recovery_wait_seconds(settings, follows=follows)
        if patience:
            _log.info("processes that know the job may come first, for up to %g s: %s", patience, why)
        known_first_until = time.monotonic() + patience
        self._roster = MembershipTable(_job_spec(settings), settings.job or 1 + secrets.randbits(62), known_first_until)
        #: whether somebody has come; and when to look who has not
        self._has_begun = False
        self._alarm: float | None = time.monotonic() + config.deadline_seconds
        self._reception = self._listen(secret, tls)
        self.address = self._reception.address
        self._handover: LocalBootstrapServer | None = None
        try:
            until = time.monotonic() + config.start_timeout_seconds
            self._handover = discovery.publish_scheduler(settings, ServiceEndpoint(self.address, secret), until)
        except BaseException:
            self._reception.close()
            raise
        _log.info(
            "scheduler of %d worker(s) and %d server(s) at %s: %s",
            settings.num_workers,
            settings.num_servers,
            self.address,
            settings.reason,
        )

    def serve(self) -> int:
        """Serve until the job is over; returns the exit code: 0 if all workers left in good order."""
        while self._roster.stop is None:
            due = [at for at in (self._roster.due(), self._alarm) if at is not None]
            self._reception.turn(min(due, default=None))
            now = time.monotonic()
            if due and now >= min(due):  # who has said something until then is not silent
                self._reception.turn(now)
            self._say(self._roster.tick(now))
            if self._alarm is not None and now >= self._alarm and not self._look_for_the_missing():
                return 1
        stop = self._roster.stop
        _log.log(logging.ERROR if stop.exit_code else logging.INFO, "the job is over: %s", stop.reason)
        until = time.monotonic() + _LINGER_SECONDS
        while self._reception.num_clients and time.monotonic() < until:
            self._reception.turn(until)
        return stop.exit_code

    def _look_for_the_missing(self) -> bool:
        """The start takes long: say whom it waits for; False if it is for everybody."""
        self._alarm, config = None, self._settings.config
        if not self._has_begun:
            _log.error("no worker and no server came within %g s (REIGEN_DEADLINE)", config.deadline_seconds)
            return False
        workers, servers = self._roster.absent()
        if missing := format_nodes(workers, servers):
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
        self._reception.close()

    def _listen(self, secret: bytes, tls: TlsContext | None) -> MessageListener:
        settings = self._settings
        address = discovery.scheduler_address(settings)
        try:
            return MessageListener(
                secret,
                address,
                SCHEDULER_IDENTITY,
                MAX_MESSAGE_BYTES,
                self._receive,
                self._gone,
                peer_timeout_seconds=settings.config.peer_timeout_seconds,
                must_speak=True,
                port_is_held=settings.port_is_held,
                tls=tls,
            )
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
        if settings.port_is_held:
            raise ConfigError(
                f"the scheduler cannot listen at {join_address(*address)}: {problem}. The launcher holds this port for "
                f"processes of its own user; this one is of user {os.geteuid()}"
            )
        raise ConfigError(
            f"the scheduler cannot listen at {join_address(*address)}: {problem}. Is another job's scheduler, "
            "or another program, there? DMLC_PS_ROOT_PORT, the same for all processes of a job, names another port"
        )

    def _receive(self, guest: Connection, payload: bytes) -> None:
        message = NODE_MESSAGE_CODEC.decode(payload)
        if isinstance(message, RegisterNode):
            if not self._has_begun:
                self._alarm = time.monotonic() + self._settings.config.start_timeout_seconds
            self._has_begun = True
            which = "" if message.number < 0 else f" {message.number}"
            where = f", which listens at {message.address}" if message.address else ""
            _log.info("%s%s registers from host %s%s", message.role, which, message.host, where)
        self._say(self._roster.handle(guest, message, time.monotonic()))

    def _gone(self, guest: Connection, silent: bool) -> None:
        self._say(self._roster.ended(guest, time.monotonic()))

    def _say(self, instructions: Sequence[tuple[object, SchedulerMessage]]) -> None:
        news = dict.fromkeys(
            event for _, said in instructions if isinstance(said, MembershipNews) for event in said.events
        )
        for event in news:
            if self._left_fd >= 0 and isinstance(event, NodeLeft) and event.role == "worker":
                with contextlib.suppress(OSError):  # the launcher has gone
                    os.write(self._left_fd, b"%d\n" % event.number)
        for guest, answer in instructions:
            assert isinstance(guest, Connection), "owners are the guests that were handed in"
            self._reception.send(guest, SCHEDULER_MESSAGE_CODEC.encode(answer))
            if isinstance(answer, NodeRefused):
                _log.warning("a process was refused: %s", answer.reason)
                self._reception.drop(guest)
                self._gone(guest, silent=False)
        _log_event(news)


def _log_event(events: Iterable[MembershipEvent]) -> None:
    """What has happened, for whoever reads the scheduler's log."""
    for event in events:
        if not isinstance(event, JobEnded):
            _log.log(logging.WARNING if isinstance(event, NodeLost) else logging.INFO, "%s", event)


def recovery_wait_seconds(settings: ProcessConfig, *, follows: bool) -> tuple[float, str]:
    """How long unknown processes wait for those that know the job (`kv.membership.membership_table`, step H), and why.

    Where a job could not survive the loss of its scheduler and another process, nobody waits.

    Args:
        settings: of the scheduler.
        follows: one of the job's processes has kept its secret for this scheduler.
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
    if config.kv_snapshot_dir is not None or config.kv_on_worker_loss == LossPolicy.WAIT.value:
        return seconds, "this may not be the job's first scheduler, and processes of the job may be replaced"
    return 0.0, "processes of this job cannot be replaced"


def _job_spec(settings: ProcessConfig) -> JobSpec:
    config = settings.config
    beats = config.kv_heartbeat_seconds and config.kv_heartbeat_timeout_seconds
    return JobSpec(
        settings.num_workers,
        settings.num_servers,
        policy=LossPolicy(config.kv_on_worker_loss),
        servers_return=config.kv_snapshot_dir is not None,
        heartbeat_timeout_seconds=beats or math.inf,
        return_seconds=config.start_timeout_seconds,
        start_seconds=config.start_timeout_seconds,
        deadline_seconds=config.deadline_seconds,
    )


def run_scheduler(settings: ProcessConfig, left_fd: int = -1) -> int:
    """Be the scheduler of a job; returns the exit code. Arguments and errors as of `Scheduler`."""
    tls = None
    if settings.config.tls:
        from reigen.net.tls import TlsContext

        tls = TlsContext()
    scheduler = Scheduler(settings, tls, left_fd)
    try:
        return scheduler.serve()
    finally:
        scheduler.close()
