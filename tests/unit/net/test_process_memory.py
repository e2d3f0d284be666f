"""Reading another process's memory: here its own, and that of a process that has ended."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from reigen.net import process_memory


def address_of(array: np.ndarray) -> int:
    return array.ctypes.data


def test_ranges_are_copied_pair_by_pair() -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    there = [(address_of(source) + begin, 10) for begin in (0, 50, 20)]
    here = [(address_of(target) + begin, 10) for begin in (90, 0, 40)]
    process_memory.read_process_memory(os.getpid(), there, here)
    assert target[90:].tolist() == list(range(10))
    assert target[:10].tolist() == list(range(50, 60))
    assert target[40:50].tolist() == list(range(20, 30))
    assert not target[10:40].any()


def test_more_ranges_than_one_call_takes() -> None:
    source, target = np.arange(5000, dtype=np.uint16), np.zeros(5000, np.uint16)
    there = [(address_of(source) + 2 * i, 2) for i in range(5000)]
    here = [(address_of(target) + 2 * (4999 - i), 2) for i in range(5000)]
    process_memory.read_process_memory(os.getpid(), there, here)
    assert (target == source[::-1]).all()


def test_nothing_to_read() -> None:
    process_memory.read_process_memory(os.getpid(), [], [])


def test_memory_that_does_not_exist() -> None:
    target = np.zeros(8, np.uint8)
    with pytest.raises(OSError, match="cannot read the memory of process") as caught:
        process_memory.read_process_memory(os.getpid(), [(8, 8)], [(address_of(target), 8)])
    assert caught.value.errno == errno.EFAULT


def test_the_rest_after_a_partial_read() -> None:
    """The kernel may copy less than was asked for: the next call asks for what is left."""
    assert process_memory._skip_bytes([(100, 10), (200, 10), (300, 10)], 15) == [(205, 5), (300, 10)]
    assert process_memory._skip_bytes([(100, 10), (200, 10)], 10) == [(200, 10)]
    assert process_memory._skip_bytes([(100, 10)], 10) == []


def test_a_process_that_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    target = np.zeros(8, np.uint8)
    with pytest.raises(OSError, match="No such process"):
        process_memory.read_process_memory(process.pid, [(address_of(target), 8)], [(address_of(target), 8)])


def test_probe() -> None:
    secret = np.frombuffer(b"0123456789abcdef", np.uint8)
    assert process_memory.can_read_process_memory(os.getpid(), address_of(secret), b"0123456789abcdef")
    assert not process_memory.can_read_process_memory(os.getpid(), address_of(secret), b"0123456789abcdeX")
    assert not process_memory.can_read_process_memory(os.getpid(), 8, b"0123456789abcdef")
