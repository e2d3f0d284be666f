"""Channel from the processes of one `reigen.run` to the caller.

One pair of sockets (SOCK_SEQPACKET): the caller holds one end, the launcher and all ranks inherit the other. It has no
name, so nobody else can reach it. Messages stay whole and arrive in the order in which they were sent, whoever sent
them: that order tells who failed first. What a rank returned or raised is too large for a message and travels beside
it, as the descriptor of a sealed, nameless file (``runner.serialization``).

a. A rank sends RankReport when the function has returned or raised, before its process begins to end.
   Before that it may send RankNote, as often as it likes (``runner.calls.send_note``).
b. The launcher sends ProcessExited for each rank, before it decides what follows from that.
c. The launcher sends LauncherFinished when nothing of the job is left; LauncherComplaint where it cannot do its part.
d. The caller sends nothing: it stops a job by a signal to the launcher.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

import msgspec

from reigen.launch.job_state import JobMessage, ProcessExited
from reigen.launch.payload import MAX_RANK_MESSAGE_BYTES, receive_rank_message
from reigen.net.codec import MessageCodec

#: In UTF-8 the longest complaint fits into a message; the kernel's buffer takes several.
_MAX_TEXT = 4000


class RankReport(JobMessage, tag=1, frozen=True):
    """The function has ended in one rank. A payload comes with it.

    Attributes:
        rank: whose; of an elastic job: of which slot.
        failed: it raised; the payload holds the exception.
        is_victim: it raised because another rank had gone.
        exit_code: what the process is going to exit with; of ``sys.exit``, what it was asked to.
        text: the last line of the traceback; or empty.
    """

    rank: int
    failed: bool = False
    is_victim: bool = False
    exit_code: int = 0
    text: str = ""


class RankNote(JobMessage, tag=5, frozen=True):
    """Value that a function has sent while it runs; it is the payload that comes with this."""

    rank: int


class LauncherFinished(JobMessage, tag=3, frozen=True):
    """Report that nothing of the job is left.

    Attributes:
        signum: the signal that stopped the launcher, or None.
        slots: of an elastic job's last view, by rank; None: the job was not elastic.
        exit_code: of an elastic job.
        failed_slot: whose failure ended it, if any.
        cause: the kernel's part in that.
        server_failure: description of the server's, or scheduler's, failure that ended the job; else empty.
    """

    signum: int | None
    slots: tuple[int, ...] | None = None
    exit_code: int = 0
    failed_slot: int | None = None
    cause: str = ""
    server_failure: str = ""


class LauncherComplaint(JobMessage, tag=4, frozen=True):
    """The launcher, in words."""

    text: str


ResultMessage = RankReport | RankNote | ProcessExited | LauncherFinished | LauncherComplaint

_MESSAGES: MessageCodec[ResultMessage] = MessageCodec(ResultMessage, MAX_RANK_MESSAGE_BYTES)


class ReceivedMessage(NamedTuple):
    """A message, and the descriptor that came with it, which is the receiver's to close."""

    message: ResultMessage
    descriptor: int | None


class ResultChannel(socket.socket):
    """One end of the pair; the socket ``descriptor`` is the channel's from now on."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self.set_inheritable(False)

    @classmethod
    def pair(cls) -> tuple[ResultChannel, ResultChannel]:
        """Make both ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one.detach()), cls(other.detach())

    def post(self, message: ResultMessage, descriptor: int | None = None) -> None:
        """Send a message; the descriptor is copied and stays the sender's.

        Raises:
            OSError: the other end is closed.
        """
        if isinstance(message, LauncherComplaint | RankReport):
            message = msgspec.structs.replace(message, text=message.text[:_MAX_TEXT])
        elif isinstance(message, LauncherFinished):
            message = msgspec.structs.replace(message, server_failure=message.server_failure[:_MAX_TEXT])
        socket.send_fds(self, [_MESSAGES.encode(message)], [] if descriptor is None else [descriptor])

    def receive(self) -> ReceivedMessage | None:
        """Receive the next message; None when all other ends are closed.

        Raises:
            BlockingIOError: there is none now.
            OSError: this process has no descriptor left for what came with it.
        """
        data, descriptor = receive_rank_message(self)
        return ReceivedMessage(_MESSAGES.decode(data), descriptor) if data else None
