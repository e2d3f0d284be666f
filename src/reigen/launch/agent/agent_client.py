"""Launcher's end of the connection to its agent on one host: a client process and the frames through it."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum, auto
from typing import Protocol

from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_protocol import (
    KEEPALIVE_SECONDS,
    REPLY_CODEC,
    REQUEST_CODEC,
    AgentReply,
    AgentRequest,
    GreetingParser,
)
from reigen.launch.agent.pipe_messages import MessagePipes
from reigen.launch.base import AgentStarter, HostProblem, last_line
from reigen.launch.job_state import ProcessesSwept, ProcessExited, ProcessInstruction, SweepProcesses
from reigen.launch.payload import PayloadFile
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.host_processes import STREAMS, ProcessListener

_STDERR_BYTES = 1 << 14
#: Seconds that the client process may take to end when its output has ended.
_LAST_SECONDS = 2.0


class AgentPhase(IntEnum):
    """Phase in the life of an agent."""

    STARTING = auto()
    CONNECTED = auto()
    READY = auto()
    RUNNING = auto()
    SWEPT = auto()
    GONE = auto()


class AgentListener(ProcessListener, Protocol):
    """Listener to the events of the ranks of another host."""

    def rank_message(self, text: bytes, payload: int | None) -> None:
        """Rank has sent a message; the payload's descriptor is the client's to close."""

    def signalled(self, agent: AgentClient, signum: int) -> None:
        """Agent was sent a signal while its ranks run."""

    def stepped(self, agent: AgentClient) -> None:
        """Agent has reached another phase, has answered, or has gone: see the client's attributes."""


class AgentClient:
    """Agent of one host; a ``HostProcesses``.

    Args:
        host: its name.
        process: its stdin and stdout are the agent's; from now on the client's to end.
        loop: waits for it.
        listener: gets the events of its ranks.
        silence_seconds: the connection is cut where no message comes for so long; may be changed later.

    Attributes:
        last_received_elsewhere: returns when the agent was last alive on another connection, by ``time.monotonic()``.
        phase: of the agent.
        refused: why it cannot take part, in its own words; or why the connection has ended.
        hello, ready, started, facts, time_reply: its latest answers.
        exit_code: of the client process, when it has ended.
    """

    def __init__(
        self,
        host: str,
        process: subprocess.Popen[bytes],
        loop: LauncherLoop,
        listener: AgentListener,
        silence_seconds: float,
    ) -> None:
        self.host, self.phase = host, AgentPhase.STARTING
        self.refused: agent_protocol.HostRefused | None = None
        self.hello: agent_protocol.AgentHello | None = None
        self.ready: agent_protocol.HostReady | None = None
        self.started: agent_protocol.ProcessesStarted | None = None
        self.facts: agent_protocol.HostFacts | None = None
        self.time_reply: agent_protocol.TimeReply | None = None
        self.exit_code: int | None = None
        #: A rank's message and its payload, which is not complete.
        self._incoming: tuple[bytes, PayloadFile] | None = None
        self._loop, self._listener = loop, listener
        self.silence_seconds = silence_seconds
        self.last_received_elsewhere: Callable[[], float] = lambda: -math.inf
        self._greeting_parser = GreetingParser()
        self._stderr: deque[bytes] = deque(maxlen=64)
        self._paused: set[int] = set()
        #: Bytes that were taken while the stream was paused, by stream.
        self._credit = dict.fromkeys(STREAMS, 0)
        self._process = process
        self._pipes: MessagePipes[AgentRequest, AgentReply] = MessagePipes(
            loop, self._descriptors(), (REQUEST_CODEC, REPLY_CODEC), self._on_reply, self._on_end, self._greeting_parser
        )
        self._last_received = self._turned_at = time.monotonic()
        self._next_keepalive = self._last_received

    def _descriptors(self) -> tuple[int, int]:
        process = self._process
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        os.set_blocking(process.stderr.fileno(), False)
        self._loop.watch(process.stderr, self._read_stderr)
        reading, writing = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdout.close()
        process.stdin.close()
        return reading, writing

    @property
    def pid(self) -> int:
        """Process id of the client."""
        return self._process.pid

    @property
    def output(self) -> str:
        """Output of the client process and of the agent on stderr, and before the agent's greeting."""
        return (self._greeting_parser.banner + "\n" + b"".join(self._stderr).decode(errors="replace")).strip()

    def problem(self, starter: AgentStarter, seconds: float) -> HostProblem:
        """Explain why its host cannot take part: it has refused, it has gone, or it has not come within ``seconds``."""
        if self.refused is None:
            words = f" ({last_line(self.output)})" if self.output else ""
            return HostProblem(self.host, f"it has not answered within {seconds:g} s{words}")
        if self.refused.reason:
            return HostProblem(self.host, self.refused.reason)
        return starter.explain_exit(self.host, self.exit_code, self.output)

    # ---------------------------------------------------------------- requests

    def send(self, request: AgentRequest) -> None:
        """Send a request that is not one of ``HostProcesses``."""
        self._pipes.send(request)

    @property
    def is_busy(self) -> bool:
        """Return whether part of a request has not been written yet."""
        return self._pipes.has_pending

    def execute(self, instruction: ProcessInstruction) -> None:
        """Implement ``HostProcesses``; on a host that is lost, the agent ends everything by itself."""
        if self.phase is AgentPhase.GONE and isinstance(instruction, SweepProcesses):
            self._listener.swept(self)
        else:
            self._pipes.send(instruction)

    def pause(self, stream: int) -> None:
        """Implement ``HostProcesses``: give no credit."""
        self._paused.add(stream)

    def resume(self, stream: int) -> None:
        """Implement ``HostProcesses``: give the credit that is owed."""
        self._paused.discard(stream)
        self._give_credit(stream)

    def turn(self) -> float | None:
        """Send a KeepAlive when it is due; see whether the agent is alive."""
        if self.phase is AgentPhase.GONE:
            return None
        now, before = time.monotonic(), self._turned_at
        self._turned_at = now
        if now - before > 2 * KEEPALIVE_SECONDS:  # this process did not run: what came meanwhile is still to be read
            self._last_received = now
        lost_at = math.inf
        if self.phase is not AgentPhase.STARTING:
            lost_at = max(self._last_received, self.last_received_elsewhere()) + self.silence_seconds
        if now > lost_at:
            self._on_end(f"nothing has been heard of it for {self.silence_seconds:g} s")
            return None
        if now >= self._next_keepalive:
            if self.phase is not AgentPhase.STARTING:
                self._pipes.send(agent_protocol.KeepAlive())
            self._next_keepalive = now + KEEPALIVE_SECONDS
        return max(0.0, min(self._next_keepalive, lost_at) - now)

    def finish_agent(self) -> None:
        """Close the agent's stdin: it has nothing more to do, and ends."""
        self._pipes.finish()

    def close(self) -> None:
        """End the client process; the agent then kills its processes. May be called twice."""
        self._pipes.close()
        if self._process.returncode is None:
            self._process.kill()
            self.exit_code = self._process.wait()
        if self._process.stderr is not None and not self._process.stderr.closed:
            self._loop.unwatch(self._process.stderr)
            self._process.stderr.close()
        self.phase = AgentPhase.GONE

    # ---------------------------------------------------------------- answers

    def _on_reply(self, answer: AgentReply) -> None:
        self._last_received = time.monotonic()
        match answer:
            case agent_protocol.OutputChunk(rank, stream, data):
                self._listener.printed(rank, stream, data)
                self._credit[stream] += len(data)
                if stream not in self._paused:
                    self._give_credit(stream)
            case agent_protocol.OutputClosed(rank, stream):
                self._listener.closed(rank, stream)
            case ProcessExited():
                self._listener.exited(answer)
            case ProcessesSwept():
                self.phase = AgentPhase.SWEPT
                self._listener.swept(self)
            case agent_protocol.RankMessageHeader(text, None):
                self._listener.rank_message(text, None)
            case agent_protocol.RankMessageHeader(text):
                self._incoming = text, PayloadFile()
            case agent_protocol.PayloadChunk():
                self._take(answer)
            case agent_protocol.SignalNotice(signum):
                self._listener.signalled(self, signum)
            case agent_protocol.KeepAlive():
                pass
            case _:
                self._advance(answer)

    def _advance(self, answer: AgentReply) -> None:
        match answer:
            case agent_protocol.HostFacts():
                self.facts = answer
            case agent_protocol.TimeReply():
                self.time_reply = answer
            case agent_protocol.AgentHello():
                self.hello, self.phase = answer, AgentPhase.CONNECTED
            case agent_protocol.HostReady():
                self.ready, self.phase = answer, AgentPhase.READY
            case agent_protocol.ProcessesStarted():
                self.started, self.phase = answer, AgentPhase.RUNNING
            case agent_protocol.HostRefused():
                self.refused = answer
        self._listener.stepped(self)

    def _take(self, piece: agent_protocol.PayloadChunk) -> None:
        """Take a part of the payload that comes with a rank's message."""
        assert self._incoming is not None, "its header comes first"
        text, payload = self._incoming
        payload.write(piece.data)
        if piece.is_last:
            payload.seal()
            self._listener.rank_message(text, payload.descriptor)
            os.close(payload.descriptor)
            self._incoming = None

    def _give_credit(self, stream: int) -> None:
        if self._credit[stream]:
            self._pipes.send(agent_protocol.OutputCredit(stream, self._credit[stream]))
            self._credit[stream] = 0

    def _on_end(self, reason: str) -> None:
        if self.phase is AgentPhase.GONE:
            return
        was = self.phase
        with suppress(subprocess.TimeoutExpired):
            self.exit_code = self._process.wait(0.0 if reason else _LAST_SECONDS)
        self._read_stderr()
        self.close()
        if was is not AgentPhase.SWEPT:
            self.refused = self.refused or agent_protocol.HostRefused(reason)
            self._listener.stepped(self)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "it was asked for"
        try:
            data = os.read(self._process.stderr.fileno(), _STDERR_BYTES)
        except BlockingIOError:
            return
        if data:
            self._stderr.append(data)
        else:
            self._loop.unwatch(self._process.stderr)
