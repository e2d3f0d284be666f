"""Memory of a voter as bytes, in two slots that are written by turns: one is whole whenever a writer dies. Pure.

A slot begins with its sequence number, the length of what it holds and a CRC-32 of all three. The next write goes to
the slot that is not the newest. Writers take turns: who takes over from a process must know that it is dead, and not
only stopped.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from reigen.cluster.membership.views.messages import MAX_VIEW_MESSAGE_BYTES
from reigen.cluster.membership.views.paxos import Acceptor
from reigen.errors import WireError
from reigen.net.codec import MessageCodec

NUM_SLOTS = 2
_HEADER = struct.Struct(">QII")
_NUMBERS = struct.Struct(">QI")
#: Two views, and what stands around them.
MAX_ACCEPTOR_BYTES = 2 * MAX_VIEW_MESSAGE_BYTES
_CODEC: MessageCodec[Acceptor] = MessageCodec(Acceptor, MAX_ACCEPTOR_BYTES)


class StoredAcceptor(msgspec.Struct, frozen=True):
    """Content of the newest slot.

    Attributes:
        sequence: number of the write; 0: none.
        acceptor: the voter's memory; None: nothing was ever written.
    """

    sequence: int = 0
    acceptor: Acceptor | None = None

    @property
    def next_slot(self) -> int:
        """Number of the slot to write to: not the one that this was read from."""
        return (self.sequence + 1) % NUM_SLOTS


def encode_slot(sequence: int, acceptor: Acceptor) -> bytes:
    """Return the bytes of a slot.

    Args:
        sequence: one more than that of the write before; the slot's number is the remainder by `NUM_SLOTS`.
        acceptor: what to remember.

    Raises:
        WireError: it is larger than `MAX_ACCEPTOR_BYTES`.
    """
    body = _CODEC.encode(acceptor)
    checksum = zlib.crc32(body, zlib.crc32(_NUMBERS.pack(sequence, len(body))))
    return _HEADER.pack(sequence, len(body), checksum) + body


def decode_slots(slots: Sequence[bytes | memoryview]) -> StoredAcceptor:
    """Return the newest whole slot; zeros hold nothing.

    Args:
        slots: all bytes of each, in order; behind what was written may be anything.

    Raises:
        WireError: no slot is whole, and not all of them are empty: what was promised is lost, and so is the vote.
    """
    found = [read for number, slot in enumerate(slots) if (read := _decode(number, slot)) is not None]
    if not found:
        if any(any(slot) for slot in slots):
            raise WireError("both slots of a voter are damaged; it must not vote before the next view")
        return StoredAcceptor()
    return max(found, key=lambda stored: stored.sequence)


def _decode(number: int, slot: bytes | memoryview) -> StoredAcceptor | None:
    """Return the content of one slot, None if it is not whole."""
    if len(slot) < _HEADER.size:
        return None
    sequence, length, checksum = _HEADER.unpack_from(slot)
    body = bytes(slot[_HEADER.size : _HEADER.size + length])
    if sequence == 0 or sequence % NUM_SLOTS != number or len(body) != length:
        return None
    if zlib.crc32(body, zlib.crc32(_NUMBERS.pack(sequence, length))) != checksum:
        return None
    try:
        return StoredAcceptor(sequence, _CODEC.decode(body))
    except WireError:
        return None
