"""A rank's shared memory: one anonymous file (memfd) that the other ranks of the host map too.

A memfd has no name: it is gone when its last user is, however that user ended, so a crash leaves nothing behind, and
the size of /dev/shm (64 MB in a plain container) does not limit it. Another process of the same user opens it through
``/proc/PID/fd/FD``; no other process can.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from reigen.errors import SharedMemoryError
from reigen.resources import memory
from reigen.resources.limits import explain_limit, file_size_limit_error, find_limit
from reigen.resources.memory import KEEP_FREE_BYTES, AvailableMemory

PAGE_BYTES = mmap.PAGESIZE
#: Memory is taken in pieces, with a look before each: of what is left then, such a part. So many processes may do that
#: at the same time, and know nothing of each other. Where little is left a piece is not smaller than that.
_PIECE_PART, _PIECE_BYTES = 64, 1 << 20
_MAP_FAILED = ctypes.c_void_p(-1).value


def round_up(nbytes: int, unit: int = PAGE_BYTES) -> int:
    """``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, ctypes.c_int)
    return libc


def _shared_memory_error(
    nbytes: int, available: AvailableMemory, what: str, where: str = "by this process"
) -> SharedMemoryError:
    left, limit = available.num_bytes, available.limit
    return SharedMemoryError.for_request(nbytes, left, what, limit, keep_free_bytes=KEEP_FREE_BYTES, where=where)


class _ShmMapping:
    """A mapping that ends with the last array over it. Python's own keeps a copy of the descriptor for each."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._unmap = _libc().munmap
        address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
        self._nbytes = 0 if address == _MAP_FAILED else nbytes
        if not self._nbytes:
            number = ctypes.get_errno()
            reason = explain_limit(OSError(number, os.strerror(number)), nbytes).strerror
            raise OSError(number, f"cannot map {nbytes} bytes of shared memory: {reason}")
        self._address = address
        # fewer page-table walks where the kernel allows huge pages; elsewhere it says no
        _libc().madvise(address, nbytes, mmap.MADV_HUGEPAGE)
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}

    def __del__(self) -> None:
        if self._nbytes:
            self._unmap(self._address, self._nbytes)


class ShmSegment:
    """A growable anonymous file and the mappings of it in this process.

    Mappings are never unmapped by hand: a NumPy or torch view keeps its mapping alive, and the last view to die
    releases it. ``close()`` only gives up the descriptor.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(fd)
        #: number of the file, the same in every process that has opened it
        self.inode = status.st_ino
        #: bytes that the file has; only the owner's copy is kept up to date by grow()
        self.size = status.st_size

    @classmethod
    def create(cls, name: str, *, only_grows: bool = False) -> ShmSegment:
        """A new, empty segment of this process.

        Args:
            name: for /proc/PID/maps alone.
            only_grows: no process, not even this one, can make it smaller: one that maps what is there can read it for
                ever, while a page that is cut off would end the reader (SIGBUS).

        Raises:
            OSError: the process has too many files open already.
        """
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise explain_limit(error) from None
        if only_grows:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(fd)

    @classmethod
    def open(cls, pid: int, fd: int) -> ShmSegment:
        """The segment that process ``pid`` holds as descriptor ``fd``."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    @property
    def only_grows(self) -> bool:
        """Return whether the segment is sealed against becoming smaller."""
        try:
            return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # a file of a kind that has no seals
            return False

    def grow(self, nbytes: int, what: str, *, sharers: int = 1) -> int:
        """Append ``nbytes`` zeroed bytes, already backed by memory, and return the offset at which they begin.

        Args:
            nbytes: how many, rounded up to whole pages.
            what: what they are for, told in the error.
            sharers: how many ranks of this host grow at the same time; all of it must fit.

        Raises:
            SharedMemoryError: the host, or a control group of this process, has not that much left, or a limit of
                this process does not allow for it; nothing was changed.
        """
        offset, nbytes = self.size, round_up(nbytes)
        available = memory.available_memory()
        if not available.allows(nbytes * sharers + KEEP_FREE_BYTES):
            if sharers > 1:
                raise _shared_memory_error(
                    nbytes * sharers, available, f"{what} ({sharers} rank(s) of this host)", "on this host"
                )
            raise _shared_memory_error(nbytes, available, what)
        try:
            if (refusal := file_size_limit_error(offset + nbytes)) is not None:
                raise refusal
            begin, end = offset, offset + nbytes
            while begin < end:
                if begin > offset and not (available := memory.available_memory()).allows(KEEP_FREE_BYTES):
                    raise _shared_memory_error(nbytes, available, f"{what} ({(begin - offset) >> 20} MiB were there)")
                left = nbytes if available.num_bytes is None else available.num_bytes // _PIECE_PART
                piece = min(end - begin, round_up(max(left, _PIECE_BYTES)))
                os.posix_fallocate(self.fd, begin, piece)
                begin += piece
        except (OSError, MemoryError, SharedMemoryError) as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, offset)
            if isinstance(error, SharedMemoryError):
                raise
            if isinstance(error, OSError) and (limit := find_limit(error)):
                raise SharedMemoryError.refused(nbytes, what, f"{error.strerror}: {limit}") from error
            text = f"{what} ({error})"  # whatever was to be kept free
            raise SharedMemoryError.for_request(nbytes, available.num_bytes, text, available.limit) from error
        self.size = offset + nbytes
        return offset

    def shrink(self, nbytes: int) -> None:
        """Give back everything beyond ``nbytes``, which no process may have mapped."""
        os.ftruncate(self.fd, nbytes)
        self.size = nbytes

    def map(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes ``[offset, offset + nbytes)`` as a writable uint8 array; ``offset`` is a multiple of the page size."""
        return np.asarray(_ShmMapping(self.fd, offset, nbytes))

    def close(self) -> None:
        """Give up the descriptor; mappings live on while something views them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
