"""Connections of this machine that are cut without a word."""

from __future__ import annotations

import ctypes
import socket
import struct

SO_ATTACH_FILTER = 26


def fall_silent(connection: socket.socket) -> None:
    """From now on nothing that is sent to this end reaches its kernel's TCP: no acknowledgement, no answer."""
    reject = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # classic BPF: return 0 bytes
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(reject))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
