"""The thin side of the launcher: time, signals, output and crews around ``launch.job``, which decides."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Self

from reigen.cluster.environ import PREFIXED_VARIABLE
from reigen.cluster.rendezvous import RendezvousServer, split_address
from reigen.errors import LaunchError
from reigen.launch.crew import Crew, LocalCrew
from reigen.launch.display import Display
from reigen.launch.guard import guarded
from reigen.launch.hosts import Host, Seats, assign, assign_with_servers, is_this_host
from reigen.launch.job import (
    Event,
    Exited,
    Finish,
    GraceOver,
    HostLost,
    Instruction,
    Job,
    Kill,
    Orphaned,
    Restart,
    SignalReceived,
    StartGrace,
    Sweep,
    Swept,
    Terminate,
)
from reigen.launch.local import (
    TERMINAL_VARIABLE,
    Place,
    Services,
    command_of,
    cores_here,
    describe,
    plan,
    plan_servants,
)
from reigen.launch.loop import Loop
from reigen.launch.muster import Muster
from reigen.launch.options import Listener, Options, complain
from reigen.launch.outpost import Outpost, Step
from reigen.launch.processes import signal_name
from reigen.launch.report import Whereabouts, ended, report
from reigen.launch.servants import NODE_HOST_VARIABLE, Household, leniency, names_of
from reigen.launch.spawn import hold_port
from reigen.launch.ssh import explain
from reigen.wire.auth import SECRET_BYTES

#: How long the agents may take to end when everything else has.
_FAREWELL_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"


def run_job(options: Options, environ: Mapping[str, str], listener: Listener | None = None) -> int:
    """Run a job to its end; returns its exit code. Call it before any thread is started.

    Nothing that the job started is left when this returns, on any host that can be reached. The listener is by default
    the user.

    Raises:
        LaunchError: the kernel refused a process.
        ConfigError: the hosts have too few slots.
    """
    told = listener or Listener()
    hosts = options.hosts or (Host("localhost", options.num_ranks),)
    if options.servers is None:
        seats = assign(hosts, options.num_ranks, is_this_host)
    else:
        seats = assign_with_servers(hosts, options.num_ranks, options.servers, is_this_host)
    try:
        return guarded(lambda lifeline: _run_supervised(options, seats, environ, lifeline, told), told.complain)
    except OSError as error:
        raise LaunchError(f"cannot start: {error}") from error


def _run_supervised(
    options: Options, seats: Sequence[Seats], environ: Mapping[str, str], lifeline: int, listener: Listener
) -> int:
    secret = secrets.token_bytes(SECRET_BYTES)
    told = _told(environ, prefix=options.prefix)
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(options, seats, lifeline, listener, told))
        muster = Muster(options, seats, told, supervisor)
        network = options.network
        server = RendezvousServer(
            secret,
            muster.call() or _LOOPBACK,
            peer_timeout_seconds=network.peer_timeout_seconds,
            tls=network.make_tls(),
        )
        stack.callback(server.close)
        if options.verbose and muster.reason:
            complain(f"the other hosts reach this one at {server.address}: {muster.reason}")
        muster.prepare(server.address)
        muster.deliver()
        address, port = muster.master or (split_address(server.address)[0], 0)
        port = port or stack.enter_context(hold_port()).getsockname()[1]
        services = _with_servers(Services(server.address, secret, port, address), options, told, stack)
        supervisor.start(services)
        muster.start(services)
        supervisor.is_mustering = False
        server.start()
        return supervisor.run()


def _told(environ: Mapping[str, str], *, prefix: bool) -> dict[str, str]:
    """The environment, and what the ranks' output meets on its way."""
    facts = {TERMINAL_VARIABLE: sys.stdout.isatty(), PREFIXED_VARIABLE: prefix}
    others = {name: text for name, text in environ.items() if name not in facts}
    return others | {name: "1" for name, holds in facts.items() if holds}


def _with_servers(services: Services, options: Options, environ: Mapping[str, str], stack: ExitStack) -> Services:
    """What there is, with a scheduler at a port of this host, if there is to be one."""
    if options.servers is None:
        return services
    address, port = split_address(services.rendezvous)[0], stack.enter_context(hold_port()).getsockname()[1]
    # which address is this host's, nobody says better than the user; that is true of one host
    own = environ.get(NODE_HOST_VARIABLE, address) if address == _LOOPBACK else address
    return replace(services, household=Household(address, port, options.num_ranks, options.servers.num), node_host=own)


class Supervisor:
    """A job, from the start of its ranks to the launcher's exit code. A context manager.

    It hears what happens on each host (``crew.Audience``, ``outpost.Principal``) and does what ``launch.job`` says.

    Args:
        options: of the job.
        seats: which processes are where.
        lifeline: see ``launch.guard``.
        listener: who is told what happens.
        environ: what processes inherit.

    Attributes:
        loop: waits for everything.
        outposts: the agents on other hosts, by the name of the host.
        is_mustering: the agents are still being called; the job has not begun.
    """

    def __init__(
        self, options: Options, seats: Sequence[Seats], lifeline: int, listener: Listener, environ: Mapping[str, str]
    ) -> None:
        self._options, self._listener, self._environ = options, listener, environ
        self._seats = seats
        self._hosts = {number: each.host for each in seats for number in each.numbers}
        self._numbers = {each.host: each.numbers for each in seats}
        self._names = names_of(options.num_ranks, options.servers)
        lenient = leniency(options.num_ranks, options.servers, environ)
        self._job = Job(options.num_ranks, lenient.restarts, goes_on=lenient.goes_on)
        self.loop = Loop(lifeline, self._on_signal, self._on_orphaned)
        self.outposts: dict[str, Outpost] = {}
        self.is_mustering = True
        #: Hosts that were lost, and why.
        self._losses: dict[str, str] = {}
        self._local = LocalCrew(self.loop, self)
        self._display = Display(options, self.loop, lambda: self._crews, listener.complain)
        #: Crews of which something may be left, while sweeping.
        self._unswept: set[Crew] = set()
        luggage = options.luggage
        self._line = None if luggage is None else socket.socket(fileno=os.dup(luggage.line))
        self._grace_ends: float | None = None
        self._finish: Finish | None = None
        #: Do not wait until everything that was printed is written.
        self._is_hurried = False

    def __enter__(self) -> Self:
        self.loop.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for outpost in self.outposts.values():
            outpost.close()
        if self._line is not None:
            self._line.close()
        self.loop.__exit__(*exception)

    @property
    def _crews(self) -> list[Crew]:
        return [self._local, *self.outposts.values()]

    def start(self, services: Services) -> None:
        """Start the processes of this host.

        Args:
            services: what they are told of the launcher.

        Raises:
            LaunchError: one cannot be started; those that were are the guard's to end.
        """
        here = next((each for each in self._seats if each.is_here), None)
        if here is None:
            return
        options, servers = self._options, self._options.servers
        environ = self._environ if servers is None else {**self._environ, **servers.worker_environ}
        timeout = options.start_timeout_seconds
        ranks, reason = plan(
            here.topologies, services, environ, cores_here(), bind=options.bind, start_timeout_seconds=timeout
        )
        servants = [] if servers is None else plan_servants(here.servants, services, self._environ, servers.environ)
        places = ranks + servants
        of_servants = () if servers is None else servers.command
        self.start_all([(command_of(place, options.command, of_servants), place) for place in places])
        self._tell(list(self._local.pids.items()), describe(places, reason))

    def start_all(self, processes: Sequence[tuple[Sequence[str], Place]]) -> None:
        """Start processes of this host: what they run, and their places.

        Raises:
            LaunchError: one cannot be started; those that were are the guard's to end.
        """
        for command, place in processes:
            self._local.start(command, place, self._options.luggage)

    def call(self, host: str, command: Sequence[str]) -> Outpost:
        """Have an agent started on another host.

        Raises:
            LaunchError: there is no ssh.
        """
        outpost = Outpost(host, command, self.loop, self, self._options.network.silence_seconds)
        self.outposts[host] = outpost
        self.spare(outpost.pid)
        return outpost

    def spare(self, pid: int) -> None:
        """A child of this process is none of the job's."""
        self._local.spared.add(pid)

    def run(self) -> int:
        """Keep the job until it ends; returns the exit code."""
        while self._finish is None:
            self.turn()
        self._local.drain()
        self._dismiss()
        if self._listener.finished is None:
            failure = self._finish.failure
            tail = [] if failure is None else self._display.tail(failure.rank)
            hosts = self._hosts if self.outposts else {}
            self._display.say(report(self._finish, tail, Whereabouts(hosts, self._names, self._losses)))
        patience = None if self._finish.signum is None else self._options.grace_seconds
        self._display.write_all(patience, lambda: self._is_hurried)
        if self._listener.finished is not None:
            self._listener.finished(self._finish)
        return self._finish.exit_code

    # ---------------------------------------------------------------- one turn

    def turn(self, limit_seconds: float | None = None) -> None:
        """Wait for something to happen, not longer than that, and see to it."""
        was_finished = self._finish is not None
        waits = [limit_seconds, *(crew.turn() for crew in self._crews)]
        if self._finish is not None and not was_finished:
            return
        if self._grace_ends is not None:
            waits.append(max(0.0, self._grace_ends - time.monotonic()))
        self._wait(min((wait for wait in waits if wait is not None), default=None))
        if self._grace_ends is not None and time.monotonic() >= self._grace_ends:
            self._grace_ends = None
            self._happened(GraceOver())

    def _wait(self, seconds: float | None) -> None:
        self.loop.wait(seconds)
        had_reader = not self._display.has_lost_reader
        self._display.write()
        if had_reader and self._display.has_lost_reader:
            self._happened(SignalReceived(signal.SIGPIPE, time.monotonic()))

    def _happened(self, event: Event) -> None:
        for instruction in self._job.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case Restart(number, attempt, exit_code):
                words = f"reigen run: {self._called(number)}: {ended(exit_code)}; it is started again\n"
                self._display.say(words.encode())
                next(crew for crew in self._crews if self._of(crew, [number])).restart(number, attempt)
            case Terminate(ranks):
                for crew in self._crews:
                    crew.terminate(self._of(crew, ranks))
            case Kill(ranks):
                for crew in self._crews:
                    crew.kill(self._of(crew, ranks))
            case StartGrace():
                self._grace_ends = time.monotonic() + self._options.grace_seconds
            case Sweep():
                self._unswept = set(self._crews)
                for crew in self._crews:
                    crew.sweep()
            case Finish():
                self._finish = instruction

    def _of(self, crew: Crew, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that are a crew's."""
        if isinstance(crew, Outpost):
            return [rank for rank in ranks if rank in self._numbers[crew.host]]
        return [rank for rank in ranks if self._hosts[rank] not in self.outposts]

    def _dismiss(self) -> None:
        """Have the agents end, and wait for that: where ssh has ended, nothing is left there."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for outpost in self.outposts.values():
            outpost.dismiss()
        while not self._is_hurried and any(each.step is not Step.GONE for each in self.outposts.values()):
            if (left := deadline - time.monotonic()) <= 0:
                return
            self.turn(left)

    # ---------------------------------------------------------------- what happens

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """See ``Audience``."""
        self._display.printed(rank, stream, data)

    def closed(self, rank: int, stream: int) -> None:
        """See ``Audience``."""
        self._display.closed(rank, stream)

    def exited(self, rank: int, exit_code: int) -> None:
        """See ``Audience``."""
        if rank not in self._names:
            self._listener.exited(rank, exit_code)
        self._happened(Exited(rank, exit_code))

    def swept(self, crew: Crew) -> None:
        """See ``Audience``."""
        self._unswept.discard(crew)
        if not self._unswept:
            self._happened(Swept())

    def stepped(self, outpost: Outpost) -> None:
        """See ``Principal``."""
        if outpost.started is not None and outpost.step is Step.RUNNING:
            numbers = self._numbers[outpost.host]
            self._tell(list(zip(numbers, outpost.started.pids, strict=True)), list(outpost.started.notes))
        if self.is_mustering or outpost.refused is None:
            return  # the muster looks for itself
        if outpost.step is not Step.GONE:
            refused = outpost.refused
            raise LaunchError(f"host {outpost.host}: {refused.reason}", refused.exit_code)
        problem = explain(outpost.host, outpost.exit_code, outpost.said, self._options.ssh)
        self._lost(outpost.host, outpost.refused.reason or problem.what)
        if outpost in self._unswept:
            self.swept(outpost)

    def letter(self, text: bytes, parcel: int | None) -> None:
        """See ``Principal``: for whoever holds the other end of the line."""
        if self._line is not None:
            with suppress(OSError):  # nobody does any more
                socket.send_fds(self._line, [text], [] if parcel is None else [parcel])

    def _lost(self, host: str, reason: str) -> None:
        self._losses[host] = reason
        numbers = self._numbers[host]
        ranks = [number for number in numbers if number in self._job.running and number not in self._names]
        self._listener.lost(ranks, f"host {host} was lost: {reason}")
        self._happened(HostLost(numbers, reason))

    def _tell(self, pids: Sequence[tuple[int, int]], notes: Sequence[str]) -> None:
        if not self._options.verbose or not pids:
            return
        where = f"host {self._hosts[pids[0][0]]}: " if self.outposts else ""
        complain(where + notes[0])
        for (rank, pid), note in zip(pids, notes[1:], strict=True):
            complain(f"{where}{self._names.get(rank, f'rank {rank}')}: process {pid}, {note}")

    def _called(self, number: int) -> str:
        """A process, for the user, with its host where there are several."""
        where = f" (host {self._hosts[number]})" if self.outposts else ""
        return self._names.get(number, f"rank {number}") + where

    def _on_orphaned(self) -> None:
        self._is_hurried = True
        if self.is_mustering:
            raise LaunchError("the process that watches over the launcher has gone", 128 + signal.SIGKILL)
        self._happened(Orphaned())

    def _on_signal(self, signum: int) -> None:
        if self.is_mustering:
            raise LaunchError(f"stopped by {signal_name(signum)}", 128 + signum)
        self._is_hurried = self._finish is not None
        self._happened(SignalReceived(signum, time.monotonic()))
