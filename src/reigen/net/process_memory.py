"""Reading another process's memory: process_vm_readv(2), one copy instead of the two through shared memory.

The kernel allows it between processes of one user, unless a security module (Yama with ``ptrace_scope`` > 0, a
container's filter) says no: `can_read_process_memory` asks, once, and whoever wants to read does without where the
answer is no. Nothing is ever written to another process.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence

#: ``(address, bytes)``
AddressRange = tuple[int, int]

_MOST_RANGES = 1024  # IOV_MAX


@functools.cache
def _readv() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip
    return function


def read_process_memory(pid: int, ranges: Sequence[AddressRange], into: Sequence[AddressRange]) -> None:
    """Copy ranges of process ``pid``'s memory to ranges of this process's, each pair of one length.

    Both sides must stay valid for the whole call: who owns the other memory waits until it has been read.

    Raises:
        OSError: it is not allowed (EPERM), the process is gone (ESRCH), or has no such memory (EFAULT).
    """
    for begin in range(0, len(ranges), _MOST_RANGES):
        _read_batch(pid, ranges[begin : begin + _MOST_RANGES], into[begin : begin + _MOST_RANGES])


def _read_batch(pid: int, ranges: Sequence[AddressRange], into: Sequence[AddressRange]) -> None:
    readv = _readv()
    wanted = sum(nbytes for _, nbytes in ranges)
    while wanted:
        remote, local = _iovec_array(ranges), _iovec_array(into)
        count = readv(pid, local, len(into), remote, len(ranges), 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot read the memory of process {pid}: {os.strerror(number)}")
        wanted -= count
        if wanted:
            ranges, into = _skip_bytes(ranges, count), _skip_bytes(into, count)


def _iovec_array(ranges: Sequence[AddressRange]) -> ctypes.Array[ctypes.c_size_t]:
    """An array of iovec structures."""
    return (ctypes.c_size_t * (2 * len(ranges)))(*itertools.chain.from_iterable(ranges))


def _skip_bytes(ranges: Sequence[AddressRange], count: int) -> list[AddressRange]:
    """The ranges without their first ``count`` bytes."""
    rest: list[AddressRange] = []
    for address, nbytes in ranges:
        skipped = min(count, nbytes)
        count -= skipped
        if skipped < nbytes:
            rest.append((address + skipped, nbytes - skipped))
    return rest


def can_read_process_memory(pid: int, address: int, expected: bytes) -> bool:
    """Return whether this process may read process ``pid``'s memory: ``expected`` lies at ``address`` there."""
    found = ctypes.create_string_buffer(len(expected))
    try:
        read_process_memory(pid, [(address, len(expected))], [(ctypes.addressof(found), len(expected))])
    except (OSError, AttributeError):  # AttributeError: a libc without this call
        return False
    return found.raw == expected
