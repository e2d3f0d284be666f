"""Forecast of which single losses an elastic job survives, for `reigen check --elastic`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reigen.cluster.membership.views.quorum import QuorumRule, choose_rule, has_quorum

_RULES = {
    QuorumRule.MAJORITY: "more than half of {} hosts",
    QuorumRule.FIRST_HOST: "more than half of {} hosts, or half of them with the host of rank 0",
    QuorumRule.WITNESS: "more than half of {} hosts and the witness together",
}


@dataclass(frozen=True, slots=True)
class SingleLoss:
    """Loss of one part of a job, and its consequence."""

    lost: str
    goes_on: bool
    what: str


@dataclass(frozen=True, slots=True)
class ElasticForecast:
    """Forecast of an elastic job.

    Args:
        hosts: their names and slots, in the order of ranks; the launcher is on the first one.
        min_ranks: of the job.
        max_ranks: the same.
        continues: the job goes on without its launcher (``--on-launcher-loss continue``).
        has_witness: it has a witness.
    """

    hosts: Sequence[tuple[str, int]]
    min_ranks: int
    max_ranks: int
    continues: bool = False
    has_witness: bool = False

    @property
    def placed(self) -> list[tuple[str, int]]:
        """Hosts on which processes are started first, and how many; others are for those that come in their place."""
        left, placed = self.max_ranks, []
        for name, slots in self.hosts:
            if (num := min(left, slots)) > 0:
                placed.append((name, num))
                left -= num
        return placed

    @property
    def num_ranks(self) -> int:
        """Number of processes with which the job begins."""
        return sum(slots for _, slots in self.placed)

    @property
    def rule(self) -> str:
        """Rule by which hosts decide who goes on, in words."""
        num = len(self.placed)
        if num == 1:
            return "the one host"
        return _RULES[choose_rule(num, has_witness=self.has_witness)].format(num)

    def losses(self) -> Iterable[SingleLoss]:
        """Yield single losses, and what follows."""
        yield from (self._rank("any rank"), self._rank("rank 0"))
        placed = self.placed
        for number, (name, _) in enumerate(placed):
            if number and placed[number][1] == placed[number - 1][1] and number > 1:
                continue  # like the one before
            who = f"host {name}, that of rank 0 and of the launcher" if number == 0 else f"host {name}"
            yield self._host(who, number)
        if self.continues:
            yield SingleLoss("the launcher", True, "`reigen attach` takes its place; until then nothing is started")
        else:
            yield SingleLoss("the launcher", False, "the job ends (--on-launcher-loss continue would have it go on)")
        if self.has_witness:
            yield SingleLoss("the witness", True, "until a host is lost, too")

    def _rank(self, lost: str) -> SingleLoss:
        left = self.num_ranks - 1
        if left >= self.min_ranks:
            return SingleLoss(lost, True, f"{_go_on(left)} at once; another one is started in its place")
        if left == 0:
            return SingleLoss(lost, False, "it is the only one that has the state")
        return SingleLoss(
            lost, True, f"{left} wait until another one is started: steps need {self.min_ranks} (--min-np)"
        )

    def _host(self, lost: str, number: int) -> SingleLoss:
        placed = self.placed
        rule = choose_rule(len(placed), has_witness=self.has_witness)
        voters = [voter for voter in range(len(placed) + self.has_witness) if voter != number]
        may, _ = has_quorum(rule, len(placed), voters)
        left = self.num_ranks - placed[number][1]
        if left == 0:
            return SingleLoss(lost, False, "all processes are there")
        if number == 0 and not self.continues:
            return SingleLoss(lost, False, "the job ends with its launcher (--on-launcher-loss continue)")
        if not may:
            advice = "A third host would do, or --witness-dir"
            return SingleLoss(lost, False, f"the others may not decide alone: {self.rule}. {advice}")
        if left < self.min_ranks:
            num_slots = sum(slots for name, slots in self.hosts) - dict(self.hosts)[placed[number][0]]
            suffices = num_slots >= self.min_ranks
            more = "others are started on the hosts that are left" if suffices else "more hosts must come"
            return SingleLoss(lost, True, f"{left} wait, steps need {self.min_ranks}: {more}")
        return SingleLoss(lost, True, _go_on(left))


def _go_on(num: int) -> str:
    return f"{num} process{'es go' if num != 1 else ' goes'} on"
