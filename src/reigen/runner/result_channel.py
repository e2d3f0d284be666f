"""Channel from the processes of one `reigen.run` to the caller.

One pair of sockets (SOCK_SEQPACKET): the caller holds one end, the launcher and all ranks inherit the other. It has no
name, so nobody else can reach it. Messages stay whole and arrive in the order in which they were sent, whoever sent
them: that order tells who failed first. What a rank returned or raised is too large for a message and travels beside
it, as the descriptor of a sealed, nameless file (``runner.serialization``).

a. A rank sends Report when the function has returned or raised, before its process begins to end.
b. The launcher sends ProcessExited for each rank, before it decides what follows from that.
c. The launcher sends Ended when nothing of the job is left; or Complaint where it could not do its part.
d. The caller sends nothing: it stops a job by a signal to the launcher.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Self

import msgspec

from reigen.launch.job_state import JobMessage, ProcessExited
from reigen.net.codec import MessageCodec

#: The longest complaint fits; the kernel's buffer takes several.
_MAX_MESSAGE_BYTES = 1 << 14
_MAX_TEXT = 4000
_INT = struct.Struct("@i")


class RankReport(JobMessage, tag=1, frozen=True):
    """The function has ended in one rank. Its parcel comes with it.

    Attributes:
        rank: whose.
        failed: it raised; the parcel holds the exception.
        is_victim: it raised because another rank had gone.
        exit_code: what the process is going to exit with; of ``sys.exit``, what it was asked to.
        text: the last line of the traceback; or empty.
    """

    rank: int
    failed: bool = False
    is_victim: bool = False
    exit_code: int = 0
    text: str = ""


class LauncherFinished(JobMessage, tag=3, frozen=True):
    """Report that nothing of the job is left; ``signum`` is the signal that stopped the launcher, or None."""

    signum: int | None


class LauncherComplaint(JobMessage, tag=4, frozen=True):
    """The launcher, in words."""

    text: str


ResultMessage = RankReport | ProcessExited | LauncherFinished | LauncherComplaint

_MESSAGES: MessageCodec[ResultMessage] = MessageCodec(ResultMessage, _MAX_MESSAGE_BYTES)


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message, and the descriptor that came with it, which is the receiver's to close."""

    message: ResultMessage
    descriptor: int | None


class ResultChannel:
    """One end of the pair. A context manager.

    Args:
        descriptor: an open socket, which the line now owns.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)

    @classmethod
    def pair(cls) -> tuple[ResultChannel, ResultChannel]:
        """Two ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one.detach()), cls(other.detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor; readable when a message or the end is there."""
        return self._socket.fileno()

    def send(self, message: ResultMessage, descriptor: int | None = None) -> None:
        """Say something; the descriptor is copied and stays the sender's.

        Raises:
            OSError: the other end is closed.
        """
        if isinstance(message, LauncherComplaint):
            message = LauncherComplaint(message.text[:_MAX_TEXT])
        elif isinstance(message, RankReport):
            message = msgspec.structs.replace(message, text=message.text[:_MAX_TEXT])
        descriptors = [] if descriptor is None else [descriptor]
        socket.send_fds(self._socket, [_MESSAGES.encode(message)], descriptors)

    def receive(self) -> ReceivedMessage | None:
        """The next message; None when all other ends are closed.

        Raises:
            BlockingIOError: there is none now.
            OSError: this process has no descriptor left for what came with it.
        """
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC  # recv_fds() of some versions of Python drops its flags
        data, ancillary, received, _ = self._socket.recvmsg(_MAX_MESSAGE_BYTES, socket.CMSG_LEN(_INT.size), flags)
        if not data:
            return None
        if received & socket.MSG_CTRUNC:
            raise OSError("too many open files: what a rank sent cannot be received")
        descriptors = [_INT.unpack_from(payload)[0] for _, kind, payload in ancillary if kind == socket.SCM_RIGHTS]
        return ReceivedMessage(_MESSAGES.decode(data), next(iter(descriptors), None))

    def close(self) -> None:
        """Say no more. May be called twice."""
        self._socket.close()
