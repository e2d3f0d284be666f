"""What ranks bring along and send home when a function is run, not a command (`reigen.runner`).

On the launcher's host the ranks inherit two descriptors: a *parcel*, a sealed file without a name that they read, and a
*line*, a socket (SOCK_SEQPACKET) through which they send letters, perhaps with another parcel. On another host the
agent makes both anew: the parcel comes to it in pieces, and what its ranks send goes to the launcher's line in the same
order, in pieces, too. Nothing here looks into parcels or letters.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from reigen.errors import LaunchError
from reigen.resources.limits import explain_limit
from reigen.resources.memory import KEEP_FREE_BYTES, available_memory

#: Words of a command that stand for the descriptors' numbers, which differ from host to host.
PAYLOAD_PLACEHOLDER, CHANNEL_PLACEHOLDER = "@parcel", "@line"
PAYLOAD_CHUNK_BYTES = 1 << 20
#: The longest message of a rank.
MAX_RANK_MESSAGE_BYTES = 1 << 14
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_INT = struct.Struct("@i")


@dataclass(frozen=True, slots=True)
class InheritedDescriptors:
    """The descriptors that ranks inherit.

    Attributes:
        parcel: what they read.
        line: where they send letters.
    """

    parcel: int
    line: int

    @property
    def descriptors(self) -> tuple[int, int]:
        """Both."""
        return self.parcel, self.line

    def substitute(self, command: Sequence[str]) -> tuple[str, ...]:
        """``command`` with the descriptors' numbers in it."""
        numbers = {PAYLOAD_PLACEHOLDER: str(self.parcel), CHANNEL_PLACEHOLDER: str(self.line)}
        return tuple(numbers.get(word, word) for word in command)


class PayloadFile:
    """A parcel that comes in pieces.

    Attributes:
        descriptor: of the file; who takes it when it is complete owns it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("reigen-parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.num_bytes = 0

    def write(self, piece: bytes) -> None:
        """Append a piece.

        Raises:
            LaunchError: this machine, or a limit of this process, has no room for it.
        """
        available = available_memory()
        if not available.allows(len(piece) + KEEP_FREE_BYTES):
            mib, left = 1 << 20, available.num_bytes or 0
            limit = f" {available.limit}" if available.limit else ""
            raise LaunchError(
                f"{socket.gethostname()} has not enough memory for a parcel of more than {self.num_bytes} bytes: "
                f"{left / mib:.1f} MiB available{limit}, less {KEEP_FREE_BYTES / mib:.1f} MiB that are kept free"
            )
        self.num_bytes += len(piece)
        view = memoryview(piece)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            reason = explain_limit(error).strerror
            raise LaunchError(
                f"{socket.gethostname()} cannot keep a parcel of {self.num_bytes} bytes: {reason}"
            ) from error

    def seal(self) -> None:
        """It is complete: nobody can change it any more."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)


@dataclass(frozen=True, slots=True)
class RankMessage:
    """What a rank has sent.

    Attributes:
        text: its bytes.
        parcel: the descriptor that came with it, the receiver's to close; None: none did.
    """

    text: bytes
    parcel: int | None


def receive_rank_message(line: socket.socket) -> RankMessage | None:
    """The next message; None if there is none now.

    Raises:
        OSError: this process has no descriptor left for what came with it.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        text, ancillary, received, _ = line.recvmsg(MAX_RANK_MESSAGE_BYTES, socket.CMSG_LEN(_INT.size), flags)
    except BlockingIOError:
        return None
    if received & socket.MSG_CTRUNC:
        raise OSError("too many open files: what a rank sent cannot be received")
    parcels = [_INT.unpack_from(data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
    return RankMessage(text, next(iter(parcels), None)) if text else None
