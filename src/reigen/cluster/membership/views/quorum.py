"""Quorums of a view's voters: rules whose quorums all intersect. Pure."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from reigen.errors import format_ranks


class QuorumRule(Enum):
    """Rule by which voters decide about the view that follows theirs; it is part of the view.

    Voters are hosts, by their numbers in the view, and the witness, whose number is the number of hosts. A dead
    process costs no vote, and proof that a host is dead takes it from no count: {2, 3} of three hosts may have accepted
    a view before host 3 died, and host 1 alone must not decide another.
    """

    #: more than half of the hosts, of which there is an odd number
    MAJORITY = "majority"
    #: more than half of an even number of hosts and the witness together
    WITNESS = "witness"
    #: more than half of an even number of hosts, or a half with host 0, which is that of rank 0
    FIRST_HOST = "first_host"


def choose_rule(num_hosts: int, *, has_witness: bool) -> QuorumRule:
    """Choose the rule of a view. An odd number of hosts needs no witness: it would make the number even."""
    if num_hosts % 2:
        return QuorumRule.MAJORITY
    return QuorumRule.WITNESS if has_witness else QuorumRule.FIRST_HOST


def count_voters(rule: QuorumRule, num_hosts: int) -> int:
    """Count who may vote: hosts, and the witness under `QuorumRule.WITNESS`."""
    return num_hosts + (rule is QuorumRule.WITNESS)


def has_quorum(rule: QuorumRule, num_hosts: int, voters: Collection[int]) -> tuple[bool, str]:
    """Decide if these voters are a quorum.

    Args:
        rule: the view's.
        num_hosts: of the view.
        voters: numbers of those that have answered; others than voters do not count.

    Returns:
        The decision, and its reason, for a message to the user: ``hosts 1 of 2 answered, and not host 0, ...``.
    """
    num_voters = count_voters(rule, num_hosts)
    answered = {voter for voter in voters if 0 <= voter < num_voters}
    hosts = format_ranks(answered - {num_hosts}) or "none"
    text = f"host(s) {hosts} of {num_hosts} answered"
    if rule is QuorumRule.WITNESS:
        text += ", and the witness" if num_hosts in answered else ", the witness did not"
    if len(answered) * 2 > num_voters:
        return True, text
    if rule is QuorumRule.FIRST_HOST and len(answered) * 2 == num_hosts:
        if 0 in answered:
            return True, f"{text}, half of them with host 0, that of rank 0"
        return False, f"{text}, half of them without host 0, that of rank 0: a witness would decide (--witness-dir)"
    return False, f"{text}; {num_voters // 2 + 1} are needed"
