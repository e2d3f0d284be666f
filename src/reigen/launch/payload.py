"""Payload and messages of ranks when a function is run, not a command (`reigen.runner`).

On the launcher's host the ranks inherit two descriptors: a *payload*, a sealed file without a name to read, and a
*channel*, a socket (SOCK_SEQPACKET) through which they send messages, perhaps with another payload. On another host the
agent makes both anew: the payload comes to it in pieces, and its ranks' messages go to the launcher's channel in the
same order, in pieces, too. Neither payloads nor messages are parsed here.
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

#: Arguments of a command that stand for the descriptors' numbers, which differ from host to host.
PAYLOAD_PLACEHOLDER, CHANNEL_PLACEHOLDER = "@payload", "@channel"
PAYLOAD_CHUNK_BYTES = 1 << 20
#: Limit of a rank's message.
MAX_RANK_MESSAGE_BYTES = 1 << 14
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_INT = struct.Struct("@i")


@dataclass(frozen=True, slots=True)
class InheritedDescriptors:
    """Descriptors that ranks inherit: they read the payload, and send messages through the channel."""

    payload: int
    channel: int

    @property
    def descriptors(self) -> tuple[int, int]:
        """Payload and channel."""
        return self.payload, self.channel

    def substitute(self, command: Sequence[str]) -> tuple[str, ...]:
        """Put the descriptors' numbers into ``command``."""
        numbers = {PAYLOAD_PLACEHOLDER: str(self.payload), CHANNEL_PLACEHOLDER: str(self.channel)}
        return tuple(numbers.get(argument, argument) for argument in command)


class PayloadFile:
    """Payload that comes in pieces; the user of the complete one closes ``descriptor``."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("reigen-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.num_bytes = 0

    def write(self, piece: bytes) -> None:
        """Append a piece; raises LaunchError where this host, or a limit of this process, has no room for it."""
        available = available_memory()
        if not available.allows(len(piece) + KEEP_FREE_BYTES):
            mib, num_left = 1 << 20, available.num_bytes or 0
            limit = f" {available.limit}" if available.limit else ""
            raise LaunchError(
                f"{socket.gethostname()} has not enough memory for a payload of more than {self.num_bytes} bytes: "
                f"{num_left / mib:.1f} MiB available{limit}, less {KEEP_FREE_BYTES / mib:.1f} MiB that are kept free"
            )
        self.num_bytes += len(piece)
        view = memoryview(piece)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            reason = explain_limit(error).strerror
            raise LaunchError(
                f"{socket.gethostname()} cannot keep a payload of {self.num_bytes} bytes: {reason}"
            ) from error

    def seal(self) -> None:
        """Make the complete payload immutable."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)


@dataclass(frozen=True, slots=True)
class RankMessage:
    """Message of a rank: its bytes, and the payload's descriptor, the receiver's to close, if one came with it."""

    text: bytes
    payload: int | None


def receive_rank_message(channel: socket.socket) -> RankMessage | None:
    """Receive the next message; None if there is none now.

    Raises:
        OSError: this process has no descriptor left for the one that came with it.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        text, ancillary, received, _ = channel.recvmsg(MAX_RANK_MESSAGE_BYTES, socket.CMSG_LEN(_INT.size), flags)
    except BlockingIOError:
        return None
    if received & socket.MSG_CTRUNC:
        raise OSError("too many open files: what a rank sent cannot be received")
    payloads = [_INT.unpack_from(data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
    return RankMessage(text, next(iter(payloads), None)) if text else None
