"""Looking at hosts without starting a job there: `reigen check --hosts`."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from reigen.launch import orders
from reigen.launch.crew import Crew
from reigen.launch.facts import facts_here
from reigen.launch.hosts import is_this_host
from reigen.launch.loop import Loop
from reigen.launch.outpost import Outpost, Step
from reigen.launch.ssh import Problem, Ssh, explain

_VISIT_SECONDS = 30.0
_SILENCE_SECONDS = 15.0
_NUM_PINGS = 10


@dataclass(frozen=True, slots=True)
class Clock:
    """A host's clock beside this one's.

    Attributes:
        offset_seconds: how far it is ahead.
        error_seconds: by how much that may be wrong: half the round trip.
    """

    offset_seconds: float
    error_seconds: float


@dataclass(frozen=True, slots=True)
class Visit:
    """What was found on a host.

    Attributes:
        host: its name, as the user gave it.
        problem: why nothing was found; None where it was.
        hostname: as it calls itself.
        python: version of the Python there.
        facts: what else there is.
        clock: its clock; None for this host's own.
    """

    host: str
    problem: Problem | None = None
    hostname: str = ""
    python: str = ""
    facts: orders.Facts | None = None
    clock: Clock | None = None


def visit(hosts: Sequence[str], ssh: Ssh, environ: Mapping[str, str]) -> list[Visit]:
    """Look at all hosts at the same time, by an agent on each of the others.

    Args:
        hosts: their names.
        ssh: how they are reached.
        environ: where PYTHONPATH stands.

    Raises:
        LaunchError: there is no ssh.
    """
    with _Visitor() as visitor:
        for host in hosts:
            if not is_this_host(host):
                visitor.call(host, ssh.agent(host, environ))
        visitor.wait(_VISIT_SECONDS)
        return [visitor.found(host, ssh) for host in hosts]


def clock_of(pings: Sequence[tuple[float, float, float]]) -> Clock | None:
    """A clock from questions and answers: (asked, time there, answered); the quickest one counts.

    Example:
        >>> clock_of([(0.0, 7.0, 4.0), (10.0, 15.5, 11.0)])
        Clock(offset_seconds=5.0, error_seconds=0.5)
    """
    if not pings:
        return None
    asked, there, answered = min(pings, key=lambda ping: ping[2] - ping[0])
    return Clock(there - (asked + answered) / 2, (answered - asked) / 2)


class _Visitor:
    """The agents that are asked; a ``Principal`` to whom no job ever happens."""

    def __init__(self) -> None:
        self._loop = Loop()
        self._outposts: dict[str, Outpost] = {}
        self._pings: dict[str, list[tuple[float, float, float]]] = {}
        self._asked: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._loop.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for outpost in self._outposts.values():
            outpost.close()
        self._loop.__exit__(*exception)

    def call(self, host: str, command: Sequence[str]) -> None:
        """Have an agent started."""
        self._pings[host] = []
        self._outposts[host] = Outpost(host, command, self._loop, self, _SILENCE_SECONDS)

    def wait(self, seconds: float) -> None:
        """Wait until all have answered everything, or cannot."""
        deadline = time.monotonic() + seconds
        outposts = self._outposts.values()
        while any(not self._is_done(each) for each in outposts) and (left := deadline - time.monotonic()) > 0:
            turns = [each.turn() for each in outposts]
            self._loop.wait(min([left, *(turn for turn in turns if turn is not None)]))
        for each in outposts:
            each.dismiss()

    def found(self, host: str, ssh: Ssh) -> Visit:
        """What is known of a host now."""
        outpost = self._outposts.get(host)
        if outpost is None:
            return Visit(host, None, socket.gethostname(), platform.python_version(), facts_here())
        if outpost.facts is None or outpost.hello is None:
            return Visit(host, self._problem(outpost, ssh))
        clock = clock_of(self._pings[host])
        return Visit(host, None, outpost.hello.hostname, outpost.hello.python, outpost.facts, clock)

    def _problem(self, outpost: Outpost, ssh: Ssh) -> Problem:
        if outpost.step is not Step.GONE:
            return Problem(outpost.host, f"it has not answered within {_VISIT_SECONDS:g} s")
        if outpost.refused is not None and outpost.refused.reason:
            return Problem(outpost.host, outpost.refused.reason)
        return explain(outpost.host, outpost.exit_code, outpost.said, ssh)

    def _is_done(self, outpost: Outpost) -> bool:
        return outpost.step is Step.GONE or len(self._pings[outpost.host]) == _NUM_PINGS

    # ---------------------------------------------------------------- as a principal

    def stepped(self, outpost: Outpost) -> None:
        """Ask the next question."""
        host, now = outpost.host, time.time()
        if outpost.step is Step.GONE:
            return
        if outpost.facts is None:
            outpost.send(orders.Ask())
            return
        if outpost.pong is not None and host in self._asked:
            self._pings[host].append((self._asked.pop(host), outpost.pong.seconds, now))
        if not self._is_done(outpost):
            self._asked[host] = time.time()
            outpost.send(orders.Ping())

    def letter(self, text: bytes, parcel: int | None) -> None:
        """No rank runs."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """No rank runs."""

    def closed(self, rank: int, stream: int) -> None:
        """No rank runs."""

    def exited(self, rank: int, exit_code: int) -> None:
        """No rank runs."""

    def swept(self, crew: Crew) -> None:
        """No rank runs."""
