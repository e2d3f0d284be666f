"""View of an elastic job: its members in rank order, its voters, and the step at which they begin. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, NamedTuple, Self

import msgspec

from reigen.cluster.membership.messages import Count
from reigen.cluster.membership.views.quorum import QuorumRule, choose_rule, count_voters, has_quorum

#: Of an encoded view with 1,024 ranks, and of what voters keep. A larger job needs more.
MAX_VIEW_BYTES = 1 << 16
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class MemberId(NamedTuple):
    """One incarnation of a rank.

    Attributes:
        slot: number of its place in the job, which a process that replaces it takes over.
        incarnation: which process has the place; grows.
    """

    slot: int
    incarnation: int


class VoterId(NamedTuple):
    """One life of what votes: the memory of an agent, or of the ranks of a host that have no agent.

    Attributes:
        name: the host's name, or another one for the witness.
        incarnation: another one where the memory was lost, so that nobody votes who may have forgotten a promise.
    """

    name: str
    incarnation: int


class ViewMember(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member.

    Attributes:
        slot, incarnation: `MemberId`.
        joined: epoch of the view since which it has gone on with the state.
        port: where it listens, on its host.
        service_port: where it serves the members of a view of which it is rank 0; it listens there from its start.
    """

    slot: Count
    incarnation: Count
    joined: Count
    port: _Port = 0
    service_port: _Port = 0

    @property
    def id(self) -> MemberId:
        """Identity in the job."""
        return MemberId(self.slot, self.incarnation)


class ViewHost(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A host with members, which has one vote.

    Attributes:
        name: the host.
        incarnation: with the name the `VoterId`.
        address: by which others reach it.
        members: in the order of ranks.
        failure_domain: label of what it shares with others: a rack, a zone.
    """

    name: _Text
    incarnation: Count
    address: _Text
    members: tuple[ViewMember, ...]
    failure_domain: _Text = ""

    @property
    def voter(self) -> VoterId:
        """Identity as a voter."""
        return VoterId(self.name, self.incarnation)


class Witness(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A voter without members, where the number of hosts is even. Attributes as of `ViewHost`."""

    name: _Text
    incarnation: Count
    address: _Text

    @property
    def voter(self) -> VoterId:
        """Identity as a voter."""
        return VoterId(self.name, self.incarnation)


class SamplePosition(NamedTuple):
    """Place in the samples: pass over the data set, and samples of it that were taken."""

    pass_number: int
    position: int


class StepBase(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Step at which the members of a view begin.

    Attributes:
        step: the latest that one of them had applied when the view was decided.
        cursor: behind that step.
        stable_step: every holder of the state had applied it: it is never undone. It is ``step`` or the one before.
        behind: ranks, in this view, that had not applied ``step``: they take sums or state from the others.
        completes: the sums of the step behind ``step`` are collected and applied; otherwise it is undone, and run anew.
        sums_epoch: in which view these sums were made.
        sum_sources: of each bucket, the rank in this view that holds its sums.
    """

    step: Count = 0
    cursor: SamplePosition = SamplePosition(0, 0)
    stable_step: Count = 0
    behind: tuple[Count, ...] = ()
    completes: bool = False
    sums_epoch: Count = 0
    sum_sources: tuple[Count, ...] = ()

    @property
    def target(self) -> int:
        """The step that all members have applied before the first of the view is run."""
        return self.step + self.completes


class View(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """Members of an elastic job in one epoch.

    Attributes:
        epoch: number of the view; the first is 1.
        hosts: in the order of ranks, which `plan_view` keeps; rank 0 is the first member of the first one.
        rule: how the hosts decide about the next view.
        base: where they begin.
        min_size, max_size: numbers of ranks between which steps are run; a view that is smaller waits.
        witness: voter beside the hosts, if the job has one.
        num_spares: so many ranks of a view that has ``max_size`` are warm spares; see `spares`.
    """

    epoch: Count
    hosts: tuple[ViewHost, ...]
    rule: QuorumRule
    base: StepBase = StepBase()
    min_size: Count = 1
    max_size: Count = 1 << 20
    witness: Witness | None = None
    num_spares: Count = 0

    @classmethod
    def make(
        cls,
        epoch: int,
        hosts: Iterable[ViewHost],
        *,
        base: StepBase,
        sizes: tuple[int, int],
        witness: Witness | None = None,
        num_spares: int = 0,
    ) -> Self:
        """Make a view; its rule follows from the number of hosts.

        Args:
            epoch: of the view.
            hosts: in order; those without members are left out.
            base: where the members begin.
            sizes: the smallest and largest number of ranks with which steps are run.
            witness: votes if the number of hosts is even.
            num_spares: how many of the largest number are warm spares.
        """
        present = tuple(host for host in hosts if host.members)
        rule = choose_rule(len(present), has_witness=witness is not None)
        return cls(epoch, present, rule, base, *sizes, witness, num_spares)

    @cached_property
    def ranks(self) -> dict[MemberId, int]:
        """Ranks of the members, in order."""
        return {member.id: rank for rank, member in enumerate(self._members())}

    @cached_property
    def members(self) -> tuple[MemberId, ...]:
        """Members in the order of ranks."""
        return tuple(self.ranks)

    @cached_property
    def voters(self) -> tuple[VoterId, ...]:
        """Those who vote, in the order of their numbers."""
        witness = () if self.witness is None else (self.witness.voter,)
        return (*(host.voter for host in self.hosts), *witness)[: count_voters(self.rule, len(self.hosts))]

    @cached_property
    def host_numbers(self) -> dict[MemberId, int]:
        """Number of each member's host."""
        return {member.id: number for number, host in enumerate(self.hosts) for member in host.members}

    @cached_property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @cached_property
    def spares(self) -> frozenset[int]:
        """Ranks of warm spares, which make each step without samples.

        They are the youngest, so that nobody who takes samples becomes a spare while it holds the state; when one of
        those goes, the oldest spare takes samples in the next view, or the one that has become rank 0: checkpoints are
        of a rank that takes samples.
        """
        if not self.num_spares:
            return frozenset()
        ages = [member.joined for member in self._members()]
        by_age = sorted(range(len(ages)), key=lambda rank: (rank > 0, ages[rank], rank))
        return frozenset(by_age[self.max_size - self.num_spares :])

    def _members(self) -> Iterator[ViewMember]:
        for host in self.hosts:
            yield from host.members

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """Return the other members of a member's host: they share memory."""
        host = self.hosts[self.host_numbers[member]]
        return tuple(each.id for each in host.members if each.id != member)

    def has_quorum(self, voters: Iterable[int]) -> tuple[bool, str]:
        """Decide if these voters, by their numbers, may decide about the next view; and the reason."""
        return has_quorum(self.rule, len(self.hosts), frozenset(voters))

    def validate(self) -> None:
        """Assert the invariants of a view."""
        members = list(self._members())
        assert members, "a view has members"
        assert len(self.ranks) == len(members), "each member is there once"
        assert len({member.slot for member in members}) == len(members), "a slot has one process"
        assert len({voter.name for voter in self.voters}) == len(self.voters), "each voter has one vote"
        for host in self.hosts:
            ages = [member.joined for member in host.members]
            assert ages == sorted(ages), "members of a host are ordered by age"
        assert max(member.joined for member in members) <= self.epoch, "nobody comes later than now"
        assert self.rule is choose_rule(len(self.hosts), has_witness=self.witness is not None)
        base = self.base
        assert base.step - 1 <= base.stable_step <= base.step, "holders of the state are at most one step apart"
        assert len(base.behind) < len(members), "somebody has the state"
        assert self.num_spares < self.max_size, "somebody takes samples"
        assert 0 not in base.behind or base.step > base.stable_step, "rank 0 holds the state"
        assert not (base.completes and base.stable_step != base.step), "sums of a step need all members behind it"
