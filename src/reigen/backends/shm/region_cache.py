"""Cache of registered memory that outlives the views of an elastic job: members that stay need no new pages.

Each view has a backend of its own. New memory for it would cost more than all else in the first step of a view: the
kernel clears every page, and each process that uses one finds it by a fault of its own.

a. In an elastic job each region of registered memory is a file of its own (a memfd). Its owner keeps it when the view's
   backend is gone, and so do other ranks that have mapped it: they recognize it by the number of the file.
b. An owner uses a region again when nothing in its process views it any more (`_Lease`), and all processes that have
   had it mapped take part in the allocation: they have given up the views before, so none of them writes to it. A
   process that was left out may have been stopped, and write when it wakes. What it has mapped is never used again.
c. What an allocation does not use again is dropped, and what a view cannot use is dropped when it is built.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.errors import SharedMemoryError
from reigen.net.shm_segment import ShmSegment, round_up

#: madvise(2): find all pages now, as writing to them would; since Linux 5.14.
_MADV_POPULATE_WRITE = 23
#: A region is used again for one that is smaller by this factor at most.
_MOST_WASTE = 2


class _Lease:
    """Owner of a mapping's arrays in NumPy's eyes: it is gone when no array, and no view of one, is there any more."""

    __slots__ = ("__array_interface__", "__weakref__", "_mapping")

    def __init__(self, mapping: NDArray[np.uint8]) -> None:
        self._mapping = mapping
        self.__array_interface__: dict[str, Any] = mapping.__array_interface__


@dataclass(slots=True)
class _Mapping:
    """Mapping of a region.

    Attributes:
        pid: of the region's owner.
        array: all of it.
        lease: of the arrays that were given out last; None: none were.
    """

    pid: int
    array: NDArray[np.uint8]
    lease: weakref.ref[_Lease] | None = None

    @property
    def is_viewed(self) -> bool:
        """Return whether something views it."""
        return self.lease is not None and self.lease() is not None

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return its beginning, and notice by the array when it is not needed any more."""
        lease = _Lease(self.array)
        self.lease = weakref.ref(lease)
        return np.asarray(lease)[:nbytes]


@dataclass(slots=True)
class OwnRegion:
    """Region of this process.

    Attributes:
        segment: its file.
        mapping: of it, here.
        pids: processes that have had it mapped, and this one.
    """

    segment: ShmSegment
    mapping: _Mapping
    pids: frozenset[int]


class RegionCache:
    """Regions of this process, and its mappings of those of other ranks of its host. For any thread.

    Args:
        pid: of this process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._own: list[OwnRegion] = []
        #: by number of the file
        self._others: dict[int, _Mapping] = {}

    def find(self, nbytes: int, pids: Collection[int]) -> OwnRegion | None:
        """Return a region that is used again by these processes for ``nbytes``, if there is one; see (b)."""
        with self._lock:
            fitting = [
                each
                for each in self._own
                if nbytes <= each.segment.size <= _MOST_WASTE * round_up(nbytes)
                and not each.mapping.is_viewed
                and each.pids <= set(pids)
            ]
            found = min(fitting, key=lambda each: each.segment.size, default=None)
            self._drop_own(lambda each: each is not found and not each.mapping.is_viewed)
            return found

    def create(self, nbytes: int, what: str) -> OwnRegion:
        """Make a region of this process, whose pages are all there.

        Args:
            nbytes: its size, which is rounded up.
            what: it is for, told in the error.

        Raises:
            SharedMemoryError: there is not so much memory.
            OSError: there are too many open files.
        """
        segment = ShmSegment.create("reigen-region")
        try:
            segment.grow(nbytes, what)
            array = segment.map(0, segment.size)
        except BaseException:
            segment.close()
            raise
        _populate(array)
        region = OwnRegion(segment, _Mapping(self._pid, array), frozenset({self._pid}))
        with self._lock:
            self._own.append(region)
        return region

    def map_own(self, region: OwnRegion, nbytes: int, pids: Collection[int]) -> NDArray[np.uint8]:
        """Return the memory of a region that these processes use from now on."""
        with self._lock:
            region.pids |= set(pids)
            return region.mapping.view(nbytes)

    def map_other(self, pid: int, fd: int, inode: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the memory of another process's region, which it holds as descriptor ``fd``.

        Raises:
            OSError: it cannot be opened; the process has died, say.
        """
        with self._lock:
            found = self._others.get(inode)
            if found is None or found.pid != pid or found.array.size < nbytes:
                segment = ShmSegment.open(pid, fd)
                try:
                    if segment.inode != inode:
                        raise ProcessLookupError(f"process {pid} has closed its shared memory")
                    found = self._others[inode] = _Mapping(pid, segment.map(0, segment.size))
                finally:
                    segment.close()
            return found.view(nbytes)

    def drop_unused(self) -> None:
        """Drop mappings of other processes' regions that nothing views: an allocation has not used them again."""
        with self._lock:
            self._others = {inode: each for inode, each in self._others.items() if each.is_viewed}

    def enter_view(self, pids: Collection[int]) -> None:
        """Drop all regions and mappings that are of no use to a view with these processes on this host."""
        with self._lock:
            self._drop_own(lambda each: not each.pids <= set(pids))
            self._others = {inode: each for inode, each in self._others.items() if each.pid in pids}

    def close(self) -> None:
        """Drop everything; arrays stay valid."""
        with self._lock:
            self._drop_own(lambda _: True)
            self._others.clear()

    def _drop_own(self, is_dropped: Callable[[OwnRegion], bool]) -> None:
        kept: list[OwnRegion] = []
        for region in self._own:
            if is_dropped(region):
                region.segment.close()
            else:
                kept.append(region)
        self._own = kept


@functools.cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _populate(array: NDArray[np.uint8]) -> None:
    """Find all pages of a mapping at once, which takes half of the time that as many faults take; or do nothing."""
    _madvise()(array.ctypes.data, round_up(array.nbytes, mmap.PAGESIZE), _MADV_POPULATE_WRITE)


def reserve_region(cache: RegionCache, nbytes: int) -> None:
    """Make a region ahead of its use, if there is memory for it."""
    try:
        cache.create(nbytes, "registered memory (gradient buckets)")
    except (SharedMemoryError, OSError):
        return  # whoever needs it says so
