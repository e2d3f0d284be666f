"""Calling the other hosts before a job starts: all at once, and nothing starts unless all of them are ready."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Protocol

from reigen.errors import LaunchError
from reigen.launch import orders, sync
from reigen.launch.hosts import Seats, is_own_address
from reigen.launch.local import Services
from reigen.launch.luggage import PIECE_BYTES
from reigen.launch.options import Options
from reigen.launch.orders import BEAT_SECONDS
from reigen.launch.outpost import Outpost, Step
from reigen.launch.ssh import Problem, explain
from reigen.launch.sync import Waiter
from reigen.launch.travel import PACKAGE, leaving
from reigen.wire.interfaces import choose_address

#: How long a host may take to log in, to start Python, and to answer: at least this.
_CALL_SECONDS = 30.0
_PREPARE_SECONDS = 20.0
#: Options of Python behind which no script follows: -c and -m, also as the last of several (-Sc).
_NO_SCRIPT = re.compile(r"-[^-XW]*[cm]")


class Caller(Waiter, Protocol):
    """Who owns the agents and waits for them."""

    outposts: dict[str, Outpost]

    def call(self, host: str, command: Sequence[str]) -> Outpost:
        """Have an agent started."""


class Muster:
    """The agents of a job's other hosts, until their ranks start. Where there are none, nothing happens.

    Args:
        options: of the job.
        seats: which ranks are where.
        environ: what the ranks inherit.
        caller: has the agents.

    Attributes:
        reason: why this host is reached at the address that ``call`` found.
        master: address and port for rank 0's own server, where rank 0 is on another host.
    """

    def __init__(self, options: Options, seats: Sequence[Seats], environ: Mapping[str, str], caller: Caller) -> None:
        self._options, self._environ, self._caller = options, environ, caller
        self._seats = seats
        self.reason = ""
        self.master: tuple[str, int] | None = None

    def call(self) -> str:
        """Start the agents; returns the address at which they reach this host, empty where there are none.

        Raises:
            LaunchError: hosts cannot take part: a table of them.
            ConfigError: this host has none of the interfaces that were asked for.
        """
        ssh = self._options.ssh
        for seats in self._seats:
            if not seats.is_here:
                self._caller.call(seats.host, ssh.agent(seats.host, self._environ))
        patience = max(self._options.network.start_timeout_seconds, self._options.start_timeout_seconds or 0.0)
        self._gather(Step.HERE, max(_CALL_SECONDS, patience))
        outposts = self._caller.outposts
        if not outposts:
            return ""
        clients = [each.hello.client for each in outposts.values() if each.hello is not None]
        address, self.reason = own_address(self._options.network.interfaces, next(iter(outposts)), clients)
        return address

    def prepare(self, launcher: str) -> None:
        """Have each host looked at: is everything there that the job needs?

        Args:
            launcher: ``host:port`` of the launcher's service.

        Raises:
            LaunchError: hosts cannot take part: a table of them.
        """
        directory = self._sync() or str(Path.cwd())
        for seats in self._seats:
            outpost = self._caller.outposts.get(seats.host)
            if outpost is None:
                continue
            command = self._command(seats)
            outpost.send(
                orders.Prepare(
                    directory=directory,
                    program=command[0],
                    path=self._environ.get("PATH", ""),
                    files=scripts(command),
                    launcher=launcher,
                    interfaces=self._options.network.interfaces,
                    silence_seconds=self._options.network.silence_seconds,
                )
            )
        self._gather(Step.READY, _PREPARE_SECONDS)
        first = self._caller.outposts.get(next(seats.host for seats in self._seats if 0 in seats.ranks))
        if first is not None and first.ready is not None:
            self.master = first.ready.address, first.ready.port

    def _command(self, seats: Seats) -> tuple[str, ...]:
        """What a host must be able to run."""
        servers = self._options.servers
        if seats.ranks or servers is None:
            return self._options.command
        return servers.command or (self._options.ssh.python,)

    def deliver(self) -> None:
        """Bring the hosts what their ranks bring along, as fast as each of them takes it.

        Raises:
            LaunchError: hosts cannot take it: a table of them.
        """
        if self._options.luggage is None:
            return
        parcel = self._options.luggage.parcel
        size = os.fstat(parcel).st_size
        outposts = self._caller.outposts.values()
        num_sent = dict.fromkeys(self._caller.outposts, 0)
        while any(num_sent[each.host] < size and each.refused is None for each in outposts):
            for each in outposts:
                while num_sent[each.host] < size and each.refused is None and not each.is_busy:
                    data = os.pread(parcel, PIECE_BYTES, num_sent[each.host])
                    num_sent[each.host] += len(data)
                    each.send(orders.Piece(data, num_sent[each.host] == size))
            self._caller.turn(BEAT_SECONDS if any(each.is_busy for each in outposts) else 0.0)
        self._gather(Step.READY, 0.0)

    def start(self, services: Services) -> None:
        """Have the processes started. What comes of it is the caller's to hear."""
        environ = leaving(self._environ, self._options.exports)
        servers = self._options.servers
        for seats in self._seats:
            outpost = self._caller.outposts.get(seats.host)
            if outpost is not None:
                outpost.send(
                    orders.Start(
                        command=self._options.command,
                        topologies=tuple(astuple(topology) for topology in seats.topologies),
                        environ=environ,
                        package=PACKAGE,
                        rendezvous=services.rendezvous,
                        secret=services.secret,
                        master_address=services.master_address,
                        master_port=services.master_port,
                        bind=self._options.bind,
                        start_timeout_seconds=self._options.start_timeout_seconds,
                        household=services.household,
                        servants=seats.servants,
                        servant_command=() if servers is None else servers.command,
                        rank_environ={} if servers is None else dict(servers.worker_environ),
                        server_environ={} if servers is None else dict(servers.environ),
                    )
                )

    def _sync(self) -> str:
        """Copy the working directory, if that was asked for; returns where it is there, else an empty text."""
        if self._options.sync_directory is None:
            return ""
        directory = self._options.sync_directory.removeprefix("~/") or "."
        hosts = list(self._caller.outposts)
        problems = sync.copy(hosts, directory, self._options.ssh, self._caller)
        problems += [self._problem(each, 0) for each in self._caller.outposts.values() if each.refused is not None]
        if problems:
            raise LaunchError(table(problems, len(hosts)))
        return directory

    def _gather(self, step: Step, seconds: float) -> None:
        """Wait until every agent has come as far as ``step``.

        Raises:
            LaunchError: one has not; the others are asked first.
        """
        outposts = self._caller.outposts.values()
        deadline = time.monotonic() + seconds
        while any(each.step < step and each.refused is None for each in outposts):
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._caller.turn(left)
        problems = [self._problem(each, seconds) for each in outposts if each.step < step or each.refused is not None]
        if problems:
            codes = {each.refused.exit_code for each in outposts if each.refused is not None}
            raise LaunchError(table(problems, len(outposts)), codes.pop() if len(codes) == 1 else 1)

    def _problem(self, outpost: Outpost, seconds: float) -> Problem:
        refused = outpost.refused
        if refused is None:
            return Problem(outpost.host, f"it has not answered within {seconds:g} s")
        if refused.reason:
            return Problem(outpost.host, refused.reason)
        return explain(outpost.host, outpost.exit_code, outpost.said, self._options.ssh)


def own_address(interfaces: Sequence[str], towards: str, clients: Sequence[str]) -> tuple[str, str]:
    """At which address other hosts reach this one, and why it is this one.

    Args:
        interfaces: names of those that may be used; empty: all.
        towards: another host.
        clients: from where the other hosts say that ssh's connections come; empty texts where they do not know.

    Raises:
        ConfigError: none can be found.
    """
    if not interfaces:
        for client in clients:
            if client and is_own_address(client):
                return client, f"ssh has reached {towards} from there"
    return choose_address(interfaces, towards)


def scripts(command: Sequence[str]) -> tuple[str, ...]:
    """The file that a command runs, where that is known: the script of a Python interpreter.

    Example:
        >>> scripts(["python", "-u", "train.py", "--epochs", "3"])
        ('train.py',)
        >>> scripts(["python", "-m", "train"]), scripts(["python", "-Sc", "print('no file')"])
        ((), ())
    """
    if not Path(command[0]).name.startswith("python"):
        return ()
    for word in command[1:]:
        if not word.startswith("-"):
            return (word,) if Path(word).exists() else ()
        if word in {"-", "-X", "-W"} or _NO_SCRIPT.match(word):
            return ()
    return ()


def table(problems: Sequence[Problem], num_hosts: int) -> str:
    """What failed, by host."""
    width = max(len(problem.host) for problem in problems)
    lines = [f"{len(problems)} of {num_hosts} other hosts cannot take part; nothing was started"]
    for problem in problems:
        lines.append(f"  {problem.host:{width}}  {problem.what}")
        lines += [f"  {'':{width}}  {problem.advice}"] if problem.advice else []
    return "\n".join(lines)
