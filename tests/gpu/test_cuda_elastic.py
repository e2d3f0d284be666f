"""Elastic jobs with models on a GPU, and a real NCCL: ranks are killed and come while the others go on.

Skipped, with the reason, where there is no GPU.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from reigen.torch.cuda_tensors import nccl_library
from tests.elastic.elastic_processes import ElasticProcesses, Member

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"),
    pytest.mark.skipif(not nccl_library()[0], reason=nccl_library()[1]),
    pytest.mark.slow,
]

_NUM_STEPS = 80
_PROGRAM = Path(__file__).with_name("elastic_cuda_program.py")


def check_that_replicas_are_equal(members: list[Member]) -> None:
    """Of those that lived to the end: every step in the same view, with the same weights."""
    digests = defaultdict(set)
    for member in members:
        for line in member.lines:
            if line.startswith(("STEP", "DONE")):
                word, number, _, size, digest = line.split()
                digests[word, number, size].add(digest)
    assert {key: found for key, found in digests.items() if len(found) > 1} == {}


@pytest.mark.parametrize("kind", ["run", "job"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_with_a_gpu_is_killed_and_the_others_go_on(kind: str, victim: int) -> None:
    with ElasticProcesses(_PROGRAM, kind, str(_NUM_STEPS)) as job:
        members = job.start_first(3)
        job.wait_for("STEP 10 ", seconds=120)
        dead = members[victim]
        dead.kill()
        alive = [member for member in members if member is not dead]
        job.wait_for("DONE", alive, seconds=120)
        assert [member.wait() for member in alive] == [0, 0]
        check_that_replicas_are_equal(alive)
        assert all(any(line.startswith("DONE") and " 2 " in line for line in member.lines) for member in alive)


@pytest.mark.parametrize("kind", ["run", "job"])
def test_a_rank_with_a_gpu_comes_later(kind: str) -> None:
    with ElasticProcesses(_PROGRAM, kind, str(_NUM_STEPS), AWAITED_SIZE="3") as job:
        members = job.start_first(2)
        job.wait_for("STEP 10 ", seconds=120)
        newcomer = job.start_candidate(2)
        job.wait_for("DONE", members, seconds=150)  # the newcomer is one of them
        assert [member.wait() for member in members] == [0] * 3
        check_that_replicas_are_equal(members)
        assert newcomer.says("STEP"), newcomer.lines
