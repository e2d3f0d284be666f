"""Launcher's end of the conversation with its agent on one host, over a line (``launch.agent.lines``)."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Protocol

from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_protocol import KEEPALIVE_SECONDS, AgentReply, AgentRequest
from reigen.launch.agent.lines import AgentLine
from reigen.launch.base import ExitExplainer, HostProblem, last_line
from reigen.launch.job_state import ProcessesSwept, ProcessExited, ProcessInstruction, SweepProcesses
from reigen.launch.payload import PayloadFile
from reigen.launch.supervision.host_processes import STREAMS, ProcessListener

#: Seconds that the client process may take to end when its output has ended.
_LAST_SECONDS = 2.0
#: Seconds between looks whether it has.
_LOOK_SECONDS = 0.005
#: Most lines that are kept of what an engine says about an agent.
_MAX_LINES = 16


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
        line: to the agent; from now on the client's to end.
        listener: gets the events of its ranks.
        silence_seconds: the connection is cut where no message comes for so long; may be changed later.

    Attributes:
        last_received_elsewhere: returns when the agent was last alive on another connection, by ``time.monotonic()``.
        phase: of the agent.
        refused: why it cannot take part, in its own words; or why the connection has ended.
        hello, ready, started, attached, facts, time_reply: its latest answers.
        superseded: another launcher has taken the place of this one.
        exit_code: of the line's own process, when it has ended.
        engine_problem: why the agent cannot come, or has ended, as its engine has said by itself.
    """

    def __init__(
        self,
        host: str,
        line: AgentLine,
        listener: AgentListener,
        silence_seconds: float,
    ) -> None:
        self.host, self.phase = host, AgentPhase.STARTING
        self.refused: agent_protocol.HostRefused | None = None
        self.hello: agent_protocol.AgentHello | None = None
        self.ready: agent_protocol.HostReady | None = None
        self.started: agent_protocol.ProcessesStarted | None = None
        self.attached: agent_protocol.AttachReply | None = None
        self.superseded: agent_protocol.Superseded | None = None
        self.facts: agent_protocol.HostFacts | None = None
        self.time_reply: agent_protocol.TimeReply | None = None
        self.exit_code: int | None = None
        self.engine_problem: HostProblem | None = None
        #: A rank's message and its payload, which is not complete.
        self._incoming: tuple[bytes, PayloadFile] | None = None
        self._listener = listener
        self.silence_seconds = silence_seconds
        self.last_received_elsewhere: Callable[[], float] = lambda: -math.inf
        self._paused: set[int] = set()
        #: Bytes that were taken while the stream was paused, by stream.
        self._credit = dict.fromkeys(STREAMS, 0)
        self._line = line
        #: As it is told with each start: a line masks one secret, and once.
        self._masked_secret = b""
        #: When the end of the line's own process is waited for no more; None: the line has not ended.
        self._ends_at: float | None = None
        self._output: deque[str] = deque(maxlen=_MAX_LINES)
        line.open(self._on_reply, self._on_end)
        self._last_received = self._turned_at = time.monotonic()
        self._next_keepalive = self._last_received

    @property
    def output(self) -> str:
        """Output on the way to the agent, and of the agent on stderr, where it comes here."""
        return "\n".join(filter(None, [self._line.output, *self._output]))

    def add_output(self, line: str) -> None:
        """Add a line that did not come through the agent's line, but from its engine."""
        self._output.append(line)

    def give_up(self, problem: HostProblem) -> None:
        """Wait no more for an agent that has not come; of one that has, remember why its engine says that it ended."""
        self.engine_problem = self.engine_problem or problem
        if self.phase is AgentPhase.STARTING:
            self._on_end(problem.what)

    def problem(self, starter: ExitExplainer, seconds: float) -> HostProblem:
        """Explain why its host cannot take part: it has refused, it has gone, or it has not come within ``seconds``."""
        if self.engine_problem is not None:
            return self.engine_problem
        if self.refused is None:
            words = f" ({last_line(self.output)})" if self.output else ""
            return HostProblem(self.host, f"it has not answered within {seconds:g} s{words}")
        if self.refused.reason:
            return HostProblem(self.host, self.refused.reason)
        return starter.explain_exit(self.host, self.exit_code, self.output)

    # ---------------------------------------------------------------- requests

    def send(self, request: AgentRequest) -> None:
        """Send a request that is not one of ``HostProcesses``."""
        self._line.send(request)

    @property
    def is_ending(self) -> bool:
        """Return whether the line has ended, and the exit code of its own process is still waited for."""
        return self._ends_at is not None and self.phase is not AgentPhase.GONE

    @property
    def is_busy(self) -> bool:
        """Return whether part of a request has not been written yet."""
        return self._line.has_pending

    def execute(self, instruction: ProcessInstruction) -> None:
        """Implement ``HostProcesses``; on a host that is lost, the agent ends everything by itself."""
        if self.phase is AgentPhase.GONE and isinstance(instruction, SweepProcesses):
            self._listener.swept(self)
        else:
            self._line.send(instruction)

    def pause(self, stream: int) -> None:
        """Implement ``HostProcesses``: give no credit."""
        self._paused.add(stream)

    def resume(self, stream: int) -> None:
        """Implement ``HostProcesses``: give the credit that is owed."""
        self._paused.discard(stream)
        self._give_credit(stream)

    def turn(self) -> float | None:
        """Send a KeepAlive when it is due; see whether the agent is alive, and end a client that outlives its host."""
        if self.phase is AgentPhase.GONE:
            return self._line.end_overdue()
        if self._ends_at is not None:
            self._end_if_possible("")
            return _LOOK_SECONDS
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
                self._line.send(agent_protocol.KeepAlive())
            self._next_keepalive = now + KEEPALIVE_SECONDS
        return max(0.0, min(self._next_keepalive, lost_at) - now)

    def mask(self, secret: bytes) -> bytes:
        """Return the job's secret, always the same, in the form in which it may travel to this agent."""
        if not self._masked_secret:
            self._masked_secret = self._line.mask(secret)
        return self._masked_secret

    def finish_agent(self) -> None:
        """Send no more: the agent has nothing more to do, and ends."""
        self._line.finish()

    def wait_end(self, seconds: float) -> None:
        """Wait so long for the end of the line's own process, unless it has ended."""
        if self.phase is not AgentPhase.GONE:
            self.exit_code = self._line.wait_end(seconds)

    def begin_close(self) -> None:
        """Begin to end the line, without waiting. May be called twice."""
        self._line.begin_close()

    def close(self) -> None:
        """End the line; the agent then kills its processes. May be called twice."""
        exit_code = self._line.close()
        self.exit_code = exit_code if self.exit_code is None else self.exit_code
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
            case agent_protocol.AttachReply():
                self.attached, self.phase = answer, AgentPhase.RUNNING
            case agent_protocol.Superseded():
                self.superseded = answer
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
            self._line.send(agent_protocol.OutputCredit(stream, self._credit[stream]))
            self._credit[stream] = 0

    def _on_end(self, reason: str) -> None:
        """End, at once where there is a reason, else when the line's own process has ended, for its exit code."""
        if self.phase is not AgentPhase.GONE and self._ends_at is None:
            self._ends_at = time.monotonic() + (0.0 if reason else _LAST_SECONDS)
            self._end_if_possible(reason)

    def _end_if_possible(self, reason: str) -> None:
        assert self._ends_at is not None, "its end has begun"
        if not self._line.has_ended and time.monotonic() < self._ends_at:
            return  # many hosts may be lost at once: `turn` looks again
        self.exit_code = self._line.wait_end(0.0)
        was, self.phase = self.phase, AgentPhase.GONE
        self._line.begin_close()
        if was is not AgentPhase.SWEPT:
            self.refused = self.refused or agent_protocol.HostRefused(reason)
            self._listener.stepped(self)
