"""The launcher's end of the conversation with its agent on one host: a client process and the frames through it."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from reigen.launch.base import AgentStarter, HostProblem
from reigen.launch.event_loop import LauncherLoop
from reigen.launch.host_processes import STREAMS, ProcessListener
from reigen.launch.payload import PayloadFile

_STDERR_BYTES = 1 << 14
#: How long the client process may take to end when its output has ended.
_LAST_SECONDS = 2.0


class AgentPhase(IntEnum):
    """How far the agent has come."""

    CALLED = auto()
    HERE = auto()
    READY = auto()
    RUNNING = auto()
    SWEPT = auto()
    GONE = auto()


class AgentListener(ProcessListener, Protocol):
    """Who is told what happens to the ranks of another host."""

    def rank_message(self, text: bytes, parcel: int | None) -> None:
        """A rank has sent this home; the parcel's descriptor is the client's to close."""

    def stepped(self, agent: AgentClient) -> None:
        """The agent has come further, has answered, or has gone: the client's attributes say how."""


class AgentClient:
    """One host's agent; a ``HostProcesses``.

    Args:
        host: its name.
        process: its stdin and stdout are the agent's; from now on the client's to end.
        loop: waits for it.
        listener: is told.
        silence_seconds: without any message for so long, the connection is cut.

    Attributes:
        silence_seconds: the same; may be changed.
        heard_elsewhere_at: tells when the agent was heard last in another way, on the clock of ``time.monotonic()``.
        step: how far the agent has come.
        refused: why it cannot take part, in its own words; or why the conversation has ended.
        hello, ready, started, facts, pong: what it has answered last.
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
        self.host, self.step = host, AgentPhase.CALLED
        self.refused: agent_protocol.HostRefused | None = None
        self.hello: agent_protocol.AgentHello | None = None
        self.ready: agent_protocol.HostReady | None = None
        self.started: agent_protocol.ProcessesStarted | None = None
        self.facts: agent_protocol.HostFacts | None = None
        self.pong: agent_protocol.TimeReply | None = None
        self.exit_code: int | None = None
        self._rank_message: agent_protocol.RankMessageHeader | None = None
        self._incoming: PayloadFile | None = None
        self._loop, self._listener = loop, listener
        self.silence_seconds = silence_seconds
        self.heard_elsewhere_at: Callable[[], float] = lambda: -math.inf
        self._preface = GreetingParser()
        self._stderr: deque[bytes] = deque(maxlen=64)
        self._paused: set[int] = set()
        #: Bytes that were taken while the stream was paused, by stream.
        self._owed = dict.fromkeys(STREAMS, 0)
        self._process = process
        self._pipes: MessagePipes[AgentRequest, AgentReply] = MessagePipes(
            loop, self._descriptors(), (REQUEST_CODEC, REPLY_CODEC), self._hear, self._on_end, self._preface
        )
        self._heard_at = self._turned_at = time.monotonic()
        self._beat_at = self._heard_at

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
        """The client process."""
        return self._process.pid

    @property
    def said(self) -> str:
        """What the client process, and whatever ran there, has said on stderr, and before the agent's greeting."""
        return (self._preface.noise + "\n" + b"".join(self._stderr).decode(errors="replace")).strip()

    def problem(self, starter: AgentStarter, seconds: float) -> HostProblem:
        """Explain why its host cannot take part: it has refused, it has gone, or it has not come within ``seconds``."""
        if self.refused is None:
            return HostProblem(self.host, f"it has not answered within {seconds:g} s")
        if self.refused.reason:
            return HostProblem(self.host, self.refused.reason)
        return starter.explain_exit(self.host, self.exit_code, self.said)

    # ---------------------------------------------------------------- orders

    def send(self, order: AgentRequest) -> None:
        """Have the agent do something that ``HostProcesses`` does not speak of."""
        self._pipes.send(order)

    @property
    def is_busy(self) -> bool:
        """Whether something that was sent has not left yet."""
        return self._pipes.has_pending

    def restart(self, number: int, attempt: int) -> None:
        """As ``HostProcesses``."""
        self._pipes.send(agent_protocol.RestartRequest(number, attempt))

    def terminate(self, ranks: Sequence[int]) -> None:
        """As ``HostProcesses``."""
        self._pipes.send(agent_protocol.TerminateRequest(tuple(ranks)))

    def kill(self, ranks: Sequence[int]) -> None:
        """As ``HostProcesses``."""
        self._pipes.send(agent_protocol.KillRequest(tuple(ranks)))

    def sweep(self) -> None:
        """As ``HostProcesses``. Of a host that is lost, nobody can know; its agent ends everything there."""
        if self.step is AgentPhase.GONE:
            self._listener.swept(self)
        else:
            self._pipes.send(agent_protocol.SweepRequest())

    def pause(self, stream: int) -> None:
        """As ``HostProcesses``: give no credit."""
        self._paused.add(stream)

    def resume(self, stream: int) -> None:
        """As ``HostProcesses``: give what is owed."""
        self._paused.discard(stream)
        self._pay(stream)

    def turn(self) -> float | None:
        """Say that the launcher is alive; see whether the agent is."""
        if self.step is AgentPhase.GONE:
            return None
        now, before = time.monotonic(), self._turned_at
        self._turned_at = now
        if now - before > 2 * KEEPALIVE_SECONDS:  # this process did not run: what came meanwhile is still to be read
            self._heard_at = now
        lost_at = math.inf
        if self.step is not AgentPhase.CALLED:
            lost_at = max(self._heard_at, self.heard_elsewhere_at()) + self.silence_seconds
        if now > lost_at:
            self._on_end(f"nothing has been heard of it for {self.silence_seconds:g} s")
            return None
        if now >= self._beat_at:
            if self.step is not AgentPhase.CALLED:
                self._pipes.send(agent_protocol.KeepAlive())
            self._beat_at = now + KEEPALIVE_SECONDS
        return max(0.0, min(self._beat_at, lost_at) - now)

    def finish_agent(self) -> None:
        """The agent has nothing more to do: it ends when it reads the end of its stdin."""
        self._pipes.finish()

    def close(self) -> None:
        """End the client process; the agent kills what there is when it has gone. May be called twice."""
        self._pipes.close()
        if self._process.returncode is None:
            self._process.kill()
            self.exit_code = self._process.wait()
        if self._process.stderr is not None and not self._process.stderr.closed:
            self._loop.unwatch(self._process.stderr)
            self._process.stderr.close()
        self.step = AgentPhase.GONE

    # ---------------------------------------------------------------- answers

    def _hear(self, answer: AgentReply) -> None:
        self._heard_at = time.monotonic()
        match answer:
            case agent_protocol.OutputChunk(rank, stream, data):
                self._listener.printed(rank, stream, data)
                self._owed[stream] += len(data)
                if stream not in self._paused:
                    self._pay(stream)
            case agent_protocol.OutputClosed(rank, stream):
                self._listener.closed(rank, stream)
            case agent_protocol.ProcessExitReport(rank, exit_code, cause):
                self._listener.exited(rank, exit_code, cause)
            case agent_protocol.HostSwept():
                self.step = AgentPhase.SWEPT
                self._listener.swept(self)
            case agent_protocol.RankMessageHeader(text, None):
                self._listener.rank_message(text, None)
            case agent_protocol.RankMessageHeader():
                self._rank_message, self._incoming = answer, PayloadFile()
            case agent_protocol.PayloadChunk():
                self._take(answer)
            case agent_protocol.KeepAlive():
                pass
            case _:
                self._advance(answer)

    def _advance(self, answer: AgentReply) -> None:
        match answer:
            case agent_protocol.HostFacts():
                self.facts = answer
            case agent_protocol.TimeReply():
                self.pong = answer
            case agent_protocol.AgentHello():
                self.hello, self.step = answer, AgentPhase.HERE
            case agent_protocol.HostReady():
                self.ready, self.step = answer, AgentPhase.READY
            case agent_protocol.ProcessesStarted():
                self.started, self.step = answer, AgentPhase.RUNNING
            case agent_protocol.HostRefused():
                self.refused = answer
        self._listener.stepped(self)

    def _take(self, piece: agent_protocol.PayloadChunk) -> None:
        """A part of the parcel that comes with a rank's message."""
        assert self._incoming is not None, "its header comes first"
        assert self._rank_message is not None, "its header comes first"
        self._incoming.write(piece.data)
        if piece.is_last:
            parcel = self._incoming
            parcel.seal()
            self._listener.rank_message(self._rank_message.text, parcel.descriptor)
            os.close(parcel.descriptor)
            self._rank_message = self._incoming = None

    def _pay(self, stream: int) -> None:
        if self._owed[stream]:
            self._pipes.send(agent_protocol.OutputCredit(stream, self._owed[stream]))
            self._owed[stream] = 0

    def _on_end(self, reason: str) -> None:
        if self.step is AgentPhase.GONE:
            return
        was = self.step
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
