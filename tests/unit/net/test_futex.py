"""Words of shared memory: wrap-around, waiting, waking."""

from __future__ import annotations

import platform
import resource
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from reigen.net import futex
from reigen.net.futex import FutexWord, SpinLimit, has_reached, memory_fences


def word() -> FutexWord:
    return FutexWord(np.zeros(64, np.uint8), 8)


def test_values_are_unsigned_and_wrap() -> None:
    w = word()
    w.store(2**32 + 5)
    assert w.load() == 5
    w.store(-1)
    assert w.load() == 2**32 - 1


def test_only_the_word_itself_is_written() -> None:
    memory = np.full(16, 7, np.uint8)
    FutexWord(memory, 4).store(0)
    assert memory.tolist() == [7] * 4 + [0] * 4 + [7] * 8


def test_a_word_must_be_aligned() -> None:
    with pytest.raises(AssertionError, match="offset 6 is not aligned"):
        FutexWord(np.zeros(64, np.uint8), 6)


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [(0, 0, True), (1, 0, True), (0, 1, False), (2**32 - 1, 2**32, False), (0, 2**32, True), (5, 2**32 - 3, True)],
)
def test_counters_are_compared_around_their_end(value: int, target: int, expected: bool) -> None:
    assert has_reached(value, target) is expected


def test_waiting_for_another_value_returns_at_once() -> None:
    began = time.monotonic()
    word().wait(1, 60.0)
    assert time.monotonic() - began < 30


def test_waiting_ends_when_time_is_up() -> None:
    began = time.monotonic()
    word().wait(0, 0.02)
    assert time.monotonic() - began < 30


def test_a_wake_with_a_common_bit_ends_the_wait() -> None:
    w, done = word(), threading.Event()

    def sleeper() -> None:
        while w.load() == 0:
            w.wait(0, 60.0, bits=2)
        done.set()

    thread = threading.Thread(target=sleeper)
    thread.start()
    w.wake(bits=1)
    w.store(1)
    w.wake(bits=3)
    assert done.wait(30)
    thread.join()


def test_fences_can_be_called() -> None:
    publish, fence = memory_fences()
    publish()
    with fence:
        pass


def test_elsewhere_a_fence_is_a_system_call_on_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(futex, "_membarrier", lambda: lambda: calls.append("membarrier"))
    publish, fence = memory_fences()
    publish()
    with fence:
        assert calls == ["membarrier"] * 2
    assert calls == ["membarrier"] * 2


def test_who_is_preempted_sleeps_at_once_and_looks_again_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = [7]
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_nivcsw=preempted[0]))
    spin = SpinLimit(640)
    spin.slept()
    assert spin.looks == 640
    preempted[0] = 8
    spin.slept()
    assert spin.looks == 0
    found = []
    for _ in range(70):
        spin.slept()
        found.append(spin.looks)
    assert found[:3] == [10, 20, 30]
    assert found[-7:] == [640] * 7


def test_who_has_no_core_never_looks() -> None:
    spin = SpinLimit(0)
    for _ in range(100):
        spin.slept()
    assert spin.looks == 0
