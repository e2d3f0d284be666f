"""Shared memory of a worker and a server: blocks, what the other end sees of them, and limits."""

import os
import random

import numpy as np
import pytest

from reigen.errors import SharedMemoryError, WireError
from reigen.kv.protocol import KVHello
from reigen.kv.shm_arena import PeerShmArena, ShmArena
from reigen.net.shm_segment import ShmSegment


@pytest.fixture
def arena():
    arena = ShmArena("reigen-test")
    yield arena
    arena.close()


def hello_of(arena, host_id="m", **other):
    facts = {"pid": os.getpid(), "fd": arena.segment.fd, "inode": arena.segment.inode, **other}
    return KVHello(0, 0, "host", host_id, **facts)


@pytest.fixture
def peer(arena):
    peer, reason = PeerShmArena.open(hello_of(arena), "m")
    assert peer is not None, reason
    yield peer
    peer.close()


def test_the_other_end_sees_what_was_written_and_cannot_write(arena, peer):
    blocks = []
    for number, nbytes in enumerate([1, 100_000, 6 << 20, 64, 9 << 20]):  # of several slabs
        block = arena.allocate(nbytes)
        assert block.array.nbytes == nbytes
        block.array[:] = number + 1
        blocks.append(block)
    for number, block in enumerate(blocks):
        view = peer.view(block.offset, block.array.nbytes)
        assert (view == number + 1).all()
        assert not view.flags.writeable


def test_views_outlive_the_arena_and_the_mapping(arena, peer):
    block = arena.allocate(1 << 20)
    block.array[:] = 7
    view = peer.view(block.offset, block.array.nbytes)
    peer.close()
    arena.close()
    assert (view == 7).all()


def test_blocks_never_overlap_and_memory_is_used_again(arena):
    rng = random.Random(5)
    blocks, owner = {}, {}
    for number in range(1, 2000):
        if blocks and rng.random() < 0.5:
            gone = rng.choice(list(blocks))
            block = blocks.pop(gone)
            assert (block.array == gone % 251).all(), "somebody else wrote into a block"
            arena.free(block)
        else:
            block = arena.allocate(rng.choice([1, 63, 64, 65, 4096, 70_000, rng.randrange(1, 300_000)]))
            assert block.offset % 64 == 0
            block.array[:] = number % 251
            blocks[number] = block
            owner[block.offset] = number
    assert arena.num_used_bytes == sum(-(-block.array.nbytes // 64) * 64 for block in blocks.values())
    for block in blocks.values():
        arena.free(block)
    size = arena.segment.size
    arena.free(arena.allocate(4 << 20))  # as long as a slab: free blocks that touch have become one range
    assert arena.segment.size == size


def test_an_arena_does_not_grow_beyond_its_limit():
    arena = ShmArena("reigen-test", max_bytes=8 << 20)
    try:
        block = arena.allocate(5 << 20)
        with pytest.raises(SharedMemoryError, match="arena of a parameter server"):
            arena.allocate(5 << 20)
        arena.free(block)
        assert arena.allocate(5 << 20).offset == block.offset
    finally:
        arena.close()


def test_what_lies_beyond_the_arena_is_refused(arena, peer):
    block = arena.allocate(1000)
    for offset, nbytes in [(arena.segment.size, 1), (0, arena.segment.size + 1), (1 << 62, 1 << 62)]:
        with pytest.raises(WireError, match="the other end tells of memory up to"):
            peer.view(offset, nbytes)
    assert len(peer.view(block.offset, block.array.nbytes)) == 1000


def test_why_memory_is_not_shared(arena):
    for hello, says in [
        (hello_of(arena, host_id=""), "does not share"),
        (hello_of(arena, host_id="other"), "host is another host"),
        (hello_of(arena, inode=arena.segment.inode + 1), "is not the other end"),
        (hello_of(arena, fd=10_000), "cannot be opened: No such file"),
    ]:
        peer, reason = PeerShmArena.open(hello, "m")
        assert peer is None
        assert says in reason


def test_memory_that_could_become_smaller_while_it_is_read_is_not_mapped(arena):
    arena.allocate(100)
    with pytest.raises(PermissionError):  # F_SEAL_SHRINK
        os.ftruncate(arena.segment.fd, 0)
    arena.allocate(9 << 20)  # it may still grow
    unsealed = ShmSegment.create("reigen-test-unsealed")
    try:
        hello = KVHello(0, 0, "there", "m", os.getpid(), unsealed.fd, unsealed.inode)
        with pytest.raises(SharedMemoryError, match=r"process \d+ on host there is not sealed"):
            PeerShmArena.open(hello, "m")
    finally:
        unsealed.close()


def test_alignment_serves_every_dtype(arena):
    arena.allocate(3)
    assert arena.allocate(80).array.view(np.float64).shape == (10,)
