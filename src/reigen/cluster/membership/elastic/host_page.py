"""Notes of an agent for the processes of its host, and of these for the agent, in the memory of the host's voter.

The agent writes where the launcher's service is: another launcher may have taken the place of the first one. A process
writes that its program is done: there may be no launcher to tell. Both outlive who has written them.
"""

from __future__ import annotations

import os
import struct
import zlib

from reigen.errors import ArgumentError

#: Places in the first page; the voter's own number is in front.
_FINISHED_OFFSET, _ADDRESS_OFFSET = 512, 1024
_FINISHED = struct.Struct("=Q")
#: Length and CRC-32 of the address behind it.
_ADDRESS = struct.Struct("=II")
_MAX_ADDRESS_BYTES = 256


class HostPage:
    """First page of the memory of a host's voter. Any number of processes may use it.

    Args:
        descriptor: of the memory; stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def launcher(self) -> str:
        """Address of the launcher's service, ``host:port``; empty where none was written, or is being written."""
        data = os.pread(self._descriptor, _ADDRESS.size + _MAX_ADDRESS_BYTES, _ADDRESS_OFFSET)
        if len(data) < _ADDRESS.size:
            return ""
        length, checksum = _ADDRESS.unpack_from(data)
        text = data[_ADDRESS.size : _ADDRESS.size + length]
        return text.decode(errors="replace") if length <= _MAX_ADDRESS_BYTES and zlib.crc32(text) == checksum else ""

    def write_launcher(self, address: str) -> None:
        """Write the address of the launcher's service; raises ArgumentError if it is too long."""
        text = address.encode()
        if len(text) > _MAX_ADDRESS_BYTES:
            raise ArgumentError(f"an address has at most {_MAX_ADDRESS_BYTES} bytes, not {len(text)}")
        os.pwrite(self._descriptor, _ADDRESS.pack(len(text), zlib.crc32(text)) + text, _ADDRESS_OFFSET)

    @property
    def finished(self) -> int | None:
        """Slot of the latest process of this host whose program is done; None: there is none."""
        data = os.pread(self._descriptor, _FINISHED.size, _FINISHED_OFFSET)
        number = _FINISHED.unpack(data)[0] if len(data) == _FINISHED.size else 0
        return number - 1 if number else None

    def write_finished(self, slot: int) -> None:
        """Write that the program is done in the process of a slot."""
        os.pwrite(self._descriptor, _FINISHED.pack(slot + 1), _FINISHED_OFFSET)
