"""Plan of the next view: who is in it, in which order, and at which step it begins. Pure.

Order of ranks: members that hold the state keep their order, host by host. A host that goes on with no holder of the
state counts as a new one, and so does each member without: it stands behind the others of its host, new hosts behind
the others. So rank 0 holds the state. (Hosts cannot be ordered by the age of their oldest members: where that one dies,
members of two hosts that go on would change places.)

Step: holders of the state are at most one step apart, because a step needs all of them. If some have applied step A and
others have not, these get it from those. If all have, and the sums of step A + 1 are there, in parts perhaps, that step
is completed; otherwise it is undone. A step that every holder has applied is never undone: without one of those there
is no next view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec

from reigen.cluster.membership.views.messages import MemberReady, MemberReport
from reigen.cluster.membership.views.record import MemberId, StepBase, View, ViewHost, ViewMember, Witness
from reigen.errors import format_ranks

_Voter = TypeVar("_Voter", ViewHost, Witness)

#: Why a job ends whose holders of the state are dead; more may follow.
STATE_LOST_TEXT = "no process is left that holds the state of the training"


def plan_view(
    view: View,
    reports: Mapping[MemberId, MemberReport],
    candidates: Sequence[MemberReady] = (),
    lost: Collection[MemberId] = (),
    voter_lives: Mapping[str, int] = MappingProxyType({}),
) -> tuple[View | None, str]:
    """Plan the view that follows another one.

    Args:
        view: the one that ends.
        reports: of its members that are to be kept, but for those that leave.
        candidates: processes that want to become members; they are taken if they reach all hosts that go on.
        lost: members and candidates that are dead, or cannot be reached; they are left out.
        voter_lives: incarnations of voters, by name: who has lost its memory votes again from the next view on.

    Returns:
        The view, and a reason for the user; or None, and why there can be none.
    """
    stable = view.base.stable_step
    kept = {member: report for member, report in reports.items() if member not in lost and not report.is_leaving}
    holders = {member: report for member, report in kept.items() if report.progress.applied >= stable}
    if not holders:
        if any(report.is_leaving and report.progress.applied >= stable for report in reports.values()):
            return None, f"all members that are left and hold the state of step {stable} want to leave"
        return None, f"no member that is left holds the state of step {stable}, which all had applied"
    kept = _connected(view, kept, holders)
    holders = {member: report for member, report in holders.items() if member in kept}
    hosts = _order_hosts(view, holders, kept, [each for each in candidates if each.host.members[0].id not in lost])
    hosts = [_renew(host, voter_lives) for host in hosts]
    witness = None if view.witness is None else _renew(view.witness, voter_lives)
    sizes = view.min_size, view.max_size
    following = View.make(
        view.epoch + 1, hosts, base=StepBase(), sizes=sizes, witness=witness, num_spares=view.num_spares
    )
    base, reason = _plan_base(following, holders)
    return msgspec.structs.replace(following, base=base), f"{_describe(view, following)}; {reason}"


def explain_lost_state(view: View, reports: Mapping[MemberId, MemberReport], dead: Collection[MemberId]) -> str:
    """Return why no view can ever follow: all holders of the state are dead; empty: one may live.

    Who is silent, or cannot be reached, may. Who has reported gets no further in this view, so that waiting for
    others is of no use.

    Args:
        view: the one that ends.
        reports: of its members.
        dead: members that are known to be dead.
    """
    stable = view.base.stable_step
    without = [
        rank
        for member, rank in view.ranks.items()
        if member not in dead and member in reports and reports[member].progress.applied < stable
    ]
    gone = [rank for member, rank in view.ranks.items() if member in dead]
    if len(without) + len(gone) < view.size:
        return ""
    died = f"rank(s) {format_ranks(gone)} of view {view.epoch} have ended, and " if gone else ""
    return (
        f"{STATE_LOST_TEXT}: {died}rank(s) {format_ranks(without)} had not "
        "received it, or were in the middle of an update. Start the job again from its last checkpoint"
    )


def _connected(
    view: View, kept: Mapping[MemberId, MemberReport], holders: Collection[MemberId]
) -> dict[MemberId, MemberReport]:
    """Leave out members until no two are left of which one cannot reach the other.

    First those without the state, then those with most such connections, then those of the highest ranks. Otherwise
    a single cut connection would end each view that has both its ends.
    """
    links = {
        frozenset((member, other))
        for member, report in kept.items()
        for other in report.unreachable
        if other in kept and other != member
    }
    left = dict(kept)
    while links:
        cut = Counter(member for link in links for member in link)
        worst = max(cut, key=lambda member: (member not in holders, cut[member], view.ranks[member]))
        del left[worst]
        links = {link for link in links if worst not in link}
    return left


def reaches(candidate: MemberReady, hosts: Iterable[str]) -> bool:
    """Return whether a process that wants to be a member can reach these hosts, as far as it knows."""
    return not any(name in candidate.unreached for name in hosts)


def _renew(host: _Voter, voter_lives: Mapping[str, int]) -> _Voter:
    """Return a voter in the latest of its lives."""
    incarnation = max(host.incarnation, voter_lives.get(host.name, 0))
    return host if incarnation == host.incarnation else msgspec.structs.replace(host, incarnation=incarnation)


def _order_hosts(
    view: View,
    holders: Collection[MemberId],
    kept: Collection[MemberId],
    candidates: Sequence[MemberReady],
) -> list[ViewHost]:
    """Return hosts with their members in the order of ranks; at most as many members as may run."""
    epoch = view.epoch + 1
    old: list[ViewHost] = []
    new: list[ViewHost] = []
    for host in view.hosts:
        here = [member for member in host.members if member.id in kept]
        going_on = [member for member in here if member.id in holders]
        renewed = [msgspec.structs.replace(member, joined=epoch) for member in here if member.id not in holders]
        (old if going_on else new).append(msgspec.structs.replace(host, members=(*going_on, *renewed)))
    hosts = {host.name: host for host in [*old, *new] if host.members}
    vacancies = view.max_size - len(kept)
    slots = {member.slot for host in hosts.values() for member in host.members}
    for candidate in [each for each in candidates if reaches(each, [*hosts])]:
        member = msgspec.structs.replace(candidate.host.members[0], joined=epoch)
        if vacancies <= 0 or member.slot in slots:
            continue
        name, incarnation = candidate.host.voter
        before: tuple[ViewMember, ...] = hosts[name].members if name in hosts else ()
        host = msgspec.structs.replace(hosts.get(name, candidate.host), members=(*before, member))
        hosts[name] = _renew(host, {name: incarnation})
        slots.add(member.slot)
        vacancies -= 1
    return list(hosts.values())


def _plan_base(view: View, holders: Mapping[MemberId, MemberReport]) -> tuple[StepBase, str]:
    """Return where a view's members begin, and why."""
    progress = {member: report.progress for member, report in holders.items()}
    step, stable = (chosen(each.applied for each in progress.values()) for chosen in (max, min))
    at_step = {member: each for member, each in progress.items() if each.applied == step}
    behind = tuple(rank for member, rank in view.ranks.items() if member not in at_step)
    first = next(iter(at_step.values()))
    if stable < step:
        reason = f"step {step} goes on to those who had not applied it"
        return StepBase(step, first.cursor, stable, behind), reason
    sources: dict[int, dict[int, int]] = {}  # by epoch, of each bucket
    num_buckets = {each.held.epoch: each.held.num_buckets for each in at_step.values() if each.held.buckets}
    for member, each in at_step.items():
        for bucket in each.held.buckets:
            sources.setdefault(each.held.epoch, {}).setdefault(bucket, view.ranks[member])
    for epoch, ranks in sources.items():
        if len(ranks) == num_buckets[epoch]:
            sums = tuple(ranks[bucket] for bucket in range(num_buckets[epoch]))
            reason = f"step {step + 1} is completed: all its sums are there"
            return StepBase(step, first.cursor, stable, behind, True, epoch, sums), reason
    return StepBase(step, first.cursor, stable, behind), f"step {step + 1} is run again"


def _describe(old: View, new: View) -> str:
    """Say how the members have changed."""
    gone, come = old.ranks.keys() - new.ranks.keys(), new.ranks.keys() - old.ranks.keys()
    ranks = ", ".join(str(rank) for member, rank in old.ranks.items() if member in gone)
    changes = [f"without rank(s) {ranks}"] * bool(gone) + [f"with {len(come)} more"] * bool(come)
    return f"view {new.epoch} has {new.size} rank(s)" + "".join(f", {change}" for change in changes)
