"""The launcher's agent on another host: ``python -m reigen.launch.agent``, which ssh runs there.

It keeps the host's ranks as the launcher keeps those of its own host: it plans their processors, starts them, tells
what they print and when they end, and ends them when it is told to. It decides nothing but this: when the launcher is
not heard of any more, everything ends at once. `launch.agent.agent_protocol` states what is said.
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

from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError, LaunchError
from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_protocol import (
    KEEPALIVE_SECONDS,
    REPLY_CODEC,
    REQUEST_CODEC,
    WINDOW_BYTES,
    AgentReply,
    AgentRequest,
)
from reigen.launch.agent.heartbeat import AgentHeartbeat
from reigen.launch.agent.host_facts import collect_host_facts
from reigen.launch.agent.pipe_messages import MessagePipes
from reigen.launch.agent.relay import RankRelay
from reigen.launch.env_export import merge_remote_environ
from reigen.launch.event_loop import LauncherLoop
from reigen.launch.host_processes import STREAMS, HostProcesses, LocalProcesses
from reigen.launch.local_plan import (
    JobServices,
    ProcessSpec,
    describe_binding,
    detect_cpus,
    plan_ps_processes,
    plan_ranks,
    process_command,
)
from reigen.launch.network_options import NetworkOptions
from reigen.launch.process_tree import signal_name
from reigen.launch.spawn import reserve_port
from reigen.launch.watchdog import run_under_watchdog
from reigen.net.interfaces import choose_address
from reigen.resources.stdio import open_standard_streams

#: Until the launcher has said how long it may be silent.
_FIRST_SILENCE_SECONDS = 60.0
_CONNECT_SECONDS = 20.0


def main() -> int:
    """Serve the launcher at the other end of stdin and stdout; returns the exit code."""
    open_standard_streams()
    reading, writing = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # whatever prints here must not end up between the messages
    return run_under_watchdog(lambda lifeline: Agent(lifeline, (reading, writing)).run(), _complain)


class Agent:
    """The agent's supervising process; an ``ProcessListener`` of its processes.

    Args:
        lifeline: see ``launch.watchdog``.
        descriptors: where the launcher is heard, and where it listens.
    """

    def __init__(self, lifeline: int, descriptors: tuple[int, int]) -> None:
        self._loop = LauncherLoop(lifeline, self._on_signal, self._on_orphaned)
        self._pipes = MessagePipes(self._loop, descriptors, (REPLY_CODEC, REQUEST_CODEC), self._hear, self._on_end)
        self._processes = LocalProcesses(self._loop, self)
        self._heartbeat: AgentHeartbeat | None = None
        self._relay = RankRelay(self._loop, self._pipes.send, lambda: self._pipes.has_pending)
        self._heard_at = self._turned_at = time.monotonic()
        self._beat_at = self._heard_at + KEEPALIVE_SECONDS
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
            self._pipes.send_bytes(agent_protocol.greeting())
            client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
            self._pipes.send(agent_protocol.AgentHello(socket.gethostname(), platform.python_version(), client))
            while self._exit_code is None:
                self._turn()
        return self._exit_code

    def _turn(self) -> None:
        now, before = time.monotonic(), self._turned_at
        self._turned_at = now
        if now - before > 2 * KEEPALIVE_SECONDS:  # this process did not run: what came meanwhile is still to be read
            self._heard_at = now
        if now - self._heard_at > self._silence_seconds:
            self._end(f"the launcher has not been heard of for {self._silence_seconds:g} s")
            return
        if now >= self._beat_at:
            self._pipes.send(agent_protocol.KeepAlive())
            if self._heartbeat is not None:
                self._heartbeat.ask()
            self._beat_at = now + KEEPALIVE_SECONDS
        self._relay.forward()
        seconds = self._processes.turn()
        wait = self._beat_at - now
        self._loop.wait(wait if seconds is None else min(wait, seconds))

    def _end(self, reason: str, exit_code: int = 1) -> None:
        _complain(reason)
        self._exit_code = exit_code

    # ---------------------------------------------------------------- what the launcher says

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def _hear(self, order: AgentRequest) -> None:
        self._heard()
        match order:
            case agent_protocol.PrepareRequest():
                self._answer(order)
            case agent_protocol.StartRequest():
                self._start(order)
            case agent_protocol.OutputCredit(stream, num_bytes):
                self._credit[stream] += num_bytes
                if self._credit[stream] > 0:
                    self._processes.resume(stream)
            case agent_protocol.PayloadChunk():
                self._take(order)
            case agent_protocol.FactsRequest():
                self._pipes.send(collect_host_facts())
            case agent_protocol.TimeRequest():
                self._pipes.send(agent_protocol.TimeReply(time.time()))
            case agent_protocol.KeepAlive():
                pass
            case _:
                self._obey(order)

    def _obey(self, order: AgentRequest) -> None:
        """Do what ``launch.job_state`` has decided."""
        match order:
            case agent_protocol.RestartRequest(number, attempt):
                self._restart(number, attempt)
            case agent_protocol.TerminateRequest(ranks):
                self._processes.terminate(ranks)
            case agent_protocol.KillRequest(ranks):
                self._processes.kill(ranks)
            case agent_protocol.SweepRequest():
                self._processes.sweep()

    def _answer(self, order: agent_protocol.PrepareRequest) -> None:
        self._silence_seconds = order.silence_seconds
        try:
            answer: AgentReply = self._prepare(order)
        except (LaunchError, ConfigError) as error:
            answer = agent_protocol.HostRefused(str(error), _error_exit_code(error))
        self._pipes.send(answer)

    def _prepare(self, order: agent_protocol.PrepareRequest) -> agent_protocol.HostReady:
        try:
            os.chdir(Path.home() / order.directory)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LaunchError(f"the working directory {order.directory} cannot be used there: {reason}") from None
        if which(order.program, path=merge_remote_environ(os.environ, {"PATH": order.path})["PATH"]) is None:
            raise LaunchError(f"no such command there: {order.program}", 127)
        for file in order.files:
            if not Path(file).exists():
                raise LaunchError(f"there is no {file} in {Path.cwd()} there")
        address = _connect_to_launcher(order.launcher, min(_CONNECT_SECONDS, order.silence_seconds / 2))
        if order.interfaces:
            address, _ = choose_address(order.interfaces, address)
        self._address = address
        return agent_protocol.HostReady(address, self._stack.enter_context(reserve_port()).getsockname()[1])

    def _take(self, piece: agent_protocol.PayloadChunk) -> None:
        try:
            self._relay.receive(piece)
        except LaunchError as error:
            self._pipes.send(agent_protocol.HostRefused(str(error)))

    def _start(self, order: agent_protocol.StartRequest) -> None:
        environ = merge_remote_environ(os.environ, order.environ, order.package)
        try:
            self._heartbeat = self._connect(order, NetworkOptions.of(environ))
            places, reason = self._plan(order, environ)
            for place in places:
                command = process_command(place, order.command, order.ps_command)
                self._processes.start(command, place, self._relay.inherited, stdin=0)
        except (LaunchError, ConfigError) as error:
            self._pipes.send(agent_protocol.HostRefused(str(error), _error_exit_code(error)))
            return
        pids = tuple(self._processes.pids.values())
        self._pipes.send(agent_protocol.ProcessesStarted(pids, tuple(describe_binding(places, reason))))

    def _connect(self, order: agent_protocol.StartRequest, network: NetworkOptions) -> AgentHeartbeat:
        heartbeat = AgentHeartbeat(
            order.rendezvous,
            order.secret,
            order.number,
            self._loop,
            self._heard,
            peer_timeout_seconds=network.peer_timeout_seconds,
            timeout_seconds=min(_CONNECT_SECONDS, self._silence_seconds / 2),
            tls=network.make_tls(),
        )
        self._stack.callback(heartbeat.close)
        return heartbeat

    def _plan(self, order: agent_protocol.StartRequest, environ: Mapping[str, str]) -> tuple[list[ProcessSpec], str]:
        services = JobServices(
            order.rendezvous, order.secret, order.master_port, order.master_address, order.ps_job, self._address
        )
        ranks, reason = plan_ranks(
            [Topology(*numbers) for numbers in order.topologies],
            services,
            {**environ, **order.rank_environ},
            detect_cpus(),
            bind=order.bind,
            start_timeout_seconds=order.start_timeout_seconds,
        )
        return ranks + plan_ps_processes(order.servants, services, environ, order.server_environ), reason

    def _restart(self, number: int, attempt: int) -> None:
        try:
            self._processes.restart(number, attempt)
        except LaunchError as error:
            self._pipes.send(agent_protocol.HostRefused(str(error), error.exit_code))

    def _on_end(self, reason: str) -> None:
        if self._is_swept or not self._processes.pids:
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
        self._pipes.send(agent_protocol.OutputChunk(rank, stream, data))
        self._credit[stream] -= len(data)
        if self._credit[stream] <= 0:
            self._processes.pause(stream)

    def closed(self, rank: int, stream: int) -> None:
        """Tell the launcher."""
        self._pipes.send(agent_protocol.OutputClosed(rank, stream))

    def exited(self, rank: int, exit_code: int, cause: str) -> None:
        """Tell the launcher, after what the rank has sent home."""
        self._relay.put(agent_protocol.ProcessExitReport(rank, exit_code, cause))

    def swept(self, processes: HostProcesses) -> None:
        """Tell the launcher, after everything that was printed."""
        self._processes.drain()
        self._is_swept = True
        self._relay.put(agent_protocol.HostSwept())


def _error_exit_code(error: LaunchError | ConfigError) -> int:
    return error.exit_code if isinstance(error, LaunchError) else 1


def _connect_to_launcher(launcher: str, seconds: float) -> str:
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
