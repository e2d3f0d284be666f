"""Registered memory that is used again in a later view of an elastic job, and when it must not be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reigen.backends.shm import region_cache
from reigen.backends.shm.region_cache import OwnRegion, RegionCache, reserve_region
from reigen.errors import SharedMemoryError

ME, OTHER, NEWCOMER = os.getpid(), 1_000_001, 1_000_002
SIZE = 5 << 12


@pytest.fixture
def cache() -> Iterator[RegionCache]:
    cache = RegionCache(ME)
    yield cache
    cache.close()


def use(cache: RegionCache, pids: set[int], size: int = SIZE) -> OwnRegion:
    """Use a region as a view with these processes does, to its end."""
    region = cache.find(size, pids) or cache.create(size, "buckets")
    array = cache.map_own(region, size, pids)
    assert array.size == size
    array[:] = 7
    del array
    return region


def test_a_region_is_used_again_where_all_are_there_who_had_it_mapped(cache: RegionCache) -> None:
    first = use(cache, {ME, OTHER})
    cache.enter_view({ME, OTHER, NEWCOMER})
    assert use(cache, {ME, OTHER, NEWCOMER}) is first
    assert use(cache, {ME, OTHER, NEWCOMER}) is first
    assert cache.find(SIZE, {ME, OTHER}) is None, "the newcomer has it mapped, too"


def test_who_was_left_out_shares_no_memory_with_later_views(cache: RegionCache) -> None:
    first = use(cache, {ME, OTHER})
    cache.enter_view({ME, NEWCOMER})
    assert first.segment.fd == -1
    cache.enter_view({ME, OTHER})  # back, perhaps: what was dropped stays dropped
    assert use(cache, {ME, OTHER}) is not first


def test_a_region_that_something_views_is_not_used_again(cache: RegionCache) -> None:
    region = cache.create(SIZE, "buckets")
    gradient = cache.map_own(region, SIZE, {ME})[64:128].view("f4")
    gradient[:] = 0.5
    assert cache.find(SIZE, {ME}) is None
    other = use(cache, {ME})
    assert other is not region
    cache.close()
    assert gradient.tolist() == [0.5] * 16, "what is viewed stays"


@pytest.mark.parametrize(
    ("size", "is_used"), [(SIZE, True), (SIZE // 2, True), (SIZE // 2 - 4096, False), (SIZE + 1, False)]
)
def test_a_region_of_a_similar_size_is_used_again(cache: RegionCache, size: int, is_used: bool) -> None:
    first = use(cache, {ME})
    assert (use(cache, {ME}, size) is first) == is_used
    assert (first.segment.fd == -1) != is_used, "what is not used again is given up"


def test_mappings_of_others_are_recognized_and_given_up(cache: RegionCache) -> None:
    """The other process is this one, by another cache."""
    owner = RegionCache(ME)
    region = owner.create(SIZE, "buckets")
    place = (ME, region.segment.fd, region.segment.inode, SIZE)
    owner.map_own(region, SIZE, {ME})[:] = 3
    array = cache.map_other(*place)
    address = array.ctypes.data
    assert array.tolist() == [3] * SIZE
    cache.drop_unused()
    again = cache.map_other(*place)
    assert again.ctypes.data == address, "it is mapped once"
    del array
    cache.drop_unused()
    assert again[0] == 3
    del again
    cache.drop_unused()
    assert not cache._others
    cache.map_other(*place)
    cache.enter_view({OTHER})
    assert not cache._others
    with pytest.raises(ProcessLookupError, match="has closed"):
        cache.map_other(ME, region.segment.fd, region.segment.inode + 1, SIZE)
    owner.close()
    with pytest.raises(FileNotFoundError):
        cache.map_other(*place)


def test_memory_is_made_ahead_if_there_is_any(cache: RegionCache, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve_region(cache, SIZE)
    ahead = cache.find(SIZE - 100, {ME, OTHER})
    assert ahead is not None
    assert use(cache, {ME, OTHER}) is ahead

    def refuse(*_: object) -> None:
        raise SharedMemoryError("there is none")

    monkeypatch.setattr(region_cache.ShmSegment, "grow", refuse)
    num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    reserve_region(cache, 1 << 20)
    with pytest.raises(SharedMemoryError):
        cache.create(1 << 20, "buckets")
    assert len(list(Path("/proc/self/fd").iterdir())) == num_descriptors
