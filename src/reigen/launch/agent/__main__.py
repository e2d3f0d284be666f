"""Agent of the launcher on another host: ``python -m reigen.launch.agent``, which ssh runs there.

With ``--dial`` it connects to the launcher by itself: the dial text is the first line of stdin, whose end ends the
agent, or is in a file, ``--dial FILE``. With ``--dial-by VARIABLE`` stdin has a line for each of several agents: a name
and a dial text; this one's is that of the name in VARIABLE.

With ``--listen`` it is the agent of the launcher's own host, in a job that goes on without its launcher: the job's
secret is the first line of stdin, the address where it listens the first line of stdout; it goes on in the background.

It keeps the host's ranks as the launcher keeps those of its own host: it plans their processors, starts them, reports
their output and their ends, and ends them on request. It decides nothing but this: when nothing has come from the
launcher for too long, everything ends at once, or goes on by itself, as the launcher has said.
`launch.agent.agent_protocol` has the protocol.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Protocol

from reigen.cluster.membership.elastic.host_page import HostPage
from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import ConfigError, LaunchError
from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_protocol import (
    ATTACH_PURPOSE,
    KEEPALIVE_SECONDS,
    REPLY_CODEC,
    REQUEST_CODEC,
    WINDOW_BYTES,
    AgentReply,
    AgentRequest,
)
from reigen.launch.agent.dial_back import DialText
from reigen.launch.agent.dialing import dial, read_dial_file, read_dial_text, wait_for_call
from reigen.launch.agent.gathering import await_call
from reigen.launch.agent.heartbeat import AgentHeartbeat
from reigen.launch.agent.host_facts import collect_host_facts
from reigen.launch.agent.launcher_role import LauncherRole, RoleState
from reigen.launch.agent.lines import MessageConnection
from reigen.launch.agent.pipe_messages import MessagePipes
from reigen.launch.agent.relay import RankRelay
from reigen.launch.agent.unattended import UnattendedHost
from reigen.launch.elastic.places import make_voter_memory, plan_starts
from reigen.launch.env_export import merge_remote_environ
from reigen.launch.job_directory import job_directory
from reigen.launch.job_state import ProcessesSwept, ProcessExited
from reigen.launch.local_plan import plan_host
from reigen.launch.options import NetworkOptions
from reigen.launch.payload import PYTHON_PLACEHOLDER
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.host_processes import STREAMS, HostProcesses, LocalProcesses
from reigen.launch.supervision.process_tree import signal_name
from reigen.launch.supervision.spawn import reserve_port
from reigen.launch.supervision.watchdog import PASSED_SIGNALS, run_under_watchdog
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.interfaces import choose_address
from reigen.net.listener import Listener, join_address, open_listening_socket
from reigen.resources.stdio import open_standard_streams

#: In force until the launcher has set another.
_FIRST_SILENCE_SECONDS = 60.0
_CONNECT_SECONDS = 20.0
_LOOPBACK = "127.0.0.1"


class RequestChannel(Protocol):
    """Channel to the launcher: through pipes, or an own connection."""

    def send(self, message: AgentReply) -> None:
        """Send a message."""

    def close(self) -> None:
        """End the channel. May be called twice."""

    @property
    def has_pending(self) -> bool:
        """Return whether something that was sent has not been written."""


#: Makes the channel: it gets the loop, and functions for requests and for the end.
ChannelFactory = Callable[[LauncherLoop, Callable[[AgentRequest], None], Callable[[str], None]], RequestChannel]


def main(arguments: Sequence[str] = ()) -> int:
    """Serve the launcher; returns the exit code. ``arguments``: none for stdin and stdout, or as above."""
    open_standard_streams()
    if list(arguments) == ["--listen"]:
        return _main_listening()
    if arguments:
        return _main_dialing(arguments)
    reading, writing = os.dup(0), os.dup(1)
    _detach_standard_streams()
    return run_under_watchdog(
        lambda watchdog_pipe: Agent(watchdog_pipe, _pipe_channel((reading, writing))).run(), complain_as_agent
    )


def _main_dialing(arguments: Sequence[str]) -> int:
    kind, *operands = arguments
    if (kind, len(operands)) not in {("--dial", 0), ("--dial", 1), ("--dial-by", 1)}:
        known = "--dial [FILE], --dial-by VARIABLE, --listen"
        complain_as_agent(f"unknown arguments: {' '.join(arguments)}; there are {known}")
        return 2
    stdin = os.dup(0) if kind == "--dial-by" or not operands else None
    try:
        if stdin is None:
            text = read_dial_file(operands[0])
        else:
            text = read_dial_text(stdin, os.environ.get(operands[0], "") if operands else "")
        _detach_standard_streams()
        return serve_by_dialing(text, stdin)
    except LaunchError as error:
        complain_as_agent(str(error))
        return error.exit_code


def _main_listening() -> int:
    """Become a process of its own, which is below no launcher's; returns in both, at once or at the end."""
    secret = bytes.fromhex(os.read(0, 1 << 12).decode().strip())
    listening, address = open_listening_socket("127.0.0.1")
    os.write(1, f"{address}\n".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return 0
    os.setsid()
    _detach_standard_streams()
    return run_under_watchdog(
        lambda watchdog_pipe: Agent(watchdog_pipe, None, listening=(listening, secret)).run(), complain_as_agent
    )


def serve_by_dialing(text: DialText, stdin: int | None = None, num_slots: int | None = None) -> int:
    """Connect to the launcher, and serve it to the end; returns the exit code. To be called before any thread starts.

    Args:
        text: the dial text.
        stdin: a descriptor whose end ends the agent; None: there is none.
        num_slots: the slots of this host, where the launcher does not know them.

    Raises:
        LaunchError: the launcher was not there in time, or refuses this agent.
    """
    connection = dial(text, complain_as_agent, stdin, num_slots)
    if text.gathers:
        call = await_call(connection, partial(wait_for_call, stdin))
        return 0 if call is None else serve_by_dialing(call, stdin)
    return run_under_watchdog(
        lambda watchdog_pipe: Agent(watchdog_pipe, _dialed_channel(connection), connection.mask, stdin).run(),
        complain_as_agent,
    )


def _detach_standard_streams() -> None:
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # output must not end up between the messages


def _pipe_channel(descriptors: tuple[int, int]) -> ChannelFactory:
    """Return the maker of a channel through pipes, to read from and to write to; it begins with the greeting."""

    def make(
        loop: LauncherLoop, on_request: Callable[[AgentRequest], None], on_end: Callable[[str], None]
    ) -> RequestChannel:
        codecs = REPLY_CODEC, REQUEST_CODEC
        pipes = MessagePipes(loop, descriptors, codecs, on_request, on_end, trailer=agent_protocol.LINE_END)
        pipes.send_bytes(agent_protocol.greeting())
        return pipes

    return make


def _dialed_channel(connection: Connection) -> ChannelFactory:
    return lambda loop, on_request, on_end: MessageConnection(
        loop, connection, (REPLY_CODEC, REQUEST_CODEC), on_request, on_end
    )


class Agent:
    """Supervising process of the agent; a ``ProcessListener`` of its processes.

    Args:
        watchdog_pipe: see ``launch.supervision.watchdog``.
        make_channel: makes the channel to the launcher; None: that comes to ``listening``.
        unmask: returns the job's secret, as it comes through the channel, in the clear.
        stdin: a descriptor whose end ends the agent; None: there is none.
        listening: a socket for launchers, and the job's secret.
    """

    def __init__(
        self,
        watchdog_pipe: int,
        make_channel: ChannelFactory | None,
        unmask: Callable[[bytes], bytes] = bytes,
        stdin: int | None = None,
        listening: tuple[socket.socket, bytes] | None = None,
    ) -> None:
        self._loop = LauncherLoop(watchdog_pipe, self._on_signal, self._on_watchdog_lost)
        self._unmask, self._stdin = unmask, stdin
        #: The job's; it comes with each start.
        self._secret = b""
        self._processes = LocalProcesses(self._loop, self)
        self._heartbeat: AgentHeartbeat | None = None
        self._last_received = self._turned_at = time.monotonic()
        self._next_keepalive = self._last_received + KEEPALIVE_SECONDS
        self._silence_seconds = _FIRST_SILENCE_SECONDS
        #: Bytes that may still be sent of each stream.
        self._credit = dict.fromkeys(STREAMS, WINDOW_BYTES)
        #: Address at which the others reach this host.
        self._address = ""
        #: Where launchers reach this agent, and options of its network.
        self._attach_at = "" if listening is None else join_address(*listening[0].getsockname()[:2])
        self._network: NetworkOptions | None = None
        #: Memory of the host's voter, in an elastic job.
        self._voter: int | None = None
        self._is_swept = False
        self._exit_code: int | None = None
        self._stack = ExitStack()
        self._role = LauncherRole(state=RoleState.ORPHANED if make_channel is None else RoleState.HERE)
        #: To the launcher; None: there is none.
        self._channel: RequestChannel | None = None
        self._listener: Listener | None = None
        self._unattended: UnattendedHost | None = None
        self._exits_by: float | None = time.monotonic() + _FIRST_SILENCE_SECONDS
        #: Processes that have not ended.
        self._running: set[int] = set()
        if make_channel is not None:
            self._channel = make_channel(self._loop, self._on_request, self._on_end)
        if listening is not None:
            self._secret = listening[1]
            self._listen(*listening)
        self._relay = RankRelay(self._loop, self._send, lambda: self._channel is not None and self._channel.has_pending)
        if stdin is not None:
            self._loop.watch(stdin, self._read_stdin)

    def run(self) -> int:
        """Serve until the launcher has gone; the watchdog ends all that runs then."""
        with self._loop, self._stack:
            if self._channel is not None:
                self._send_hello()
            while self._exit_code is None:
                self._turn()
            if self._listener is not None:
                self._listener.close()
        return self._exit_code

    def _send_hello(self) -> None:
        client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
        self._send(agent_protocol.AgentHello(socket.gethostname(), platform.python_version(), client))

    def _send(self, message: AgentReply) -> None:
        """Send a message to the launcher; where there is none, keep what another one, or the user, needs to know."""
        if self._channel is not None:
            self._channel.send(message)
        elif isinstance(message, ProcessExited) and self._unattended is not None:
            self._unattended.exits.append(message)

    def _turn(self) -> None:
        now, before = time.monotonic(), self._turned_at
        self._turned_at = now
        if now - before > 2 * KEEPALIVE_SECONDS:  # this process did not run: what came meanwhile is still to be read
            self._last_received = now
        if self._channel is None:
            self._turn_unattended(now)
        elif now - self._last_received > self._silence_seconds:
            self._lose_launcher(f"the launcher has not been heard of for {self._silence_seconds:g} s")
        if self._exit_code is not None:
            return
        if now >= self._next_keepalive:
            self._send(agent_protocol.KeepAlive())
            if self._heartbeat is not None:
                self._heartbeat.ask()
            self._next_keepalive = now + KEEPALIVE_SECONDS
        self._relay.forward()
        seconds = self._processes.turn()
        wait = self._next_keepalive - now
        self._loop.wait(wait if seconds is None else min(wait, seconds))

    def _end(self, reason: str, exit_code: int = 1) -> None:
        self._role.end()
        complain_as_agent(reason)
        self._exit_code = exit_code

    # ---------------------------------------------------------------- launchers that go and come

    def _lose_launcher(self, reason: str) -> None:
        """Go on without a launcher, or end everything."""
        goes_on, _ = self._role.lose(has_processes=bool(self._running))
        if not goes_on:
            self._end(reason)
            return
        complain_as_agent(f"{reason}; its processes go on")
        self._drop_channel()
        for stream in STREAMS:
            self._processes.resume(stream)

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _turn_unattended(self, now: float) -> None:
        """End when nothing runs any more: how that was is in a file; or when no launcher has ever come."""
        self._relay.forward()
        if self._unattended is None:
            if self._exits_by is not None and now > self._exits_by:
                self._end("no launcher has come")
        elif not self._running:
            self._processes.drain()
            self._unattended.close()
            try:
                self._unattended.write_result(self._page.finished)
            except OSError as error:
                complain_as_agent(f"how the job has ended cannot be written: {error}")
            self._end("its processes have ended, and there is no launcher", 0)

    @property
    def _page(self) -> HostPage:
        assert self._voter is not None, "the job is elastic"
        return HostPage(self._voter)

    def _listen(self, listening: socket.socket, secret: bytes, network: NetworkOptions | None = None) -> None:
        """Let other launchers come."""
        network = network or NetworkOptions.from_environ(os.environ)
        me = Identity(ProcessRole.AGENT, 0, ATTACH_PURPOSE)
        options = ConnectionOptions(
            secret, me, agent_protocol.MAX_FRAME_BYTES, network.make_tls(), network.peer_timeout_seconds
        )
        self._listener = Listener(self._loop, listening, options, self._on_launcher)

    def _on_launcher(self, connection: Connection) -> None:
        """Obey a launcher from now on, unless it is an older one."""
        peer = connection.peer
        is_launcher = peer.role is ProcessRole.LAUNCHER and peer.purpose == ATTACH_PURPOSE
        obeys, reason = self._role.claim(peer.rank) if is_launcher else (False, f"{peer} is no launcher")
        if not obeys:
            assert self._listener is not None, "it has accepted this"
            self._listener.refuse(reason)
            connection.close()
            return
        complain_as_agent(reason)
        self._send(agent_protocol.Superseded(peer.rank))
        self._drop_channel()
        self._heartbeat, self._unmask = None, connection.mask
        self._mark_alive()
        self._silence_seconds = _FIRST_SILENCE_SECONDS
        self._credit = dict.fromkeys(STREAMS, WINDOW_BYTES)
        for stream in STREAMS:
            self._processes.resume(stream)
        self._channel = _dialed_channel(connection)(self._loop, self._on_request, self._on_end)
        self._send_hello()

    def _attach(self, request: agent_protocol.AttachRequest) -> None:
        """Tell a launcher that has taken another one's place of the processes."""
        self._silence_seconds = request.silence_seconds
        directory, exits = "", []
        if self._unattended is not None:
            self._page.write_launcher(request.rendezvous)
            directory, exits = str(self._unattended.output_directory), self._unattended.exits
            self._unattended.exits = []
            self._unattended.close()
            self._start_heartbeat(request.rendezvous, request.number)
        finished = None if self._voter is None else self._page.finished
        # for a launcher that does not know of their ends, these run, too
        numbers = self._running | {each.rank for each in exits}
        self._send(agent_protocol.AttachReply(tuple(sorted(numbers)), finished, directory))
        for each in exits:
            self._send(each)

    def _continue_without_launcher(self, continuation: agent_protocol.Continuation) -> str:
        """Prepare to go on without this launcher; returns where another one reaches this agent."""
        if self._unattended is None:
            directory = job_directory(continuation.job)
            output = Path(continuation.output_directory or directory / "output")
            self._unattended = UnattendedHost(directory, output, continuation.num_ranks)
            self._role.continues = True
            self._role.generation = max(self._role.generation, continuation.generation)
        if self._listener is None:
            listening, self._attach_at = open_listening_socket(self._address or _LOOPBACK)
            self._listen(listening, self._secret, self._network)
        return self._attach_at

    # ---------------------------------------------------------------- requests

    def _mark_alive(self) -> None:
        self._last_received = time.monotonic()

    def _on_request(self, request: AgentRequest) -> None:
        self._mark_alive()
        try:
            self._handle(request)
        except (LaunchError, ConfigError) as error:
            code = error.exit_code if isinstance(error, LaunchError) else 1
            self._send(agent_protocol.HostRefused(str(error), code))

    def _handle(self, request: AgentRequest) -> None:
        match request:
            case agent_protocol.PrepareRequest():
                self._silence_seconds = request.silence_seconds
                self._send(self._prepare(request))
            case agent_protocol.AttachRequest():
                self._attach(request)
            case agent_protocol.EndRequest():
                self._end("the launcher has ended the job")
            case agent_protocol.StartRequest():
                self._start(request)
            case agent_protocol.OutputCredit(stream, num_bytes):
                self._credit[stream] += num_bytes
                if self._credit[stream] > 0:
                    self._processes.resume(stream)
            case agent_protocol.PayloadChunk():
                self._relay.receive(request)
            case agent_protocol.FactsRequest():
                self._send(collect_host_facts())
            case agent_protocol.TimeRequest():
                self._send(agent_protocol.TimeReply(time.time()))
            case agent_protocol.KeepAlive():
                pass
            case _:
                self._processes.execute(request)

    def _prepare(self, request: agent_protocol.PrepareRequest) -> agent_protocol.HostReady:
        try:
            if request.directory:
                os.chdir(Path.home() / request.directory)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise LaunchError(f"the working directory {request.directory} cannot be used there: {reason}") from None
        program = sys.executable if request.program == PYTHON_PLACEHOLDER else request.program
        if which(program, path=merge_remote_environ(os.environ, {"PATH": request.path})["PATH"]) is None:
            raise LaunchError(f"no such command there: {program}", 127)
        for file in request.files:
            if not Path(file).exists():
                raise LaunchError(f"there is no {file} in {Path.cwd()} there")
        address = _connect_to_launcher(request.launcher, min(_CONNECT_SECONDS, request.silence_seconds / 2))
        if request.interfaces:
            address, _ = choose_address(request.interfaces, address)
        self._address = address
        return agent_protocol.HostReady(address, self._stack.enter_context(reserve_port()).getsockname()[1])

    def _start(self, request: agent_protocol.StartRequest) -> None:
        environ = merge_remote_environ(os.environ, request.environ, request.package, request.kept_variables)
        self._secret = self._secret or self._unmask(request.services.secret)
        services = replace(request.services, secret=self._secret, node_host=self._address or _LOOPBACK)
        if self._heartbeat is None:
            self._network = NetworkOptions.from_environ(environ)
            self._start_heartbeat(services.rendezvous, request.number)
        attach_at = ""
        if request.continuation is not None:
            attach_at = self._continue_without_launcher(request.continuation)
        options = replace(request.options, command=_with_python(request.options.command))
        if request.elastic_starts:
            if self._voter is None:
                self._voter = make_voter_memory()
                self._stack.callback(os.close, self._voter)
            specs = plan_starts(request.elastic_starts, request.num_places, options, services, environ, self._voter)
            notes: list[str] = []
        else:
            specs, notes = plan_host(request.assignment, options, services, environ)
        for spec in specs:
            self._processes.start(spec, self._relay.inherited, stdin=0)
            self._running.add(spec.number)
        pids = tuple(self._processes.pids[spec.number] for spec in specs)
        self._send(agent_protocol.ProcessesStarted(pids, tuple(notes), attach_at))

    def _start_heartbeat(self, rendezvous: str, number: int) -> None:
        assert self._network is not None, "processes were started"
        seconds = min(_CONNECT_SECONDS, self._silence_seconds / 2)
        self._heartbeat = AgentHeartbeat(
            rendezvous, self._secret, number, self._loop, self._mark_alive, self._network, seconds
        )
        self._stack.callback(self._heartbeat.close)

    def _on_end(self, reason: str) -> None:
        if self._is_swept or not self._processes.pids or (self._role.continues and not self._running):
            self._exit_code = 0
        else:
            self._lose_launcher(f"the connection to the launcher has ended{reason and ': '}{reason}")

    def _read_stdin(self) -> None:
        assert self._stdin is not None, "it is watched"
        if not os.read(self._stdin, 1 << 12):
            self._loop.unwatch(self._stdin)
            self._on_end("the process that has started the agent has ended")

    def _on_signal(self, signum: int) -> None:
        if self._channel is not None and self._processes.pids and not self._is_swept:
            self._send(agent_protocol.SignalNotice(signum))
        elif signum not in PASSED_SIGNALS:
            self._end(f"ended by {signal_name(signum)}", 128 + signum)

    def _on_watchdog_lost(self) -> None:
        self._end("the process that watches over the agent has gone")

    # ---------------------------------------------------------------- events of the processes

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Send the output, and pause its source where the launcher does not keep up."""
        if self._channel is None and self._unattended is not None:
            self._unattended.write(rank, stream, data)
            return
        self._send(agent_protocol.OutputChunk(rank, stream, data))
        self._credit[stream] -= len(data)
        if self._credit[stream] <= 0:
            self._processes.pause(stream)

    def closed(self, rank: int, stream: int) -> None:
        """Report the end of a stream."""
        if self._channel is None and self._unattended is not None:
            self._unattended.close_stream(rank, stream)
            return
        self._send(agent_protocol.OutputClosed(rank, stream))

    def exited(self, event: ProcessExited) -> None:
        """Report the end of a process, after the rank's own messages."""
        self._running.discard(event.rank)
        self._relay.put(event)

    def swept(self, processes: HostProcesses) -> None:
        """Report the end of all processes, after all output."""
        self._processes.drain()
        self._is_swept = True
        self._relay.put(ProcessesSwept())


def _connect_to_launcher(launcher: str, seconds: float) -> str:
    """Connect to the launcher's service once; returns the own address on that way, or raises LaunchError."""
    try:
        with socket.create_connection(split_address(launcher), seconds) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"the launcher's service at {launcher} cannot be reached from there ({error.strerror or error}): "
            "name an interface that can be, with --network-interfaces, or open the firewall"
        ) from None


def _with_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """Put this process's Python in the place of the word that stands for it."""
    return (sys.executable, *command[1:]) if command[:1] == (PYTHON_PLACEHOLDER,) else command


def complain_as_agent(message: str) -> None:
    """Write a message of the agent's own to stderr, where its engine may keep it."""
    with suppress(OSError):
        sys.stderr.write(f"reigen agent on {socket.gethostname()}: {message}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
