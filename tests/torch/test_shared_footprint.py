"""What parameters leave behind when they move into shared memory: the host gets it back, and keeps it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reigen.torch as hvd  # noqa: E402
from benchmarks.harness.memory import kib_of  # noqa: E402
from reigen.torch.shared_parameters.heap import reserve_blocks  # noqa: E402

LAYERS, WIDTH = 80, 256
STEPS = 12


def present(array: np.ndarray) -> int:
    """How many of the pages that are the array's alone are in memory: mincore(2)."""
    begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * mmap.PAGESIZE), found)
    return sum(page & 1 for page in found)


def test_what_is_reserved_takes_no_memory():
    sizes = [1 << 16] * 40 + [5 << 20, 100]
    used = [np.ones(nbytes, np.uint8) for nbytes in sizes]
    where = {array.ctypes.data for array in used}
    assert all(present(array) for array in used[:-1])
    del used
    rooms = reserve_blocks(sizes)
    assert [room.nbytes for room in rooms] == sizes[:-1]  # no page of the last one is its own
    assert where & {room.ctypes.data for room in rooms}
    assert [present(room) for room in rooms] == [0] * len(rooms)


def private_bytes() -> int:
    return kib_of(Path("/proc/self/smaps_rollup").read_text(), "Pss_Anon") << 10


def train(momentum: float) -> int:
    """By how many bytes the memory that this rank has for itself grows after the first step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), share_parameters=True)
    x = torch.randn(64, WIDTH)
    first = 0
    for number in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if not number:
            first = private_bytes()
    return private_bytes() - first


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_a_deep_model_takes_its_old_memory_not_again(rank_pool, momentum):
    results = rank_pool(2).run(train, momentum, init=True)
    model_bytes = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    for more in results:  # activations and what Python makes; not a second time what weights and gradients had
        assert more < 0.9 * model_bytes
