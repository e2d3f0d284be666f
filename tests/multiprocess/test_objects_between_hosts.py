"""Python objects between ranks that are processes of one machine, which poses as two hosts; and somebody in between."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import reigen
from reigen.cluster import connection_pool
from reigen.errors import AuthenticationError
from reigen.testing import RankPool
from tests.middle import Middle, led

pytestmark = pytest.mark.slow  # real processes
MARKER = "A CHECKPOINT"


def two_lives(guide: tuple[str, int]) -> list[object]:
    """What this rank gets in each of two lives of the job, and how many of them it unpickles."""
    os.environ["REIGEN_HOST_ID"] = f"host{os.environ['REIGEN_RANK']}"
    split, loads = connection_pool.split_address, pickle.loads
    found: list[object] = []
    num_loaded = 0

    def load(data: Any) -> object:
        nonlocal num_loaded
        num_loaded += MARKER.encode() in bytes(data)
        return loads(data)

    connection_pool.split_address = lambda address: led(guide, split(address))
    pickle.loads = load
    try:
        for life in range(2):
            reigen.init()
            try:
                mine = f"{MARKER} of life {life}" if reigen.rank() == 0 else None
                found.append(reigen.broadcast_object(mine, 0, name="state"))
            except AuthenticationError as error:
                found.append(str(error))
            found.append(reigen.allgather_object(reigen.rank(), name="ranks"))  # the job goes on
            reigen.shutdown()
    finally:
        connection_pool.split_address, pickle.loads = split, loads
        reigen.shutdown()
    return [*found, num_loaded]


def test_what_was_recorded_in_one_life_of_a_job_is_not_believed_in_the_next(
    rank_pool: Callable[[int], RankPool],
) -> None:
    with contextlib.closing(Middle()) as middle:

        def change(sender: int, receiver: int, body: bytes) -> bytes:
            """The first such object again, whatever comes now."""
            return middle.with_marker(MARKER.encode())[0] if MARKER.encode() in body else body

        middle.change = change
        first, second = rank_pool(2).run(two_lives, middle.guide())
        assert len(middle.with_marker(MARKER.encode())) == 2
    object_of, ranks, refusal, *rest = first
    assert (object_of, ranks, rest) == (f"{MARKER} of life 0", [0, 1], [[0, 1], 0])
    assert str(refusal).startswith("state: what rank 0 sent was changed on its way to rank 1")
    assert second == [object_of, ranks, refusal, [0, 1], 1]
