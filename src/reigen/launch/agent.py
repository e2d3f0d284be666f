"""The launcher's agent on another host: ``python -m reigen.launch.agent``, which ssh runs there.

It keeps the host's ranks as the launcher keeps those of its own host: it plans their processors, starts them, tells
what they print and when they end, and ends them when it is told to. It decides nothing but this: when the launcher is
not heard of any more, everything ends at once. `launch.orders` states what is said.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from shutil import which

from reigen.cluster.rendezvous import split_address
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError, LaunchError
from reigen.launch import orders
from reigen.launch.crew import STREAMS, Crew, LocalCrew
from reigen.launch.facts import facts_here
from reigen.launch.forwarding import Post
from reigen.launch.frames import Pipes
from reigen.launch.guard import guarded
from reigen.launch.local import Place, Services, command_of, cores_here, describe, plan, plan_servants
from reigen.launch.loop import Loop
from reigen.launch.orders import ANSWERS, BEAT_SECONDS, ORDERS, WINDOW_BYTES, Answer, Order
from reigen.launch.processes import signal_name
from reigen.launch.spawn import hold_port
from reigen.launch.travel import arriving
from reigen.wire.interfaces import choose_address

#: Until the launcher has said how long it may be silent.
_FIRST_SILENCE_SECONDS = 60.0
_REACH_SECONDS = 5.0


def main() -> int:
    """Serve the launcher at the other end of stdin and stdout; returns the exit code."""
    reading, writing = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # whatever prints here must not end up between the messages
    return guarded(lambda lifeline: Agent(lifeline, (reading, writing)).run(), _complain)


class Agent:
    """The agent's supervising process; an ``Audience`` of its crew.

    Args:
        lifeline: see ``launch.guard``.
        descriptors: where the launcher is heard, and where it listens.
    """

    def __init__(self, lifeline: int, descriptors: tuple[int, int]) -> None:
        self._loop = Loop(lifeline, self._on_signal, self._on_orphaned)
        self._pipes = Pipes(self._loop, descriptors, (ANSWERS, ORDERS), self._hear, self._on_end)
        self._crew = LocalCrew(self._loop, self)
        self._post = Post(self._loop, self._pipes.send, lambda: self._pipes.has_pending)
        self._heard_at = self._turned_at = time.monotonic()
        self._beat_at = self._heard_at + BEAT_SECONDS
        self._silence_seconds = _FIRST_SILENCE_SECONDS
        #: What may still be sent of each stream.
        self._credit = dict.fromkeys(STREAMS, WINDOW_BYTES)
        #: At which address the others reach this host.
        self._address = ""
        self._is_swept = False
        self._exit_code: int | None = None
        self._stack = ExitStack()

    def run(self) -> int:
        """Serve until the launcher has gone; whatever runs then, the guard ends."""
        with self._loop, self._stack:
            self._pipes.send_bytes(orders.greeting())
            client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
            self._pipes.send(orders.Hello(socket.gethostname(), platform.python_version(), client))
            while self._exit_code is None:
                self._turn()
        return self._exit_code

    def _turn(self) -> None:
        now, before = time.monotonic(), self._turned_at
        self._turned_at = now
        if now - before > 2 * BEAT_SECONDS:  # this process did not run: what came meanwhile is still to be read
            self._heard_at = now
        if now - self._heard_at > self._silence_seconds:
            self._end(f"the launcher has not been heard of for {self._silence_seconds:g} s")
            return
        if now >= self._beat_at:
            self._pipes.send(orders.Beat())
            self._beat_at = now + BEAT_SECONDS
        self._post.forward()
        seconds = self._crew.turn()
        wait = self._beat_at - now
        self._loop.wait(wait if seconds is None else min(wait, seconds))

    def _end(self, reason: str, exit_code: int = 1) -> None:
        _complain(reason)
        self._exit_code = exit_code

    # ---------------------------------------------------------------- what the launcher says

    def _hear(self, order: Order) -> None:
        self._heard_at = time.monotonic()
        match order:
            case orders.Prepare():
                self._answer(order)
            case orders.Start():
                self._start(order)
            case orders.Restart() | orders.Terminate() | orders.Kill() | orders.Sweep():
                self._obey(order)
            case orders.Credit(stream, num_bytes):
                self._credit[stream] += num_bytes
                if self._credit[stream] > 0:
                    self._crew.resume(stream)
            case orders.Piece():
                self._take(order)
            case orders.Ask():
                self._pipes.send(facts_here())
            case orders.Ping():
                self._pipes.send(orders.Pong(time.time()))
            case orders.Beat():
                pass

    def _obey(self, order: orders.Restart | orders.Terminate | orders.Kill | orders.Sweep) -> None:
        """Do what ``launch.job`` has decided."""
        match order:
            case orders.Restart(number, attempt):
                self._restart(number, attempt)
            case orders.Terminate(ranks):
                self._crew.terminate(ranks)
            case orders.Kill(ranks):
                self._crew.kill(ranks)
            case orders.Sweep():
                self._crew.sweep()

    def _answer(self, order: orders.Prepare) -> None:
        self._silence_seconds = order.silence_seconds
        try:
            answer: Answer = self._prepare(order)
        except (LaunchError, ConfigError) as error:
            answer = orders.Refused(str(error), _code(error))
        self._pipes.send(answer)

    def _prepare(self, order: orders.Prepare) -> orders.Ready:
        try:
            os.chdir(Path.home() / order.directory)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LaunchError(f"the working directory {order.directory} cannot be used there: {reason}") from None
        if which(order.program, path=arriving(os.environ, {"PATH": order.path})["PATH"]) is None:
            raise LaunchError(f"no such command there: {order.program}", 127)
        for file in order.files:
            if not Path(file).exists():
                raise LaunchError(f"there is no {file} in {Path.cwd()} there")
        address = _reach(order.launcher, min(_REACH_SECONDS, order.silence_seconds / 2))
        if order.interfaces:
            address, _ = choose_address(order.interfaces, address)
        self._address = address
        return orders.Ready(address, self._stack.enter_context(hold_port()).getsockname()[1])

    def _take(self, piece: orders.Piece) -> None:
        try:
            self._post.receive(piece)
        except LaunchError as error:
            self._pipes.send(orders.Refused(str(error)))

    def _start(self, order: orders.Start) -> None:
        environ = arriving(os.environ, order.environ, order.package)
        try:
            places, reason = self._plan(order, environ)
            for place in places:
                command = command_of(place, order.command, order.servant_command)
                self._crew.start(command, place, self._post.luggage, stdin=0)
        except (LaunchError, ConfigError) as error:
            self._pipes.send(orders.Refused(str(error), _code(error)))
            return
        pids = tuple(self._crew.pids.values())
        self._pipes.send(orders.Started(pids, tuple(describe(places, reason))))

    def _plan(self, order: orders.Start, environ: Mapping[str, str]) -> tuple[list[Place], str]:
        services = Services(
            order.rendezvous, order.secret, order.master_port, order.master_address, order.household, self._address
        )
        ranks, reason = plan(
            [Topology(*numbers) for numbers in order.topologies],
            services,
            {**environ, **order.rank_environ},
            cores_here(),
            bind=order.bind,
            start_timeout_seconds=order.start_timeout_seconds,
        )
        return ranks + plan_servants(order.servants, services, environ, order.server_environ), reason

    def _restart(self, number: int, attempt: int) -> None:
        try:
            self._crew.restart(number, attempt)
        except LaunchError as error:
            self._pipes.send(orders.Refused(str(error), error.exit_code))

    def _on_end(self, reason: str) -> None:
        if self._is_swept or not self._crew.pids:
            self._exit_code = 0
        else:
            self._end(f"the connection to the launcher has ended{reason and ': '}{reason}")

    def _on_signal(self, signum: int) -> None:
        self._end(f"ended by {signal_name(signum)}", 128 + signum)

    def _on_orphaned(self) -> None:
        self._end("the process that watches over the agent has gone")

    # ---------------------------------------------------------------- what happens here

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Tell the launcher, and wait for it where it does not keep up."""
        self._pipes.send(orders.Printed(rank, stream, data))
        self._credit[stream] -= len(data)
        if self._credit[stream] <= 0:
            self._crew.pause(stream)

    def closed(self, rank: int, stream: int) -> None:
        """Tell the launcher."""
        self._pipes.send(orders.Closed(rank, stream))

    def exited(self, rank: int, exit_code: int) -> None:
        """Tell the launcher, after what the rank has sent home."""
        self._post.put(orders.Exited(rank, exit_code))

    def swept(self, crew: Crew) -> None:
        """Tell the launcher, after everything that was printed."""
        self._crew.drain()
        self._is_swept = True
        self._post.put(orders.Swept())


def _code(error: LaunchError | ConfigError) -> int:
    return error.exit_code if isinstance(error, LaunchError) else 1


def _reach(launcher: str, seconds: float) -> str:
    """Connect to the launcher's service once; returns the own address on that way.

    Raises:
        LaunchError: it cannot be reached.
    """
    try:
        with socket.create_connection(split_address(launcher), seconds) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"the launcher's service at {launcher} cannot be reached from there ({error.strerror or error}): "
            "name an interface that can be, with --network-interfaces, or open the firewall"
        ) from None


def _complain(message: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"reigen agent on {socket.gethostname()}: {message}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
