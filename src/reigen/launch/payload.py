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
from typing import NamedTuple

from reigen.errors import LaunchError, ReigenError
from reigen.resources import memory
from reigen.resources.limits import explain_limit
from reigen.resources.memory import KEEP_FREE_BYTES

#: Arguments of a command that stand for the descriptors' numbers, which differ from host to host.
PAYLOAD_PLACEHOLDER, CHANNEL_PLACEHOLDER = "@payload", "@channel"
#: First word of a command that stands for the Python in which a host's agent runs.
PYTHON_PLACEHOLDER = "@python"
PAYLOAD_CHUNK_BYTES = 1 << 20
#: Limit of a rank's message.
MAX_RANK_MESSAGE_BYTES = 1 << 14
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_INT = struct.Struct("@i")


class InheritedDescriptors(NamedTuple):
    """Descriptors that ranks inherit: they read the payload, and send messages through the channel."""

    payload: int
    channel: int

    def substitute(self, command: Sequence[str]) -> tuple[str, ...]:
        """Put the descriptors' numbers into ``command``."""
        numbers = {PAYLOAD_PLACEHOLDER: str(self.payload), CHANNEL_PLACEHOLDER: str(self.channel)}
        return tuple(numbers.get(argument, argument) for argument in command)


class PayloadFile:
    """Payload that comes in pieces; the user of the complete one closes ``descriptor``."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("reigen-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.num_bytes = 0

    def write(self, piece: bytes | memoryview) -> int:
        """Append a piece; returns its length. The available memory is looked at before a large one.

        Otherwise a shortage would end a process (the kernel kills one) instead of raising an error.

        Raises:
            LaunchError: this host, or a limit of this process, has no room for it.
        """
        view = memoryview(piece).cast("B")
        length = len(view)
        if length >= PAYLOAD_CHUNK_BYTES:
            available = memory.available_memory()
            if not available.allows(length + KEEP_FREE_BYTES):
                raise self.shortage_error(length, available)
        self.num_bytes += length
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            raise self.refused_error(str(explain_limit(error).strerror)) from error
        return length

    def shortage_error(self, length: int, available: memory.AvailableMemory) -> ReigenError:
        """Make the error for a piece of ``length`` bytes that the available memory does not allow."""
        mib, num_left = 1 << 20, available.num_bytes or 0
        limit = f" {available.limit}" if available.limit else ""
        return LaunchError(
            f"{socket.gethostname()} has not enough memory for a payload of more than {self.num_bytes} bytes: "
            f"{num_left / mib:.1f} MiB available{limit}, less {KEEP_FREE_BYTES / mib:.1f} MiB that are kept free"
        )

    def refused_error(self, reason: str) -> ReigenError:
        """Make the error for the kernel's refusal."""
        return LaunchError(f"{socket.gethostname()} cannot keep a payload of {self.num_bytes} bytes: {reason}")

    def seal(self) -> None:
        """Make the complete payload immutable."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)


class RankMessage(NamedTuple):
    """Message of a rank: its bytes, and the payload's descriptor, the receiver's to close, if one came with it."""

    text: bytes
    payload: int | None


def receive_rank_message(channel: socket.socket) -> RankMessage:
    """Receive the next message; an empty one where all other ends are closed.

    Raises:
        BlockingIOError: there is none now.
        OSError: this process has no descriptor left for the one that came with it.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC  # recv_fds() of some versions of Python drops its flags
    text, ancillary, received, _ = channel.recvmsg(MAX_RANK_MESSAGE_BYTES, socket.CMSG_LEN(_INT.size), flags)
    if received & socket.MSG_CTRUNC:
        raise OSError("too many open files: what a rank sent cannot be received")
    payloads = [_INT.unpack_from(data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
    return RankMessage(text, next(iter(payloads), None))
