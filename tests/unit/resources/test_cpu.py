"""Processor time of threads, and the processors that a process may use."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from reigen.resources import cpu
from reigen.resources.cpu import ProcessorTime, read_allowed_cpus, read_processor_time


def test_processor_time_is_of_the_calling_thread_and_of_the_process() -> None:
    def compute() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    before = read_processor_time()
    other = threading.Thread(target=compute)
    other.start()
    other.join()
    between = read_processor_time()
    assert between.process - before.process >= 45_000_000
    assert between.thread - before.thread < 45_000_000
    compute()
    after = read_processor_time()
    assert after.thread - between.thread >= 45_000_000
    assert after.delay >= between.delay >= before.delay >= 0


@pytest.mark.parametrize("content", [None, "", "no numbers at all", "1 2"])
def test_where_the_kernel_does_not_say_the_delay_is_unknown(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedstat"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(cpu, "_SCHEDSTAT", str(path))
    found = read_processor_time()
    assert found.thread > 0
    assert found.process > 0
    assert found.delay == 0
    path.write_text("3000 2000 7\n")
    assert read_processor_time()[:2] == ProcessorTime(3000, 2000)[:2]


def test_allowed_processors_are_those_of_the_affinity() -> None:
    allowed = read_allowed_cpus()
    assert {bit for bit in range(allowed.mask.bit_length()) if allowed.mask >> bit & 1} == os.sched_getaffinity(0)
    assert allowed.quota >= 0
