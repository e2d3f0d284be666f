"""What the controller and the ranks of a benchmark say to each other.

One Unix socket per rank, in a directory that only this user can enter; JSON, one message a line.

a. The rank connects and sends Hello.
b. The controller sends Open; the rank makes the case ready, warms it up, checks its result and answers Spans of the
   warm-up.
c. The controller sends Turn to every rank of one mode; they operate and answer Spans. All other modes' ranks wait
   in recv meanwhile: they use no processor.
d. The controller sends Shut for each case. It closes the socket at the end: the rank leaves.
e. A rank that fails sends Failed and leaves.
"""

from __future__ import annotations

import socket

import msgspec

from benchmarks.harness.work import Case


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A rank is there."""

    rank: int
    pid: int
    versions: dict[str, str]


class Open(msgspec.Struct, tag="open", frozen=True):
    """Make a case ready under a key, and warm it up."""

    key: str
    case: Case
    warmup: int


class Turn(msgspec.Struct, tag="turn", frozen=True):
    """Operate so many times: ``settle`` times first that do not count."""

    key: str
    settle: int
    iterations: int


class Shut(msgspec.Struct, tag="shut", frozen=True):
    """The case is over."""

    key: str


class Spans(msgspec.Struct, tag="spans", frozen=True):
    """Begin and end of each operation, in seconds of CLOCK_MONOTONIC, which all processes of a host share."""

    spans: list[tuple[float, float]]


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """This rank cannot go on."""

    reason: str
    traceback: str


Command = Open | Turn | Shut
Answer = Hello | Spans | Failed

COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_ENCODER = msgspec.json.Encoder()
_CHUNK_BYTES = 1 << 16


class Line:
    """Messages, one a line, over a connected socket. A timeout of the socket applies to each wait for bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pending = b""

    def send(self, message: Command | Answer) -> None:
        """Send one message."""
        self.connection.sendall(_ENCODER.encode(message) + b"\n")

    def receive(self) -> bytes:
        """The next message.

        Raises:
            EOFError: the other end has closed.
            TimeoutError: the socket's timeout passed.
        """
        while b"\n" not in self._pending:
            try:
                chunk = self.connection.recv(_CHUNK_BYTES)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError("the other end has closed")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line
