"""The scheduler of a job with parameter servers: one thread, which listens, and does as `kv.roster` decides.

It carries no data and keeps nothing on a disk. When it is killed, the job goes on without it for a while; one that is
started again at the same place learns from the nodes, which connect again, who is in the job.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reigen.cluster.handover import Handover, Pointer
from reigen.cluster.reception import Guest, Reception, join_address
from reigen.errors import ConfigError
from reigen.kv import access
from reigen.kv.events import LossPolicy
from reigen.kv.nodes import Event, NodeLost, Stop
from reigen.kv.registry import ANSWERS, CALLS, MAX_MESSAGE_BYTES, SCHEDULER, Answer, News, Refused, Register, name_nodes
from reigen.kv.roles import Settings
from reigen.kv.roster import Roster
from reigen.kv.seats import Terms

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.wire.tls import Tls

_log = logging.getLogger(__name__)

#: How long nodes that were told of the job's end may take to hang up.
_LINGER_SECONDS = 2.0
#: How long a scheduler that follows another one lets those come first who know the job.
_KNOWN_FIRST_SECONDS = 15.0


class Scheduler:
    """The scheduler; connections queue from now on, before `serve`.

    Args:
        settings: of the job, with the role ``scheduler``.
        tls: encrypt all connections.

    Attributes:
        address: where it listens, ``host:port``.

    Raises:
        ConfigError: it cannot listen where the nodes will look for it: this is not that host, or the port is taken.
    """

    def __init__(self, settings: Settings, tls: Tls | None = None) -> None:
        config = settings.config
        self._settings = settings
        self._roster = Roster(_terms(settings), settings.job or 1 + secrets.randbits(62))
        #: whether somebody has come; and when to look who has not
        self._has_begun = False
        self._alarm: float | None = time.monotonic() + config.deadline_seconds
        secret, follows = access.scheduler_secret(settings)
        #: until when those wait that nobody has given a place, and these
        self._known_first_until = time.monotonic() + _KNOWN_FIRST_SECONDS if follows else None
        self._waiting: list[tuple[Guest, Register]] = []
        self._reception = self._listen(secret, tls)
        self.address = self._reception.address
        self._handover: Handover | None = None
        try:
            until = time.monotonic() + config.start_timeout_seconds
            self._handover = access.offer(settings, Pointer(self.address, secret), until)
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
            due = [at for at in (self._roster.due(), self._alarm, self._known_first_until) if at is not None]
            self._reception.turn(min(due, default=None))
            now = time.monotonic()
            if due and now >= min(due):  # who has said something until then is not silent
                self._reception.turn(now)
            self._say(self._roster.tick(now))
            if self._known_first_until is not None and now >= self._known_first_until:
                self._let_in()
            if self._alarm is not None and now >= self._alarm and not self._look_for_the_missing():
                return 1
        stop = self._roster.stop
        _log.log(logging.ERROR if stop.exit_code else logging.INFO, "the job is over: %s", stop.reason)
        until = time.monotonic() + _LINGER_SECONDS
        while self._reception.num_guests and time.monotonic() < until:
            self._reception.turn(until)
        return stop.exit_code

    def _look_for_the_missing(self) -> bool:
        """The start takes long: say whom it waits for; False if it is for everybody."""
        self._alarm, config = None, self._settings.config
        if not self._has_begun:
            _log.error("no worker and no server came within %g s (REIGEN_DEADLINE)", config.deadline_seconds)
            return False
        workers, servers = self._roster.absent()
        if missing := name_nodes(workers, servers):
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

    def _listen(self, secret: bytes, tls: Tls | None) -> Reception:
        settings = self._settings
        address = access.scheduler_address(settings)
        try:
            return Reception(
                secret,
                address,
                SCHEDULER,
                MAX_MESSAGE_BYTES,
                self._receive,
                self._gone,
                peer_timeout_seconds=settings.config.peer_timeout_seconds,
                must_speak=True,
                tls=tls,
            )
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"the scheduler cannot listen at {join_address(*address)}: {problem}. Is another job's scheduler, "
            "or another program, there? DMLC_PS_ROOT_PORT, the same for all processes of a job, names another port"
        )

    def _receive(self, guest: Guest, payload: bytes) -> None:
        message = CALLS.decode(payload)
        if isinstance(message, Register):
            if not self._has_begun:
                self._alarm = time.monotonic() + self._settings.config.start_timeout_seconds
            self._has_begun = True
            which = "" if message.number < 0 else f" {message.number}"
            where = f", which listens at {message.address}" if message.address else ""
            _log.info("%s%s registers from host %s%s", message.role, which, message.host, where)
            if self._known_first_until is not None and not message.is_known:
                self._waiting.append((guest, message))
                return
        self._say(self._roster.handle(guest, message, time.monotonic()))
        if isinstance(message, Register):
            self._let_in()

    def _let_in(self) -> None:
        """Those who wait for others to come first need not wait any longer."""
        self._known_first_until = None
        waiting, self._waiting = self._waiting, []
        for guest, message in waiting:
            self._say(self._roster.handle(guest, message, time.monotonic()))

    def _gone(self, guest: Guest, silent: bool) -> None:
        self._waiting = [one for one in self._waiting if one[0] is not guest]
        self._say(self._roster.ended(guest, time.monotonic()))

    def _say(self, instructions: Sequence[tuple[object, Answer]]) -> None:
        for guest, answer in instructions:
            assert isinstance(guest, Guest), "owners are the guests that were handed in"
            self._reception.send(guest, ANSWERS.encode(answer))
            if isinstance(answer, Refused):
                _log.warning("a process was refused: %s", answer.reason)
                self._reception.drop(guest)
                self._gone(guest, silent=False)
        _tell(event for _, answer in instructions if isinstance(answer, News) for event in answer.events)


def _tell(events: Iterable[Event]) -> None:
    """What has happened, for whoever reads the scheduler's log: once, however many nodes are told."""
    for event in dict.fromkeys(events):
        if not isinstance(event, Stop):
            _log.log(logging.WARNING if isinstance(event, NodeLost) else logging.INFO, "%s", event)


def _terms(settings: Settings) -> Terms:
    config = settings.config
    beats = config.kv_heartbeat_seconds and config.kv_heartbeat_timeout_seconds
    return Terms(
        settings.num_workers,
        settings.num_servers,
        policy=LossPolicy(config.kv_on_worker_loss),
        servers_return=config.kv_snapshot_dir is not None,
        heartbeat_timeout_seconds=beats or math.inf,
        return_seconds=config.start_timeout_seconds,
        start_seconds=config.start_timeout_seconds,
        deadline_seconds=config.deadline_seconds,
    )


def run(settings: Settings) -> int:
    """Be the scheduler of a job; returns the exit code. Raises as `Scheduler` does."""
    tls = None
    if settings.config.tls:
        from reigen.wire.tls import Tls

        tls = Tls()
    scheduler = Scheduler(settings, tls)
    try:
        return scheduler.serve()
    finally:
        scheduler.close()
