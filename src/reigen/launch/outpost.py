"""The launcher's end of the conversation with its agent on one host: an ssh process and the frames through it."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum, auto
from typing import Protocol

from reigen.errors import LaunchError
from reigen.launch import orders
from reigen.launch.crew import STREAMS, Audience
from reigen.launch.frames import Pipes
from reigen.launch.loop import Loop
from reigen.launch.luggage import Incoming
from reigen.launch.orders import ANSWERS, BEAT_SECONDS, ORDERS, Answer, Order, Preface
from reigen.launch.processes import dies_with_parent

_STDERR_BYTES = 1 << 14
#: How long ssh may take to end when its output has ended.
_LAST_SECONDS = 2.0


class Step(IntEnum):
    """How far the agent has come."""

    CALLED = auto()
    HERE = auto()
    READY = auto()
    RUNNING = auto()
    SWEPT = auto()
    GONE = auto()


class Principal(Audience, Protocol):
    """Who is told what happens to the ranks of another host."""

    def letter(self, text: bytes, parcel: int | None) -> None:
        """A rank has sent this home; the parcel's descriptor is the outpost's to close."""

    def stepped(self, outpost: Outpost) -> None:
        """The agent has come further, has answered, or has gone: the outpost's attributes say how."""


class Outpost:
    """One host's agent; a ``Crew``.

    Args:
        host: its name.
        command: the ssh that starts the agent there.
        loop: waits for it.
        principal: is told.
        silence_seconds: without any message for so long, the connection is cut.

    Attributes:
        step: how far the agent has come.
        refused: why it cannot take part, in its own words; or why the conversation has ended.
        hello, ready, started, facts, pong: what it has answered last.
        exit_code: ssh's, when it has ended.

    Raises:
        LaunchError: there is no ssh.
    """

    def __init__(
        self, host: str, command: Sequence[str], loop: Loop, principal: Principal, silence_seconds: float
    ) -> None:
        self.host, self.step = host, Step.CALLED
        self.refused: orders.Refused | None = None
        self.hello: orders.Hello | None = None
        self.ready: orders.Ready | None = None
        self.started: orders.Started | None = None
        self.facts: orders.Facts | None = None
        self.pong: orders.Pong | None = None
        self.exit_code: int | None = None
        self._letter: orders.Letter | None = None
        self._incoming: Incoming | None = None
        self._loop, self._principal = loop, principal
        self._silence_seconds = silence_seconds
        self._preface = Preface()
        self._stderr: deque[bytes] = deque(maxlen=64)
        self._paused: set[int] = set()
        #: Bytes that were taken while the stream was paused, by stream.
        self._owed = dict.fromkeys(STREAMS, 0)
        self._process = _start(command)
        self._pipes: Pipes[Order, Answer] = Pipes(
            loop, self._descriptors(), (ORDERS, ANSWERS), self._hear, self._on_end, self._preface
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
        """The ssh process."""
        return self._process.pid

    @property
    def said(self) -> str:
        """What ssh, and whatever ran there, has said on stderr, and before the agent's greeting."""
        return (self._preface.noise + "\n" + b"".join(self._stderr).decode(errors="replace")).strip()

    # ---------------------------------------------------------------- orders

    def send(self, order: Order) -> None:
        """Have the agent do something that ``Crew`` does not speak of."""
        self._pipes.send(order)

    @property
    def is_busy(self) -> bool:
        """Whether something that was sent has not left yet."""
        return self._pipes.has_pending

    def restart(self, number: int, attempt: int) -> None:
        """As ``Crew``."""
        self._pipes.send(orders.Restart(number, attempt))

    def terminate(self, ranks: Sequence[int]) -> None:
        """As ``Crew``."""
        self._pipes.send(orders.Terminate(tuple(ranks)))

    def kill(self, ranks: Sequence[int]) -> None:
        """As ``Crew``."""
        self._pipes.send(orders.Kill(tuple(ranks)))

    def sweep(self) -> None:
        """As ``Crew``. Of a host that is lost, nobody can know; its agent ends everything there."""
        if self.step is Step.GONE:
            self._principal.swept(self)
        else:
            self._pipes.send(orders.Sweep())

    def pause(self, stream: int) -> None:
        """As ``Crew``: give no credit."""
        self._paused.add(stream)

    def resume(self, stream: int) -> None:
        """As ``Crew``: give what is owed."""
        self._paused.discard(stream)
        self._pay(stream)

    def turn(self) -> float | None:
        """Say that the launcher is alive; see whether the agent is."""
        if self.step is Step.GONE:
            return None
        now, before = time.monotonic(), self._turned_at
        self._turned_at = now
        if now - before > 2 * BEAT_SECONDS:  # this process did not run: what came meanwhile is still to be read
            self._heard_at = now
        if self.step is not Step.CALLED and now - self._heard_at > self._silence_seconds:
            self._on_end(f"nothing has been heard of it for {self._silence_seconds:g} s")
            return None
        if now >= self._beat_at:
            if self.step is not Step.CALLED:
                self._pipes.send(orders.Beat())
            self._beat_at = now + BEAT_SECONDS
        return self._beat_at - now

    def dismiss(self) -> None:
        """The agent has nothing more to do: it ends when it reads the end of its stdin."""
        self._pipes.finish()

    def close(self) -> None:
        """End ssh; the agent kills what there is when it has gone. May be called twice."""
        self._pipes.close()
        if self._process.returncode is None:
            self._process.kill()
            self.exit_code = self._process.wait()
        if self._process.stderr is not None and not self._process.stderr.closed:
            self._loop.unwatch(self._process.stderr)
            self._process.stderr.close()
        self.step = Step.GONE

    # ---------------------------------------------------------------- answers

    def _hear(self, answer: Answer) -> None:
        self._heard_at = time.monotonic()
        match answer:
            case orders.Printed(rank, stream, data):
                self._principal.printed(rank, stream, data)
                self._owed[stream] += len(data)
                if stream not in self._paused:
                    self._pay(stream)
            case orders.Closed(rank, stream):
                self._principal.closed(rank, stream)
            case orders.Exited(rank, exit_code):
                self._principal.exited(rank, exit_code)
            case orders.Swept():
                self.step = Step.SWEPT
                self._principal.swept(self)
            case orders.Letter(text, None):
                self._principal.letter(text, None)
            case orders.Letter():
                self._letter, self._incoming = answer, Incoming()
            case orders.Piece():
                self._take(answer)
            case orders.Beat():
                pass
            case _:
                self._advance(answer)

    def _advance(self, answer: Answer) -> None:
        match answer:
            case orders.Facts():
                self.facts = answer
            case orders.Pong():
                self.pong = answer
            case orders.Hello():
                self.hello, self.step = answer, Step.HERE
            case orders.Ready():
                self.ready, self.step = answer, Step.READY
            case orders.Started():
                self.started, self.step = answer, Step.RUNNING
            case orders.Refused():
                self.refused = answer
        self._principal.stepped(self)

    def _take(self, piece: orders.Piece) -> None:
        """A part of the parcel that comes with a letter."""
        assert self._incoming is not None, "a letter comes first"
        assert self._letter is not None, "a letter comes first"
        self._incoming.write(piece.data)
        if piece.is_last:
            parcel = self._incoming
            parcel.seal()
            self._principal.letter(self._letter.text, parcel.descriptor)
            os.close(parcel.descriptor)
            self._letter = self._incoming = None

    def _pay(self, stream: int) -> None:
        if self._owed[stream]:
            self._pipes.send(orders.Credit(stream, self._owed[stream]))
            self._owed[stream] = 0

    def _on_end(self, reason: str) -> None:
        if self.step is Step.GONE:
            return
        was = self.step
        with suppress(subprocess.TimeoutExpired):
            self.exit_code = self._process.wait(0.0 if reason else _LAST_SECONDS)
        self._read_stderr()
        self.close()
        if was is not Step.SWEPT:
            self.refused = self.refused or orders.Refused(reason)
            self._principal.stepped(self)

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


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C at a terminal is the launcher's to hear
            preexec_fn=dies_with_parent(),  # noqa: PLW1509  there is no other thread
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from None
