"""Negotiation under thousands of random schedules: orders, delays, process sets, joins, mismatches, lost ranks.

REIGEN_SIM_SEED=<seed> replays one of them, REIGEN_TEST_SCHEDULES=<number> plays so many instead of 12,000 (in portions
of 4,000).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from reigen.engine.messages import ErrorCause, OperationKind
from tests.unit.engine.schedules import FOREVER
from tests.unit.engine.simulator import play

_BLOCK = 500
#: so many are played by the test that looks at what they reach
_TOLD = 2_000
_LAST = int(os.environ.get("REIGEN_TEST_SCHEDULES", "12000"))
_REPLAY = os.environ.get("REIGEN_SIM_SEED")


def seeds(first: int, count: int) -> Sequence[int]:
    return range(first, first + count) if _REPLAY is None else [int(_REPLAY)]


@pytest.mark.parametrize("first", range(_TOLD, 4_000, _BLOCK))
def test_schedules(first: int) -> None:
    for seed in seeds(first, _BLOCK):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4_000, _LAST, 4_000))
def test_many_schedules(first: int) -> None:
    for seed in seeds(first, 4_000):
        play(seed)


@pytest.mark.slow
def test_the_schedules_reach_what_they_are_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(_TOLD):
        s = play(seed)
        seen["fused"] += any(len(b.names) > 1 for b in s.batches.values())
        seen["mismatch"] += any(r.cause is not ErrorCause.LATE for r in s.refused.values())
        seen["late"] += any(r.cause is ErrorCause.LATE for r in s.refused.values())
        seen["died"] += any(r.gone == "died" for r in s.ranks)
        seen["stopped"] += s.stopped
        seen["left"] += any(r.gone == "left" for r in s.ranks)
        seen["rank 0 gone"] += bool(s.ranks[0].gone)
        log = "\n".join(s.log())
        seen["cached"] += bool(re.search(r"hears of rank \d+: \d+$", log, re.MULTILINE))
        seen["forgotten"] += "CacheEviction" in log
        seen["submitted again"] += s.plan.deadline_seconds == FOREVER and s.names_submitted_again()
        batches = [m for b in s.batches.values() for m in b.executed.values() if m]
        seen["groups"] += any(o.members for m in batches for o, _ in m)
        seen["joined"] += any(o.kind is OperationKind.JOIN for m in batches for o, _ in m)
        seen["joined twice"] += any(state.epoch > 1 for state in s.ranks)
        seen["stood in"] += any(r.template is not None for m in batches for _, r in m)
        seen["in sets"] += any(o.process_set for m in batches for o, _ in m)
        seen["stood in, in sets"] += any(r.template is not None and r.process_set for m in batches for _, r in m)
        seen["refused: joined"] += any(r.cause is ErrorCause.JOINED for r in s.refused.values())
        seen["removed"] += bool(s.removed)
        seen["refused: removed"] += any("removed" in r.reason for r in s.refused.values())
        seen["number used again"] += max(Counter(s.numbers_given).values(), default=0) > 1
        seen["eager"] += "rank 1 reads an eager answer" in log
        seen["eager, taken as a hit"] += log.count("submits eagerly") > len(s.eager_answers) * (s.plan.size - 1)
        seen["merged by a relay"] += s.num_merged > 0
        seen["passed on by a relay"] += s.num_forwarded > 0
        seen["said again in full"] += bool(re.search(r"instead_of=\d", log))
        seen["tuned"] += bool(s.tuned)
        seen["tuned between batches"] += any(0 < n < len(r.executed) for r in s.ranks for n in r.tuned.values())
        seen["tuned on the way"] += len({tuple(r.tuned.values()) for r in s.ranks}) > 1
    assert min(seen.values()) >= 15, seen
    assert len(seen) == 28
