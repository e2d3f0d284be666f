"""Segments: growth, sharing, shortage, and what is left of them."""

from __future__ import annotations

import errno
import gc
import os
import select
from pathlib import Path

import numpy as np
import pytest

from reigen.errors import SharedMemoryError
from reigen.net.shm_segment import PAGE_BYTES, ShmSegment, round_up
from reigen.resources import memory
from reigen.resources.memory import AvailableMemory, available_memory


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_a_range_is_zeroed_writable_and_shared() -> None:
    own = ShmSegment.create("test")
    assert own.grow(100, "a test") == 0
    other = ShmSegment.open(os.getpid(), own.fd)
    mine, theirs = own.map(0, PAGE_BYTES), other.map(0, PAGE_BYTES)
    assert not mine.any()
    mine[17] = 5
    assert theirs[17] == 5
    assert (own.inode, other.size) == (other.inode, PAGE_BYTES)
    own.close()
    other.close()


def test_growth_appends_whole_pages() -> None:
    own = ShmSegment.create("test")
    assert own.grow(1, "a") == 0
    assert own.grow(PAGE_BYTES + 1, "b") == PAGE_BYTES
    assert own.size == 3 * PAGE_BYTES == os.fstat(own.fd).st_size
    second = own.map(PAGE_BYTES, 2 * PAGE_BYTES)
    second[:] = 1
    assert not own.map(0, PAGE_BYTES).any()
    own.shrink(PAGE_BYTES)
    assert own.grow(1, "c") == PAGE_BYTES
    own.close()


def test_mappings_hold_no_descriptor_and_outlive_the_segment() -> None:
    before = descriptors()
    own = ShmSegment.create("test")
    own.grow(20 * PAGE_BYTES, "a test")
    maps = [own.map(i * PAGE_BYTES, PAGE_BYTES) for i in range(20)]
    assert descriptors() == before + 1
    own.close()
    own.close()
    assert descriptors() == before
    views = [m[10:20].view(np.uint8) for m in maps]
    del maps
    for view in views:
        view[:] = 3
    assert "/memfd:test" in Path("/proc/self/maps").read_text()
    del view, views
    gc.collect()
    assert "/memfd:test" not in Path("/proc/self/maps").read_text()


def test_memory_of_a_dead_process_stays_readable() -> None:
    ours, theirs = os.pipe()
    opened, tell_opened = os.pipe()
    child = os.fork()
    if not child:  # nothing but system calls and this module from here on
        own = ShmSegment.create("test")
        own.grow(PAGE_BYTES, "a test")
        own.map(0, PAGE_BYTES)[:4] = (1, 2, 3, 4)
        os.write(theirs, str(own.fd).encode())
        select.select([opened], [], [], 30)
        os._exit(0)
    peer = ShmSegment.open(child, int(os.read(ours, 20)))
    os.write(tell_opened, b".")
    assert os.waitpid(child, 0) == (child, 0)
    assert peer.map(0, PAGE_BYTES)[:4].tolist() == [1, 2, 3, 4]
    peer.close()
    for fd in (ours, theirs, opened, tell_opened):
        os.close(fd)


def test_a_segment_has_no_name_in_the_file_system() -> None:
    before = set(Path("/dev/shm").iterdir())
    own = ShmSegment.create("reigen-test-name")
    own.grow(PAGE_BYTES, "a test")
    assert not [p for p in set(Path("/dev/shm").iterdir()) - before if "reigen-test-name" in p.name]
    own.close()


def test_a_shortage_says_how_much_is_needed_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: AvailableMemory(100 << 20))
    own = ShmSegment.create("test")
    own.grow(PAGE_BYTES, "a test")
    words = r"for buckets \(4 rank\(s\).*: 128.0 MiB needed on this host, 100.0 MiB available, less 16.0 MiB"
    with pytest.raises(SharedMemoryError, match=words) as caught:
        own.grow(32 << 20, "buckets", sharers=4)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (128 << 20, 100 << 20)
    assert own.size == os.fstat(own.fd).st_size == PAGE_BYTES
    told = caught.value.of("weights")
    assert isinstance(told, SharedMemoryError)
    assert (told.tensor, told.needed_bytes, told.available_bytes) == ("weights", 128 << 20, 100 << 20)
    own.close()


def test_what_the_kernel_refuses_is_a_shortage_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes // 2)  # it may have come half way
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory, "available_memory", lambda: AvailableMemory(None))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    own = ShmSegment.create("test")
    with pytest.raises(SharedMemoryError, match=r"too much \(.*No space left on device\).* unknown available"):
        own.grow(1 << 20, "too much")
    assert own.size == os.fstat(own.fd).st_size == 0
    own.close()


def test_what_cannot_be_mapped_is_an_os_error() -> None:
    own = ShmSegment.create("test")
    with pytest.raises(OSError, match="cannot map 0 bytes"):
        own.map(0, 0)
    own.close()


def test_the_machine_says_what_it_has() -> None:
    available = available_memory().num_bytes
    assert available is not None
    assert 0 <= available < 1 << 50
    assert [round_up(n, 10) for n in (0, 1, 10, 11)] == [0, 10, 10, 20]
