"""Ledger of the steps of jobs, as their programs have written them down: lines ``TRY`` and ``STEP``; and their end.

TRY number view rank size epoch indices, before gradients are computed; STEP number view rank size digest and more, when
the weights have changed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.elastic.elastic_processes import ElasticProcesses, Member


@dataclass
class Ledger:
    """What members have said: attempts at steps, by number and view, and digests of weights behind them."""

    samples: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    #: by number of the step and view
    digests: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    #: by number: views in which it was applied, by anybody and by members that lived to the end
    views: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    lasting: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def read(self, members: Sequence[Member]) -> None:
        for member in members:
            for line in list(member.lines):
                words = line.split(maxsplit=6)
                if words[0] == "TRY" and len(words) == 7 and words[6].endswith("]"):
                    number, view, rank, size, epoch = map(int, words[1:6])
                    self.samples[number, view][rank] = json.loads(words[6])
                    self.sizes[number, view], self.epochs[number] = size, epoch
                elif words[0] == "STEP" and len(words) == 7:
                    number, view = int(words[1]), int(words[2])
                    self.digests[number, view].add(words[5])
                    self.views[number].add(view)
                    if member.process.poll() in {None, 0}:
                        self.lasting[number].add(view)

    def check(self, num_epochs: int, num_samples: int, first: int = 0) -> None:
        """Checks all steps from ``first`` on, which begins an epoch."""
        assert sorted(self.views) == list(range(first, max(self.views) + 1)), "a step is missing"
        # who alone had applied a step, and died, may have it run anew by the others
        last = {number: max(views) for number, views in self.views.items()}
        assert all(views == {last[number]} for number, views in self.lasting.items()), "applied twice"
        assert {at: found for at, found in self.digests.items() if len(found) > 1} == {}, "replicas differ"
        taken: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for number, view in last.items():
            parts = self.samples[number, view]
            assert sorted(parts) == list(range(self.sizes[number, view])), (number, view)
            taken[self.epochs[number]].update(index for part in parts.values() for index in part)
        everything = Counter(range(num_samples))
        assert sorted(taken) == list(range(num_epochs))
        assert all(counts == everything for counts in taken.values()), "each sample once an epoch"


def count_steps(member: Member) -> int:
    return sum(line.startswith("STEP ") for line in list(member.lines))


def finish(job: ElasticProcesses, members: Sequence[Member]) -> None:
    """Waits for the end of the program on all members that are left; they have equal weights."""
    job.wait_for("DONE", list(members), 150)
    assert [member.wait() for member in members] == [0] * len(members)
    ends = {line.split()[3] for member in members for line in member.lines if line.startswith("DONE")}
    assert len(ends) == 1, ends


def segments(ledger: Ledger) -> list[tuple[int, int, int]]:
    """Runs of steps with the same members: the first step, the one behind the last, and the number of ranks."""
    found: list[tuple[int, int, int]] = []
    for number in sorted(ledger.views):
        size = ledger.sizes[number, max(ledger.views[number])]
        if found and found[-1][2] == size:
            found[-1] = (found[-1][0], number + 1, size)
        else:
            found.append((number, number + 1, size))
    return found
