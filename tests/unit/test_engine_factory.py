"""Parts from which engines are put together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from reigen.engine_factory import _spin_count

#: Who may use which processors; 0 is this process.
BOUND = {0: {4}, 11: {4}, 12: {5}}
SHARED = {0: {4}, 11: {4}, 12: {4}}
FREE = {0: {4, 5}, 11: {4, 5}, 12: {4, 5}}


@pytest.mark.parametrize(
    ("allowed", "num_local", "pids", "looks"),
    [
        (BOUND, 2, (11, 12), 7),
        (SHARED, 2, (11, 12), 0),
        (FREE, 2, (11, 12), 7),
        (FREE, 3, (11, 12), 0),
        (FREE, 2, (), 7),
        (BOUND, 2, (), 0),
        (BOUND, 2, (11, 12, 99), 7),
        (BOUND, 1, (11,), 7),
    ],
)
def test_ranks_look_where_they_have_a_processor_each(
    allowed: Mapping[int, set[int]], num_local: int, pids: Sequence[int], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sched_getaffinity(pid: int) -> set[int]:
        if pid not in allowed:
            raise ProcessLookupError(pid)
        return set(allowed[pid])

    monkeypatch.setattr(os, "sched_getaffinity", sched_getaffinity)
    assert _spin_count(7, num_local, pids) == looks
