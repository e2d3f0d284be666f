"""Views of an elastic job: records, quorums, order of ranks, voters' memory, and what members do, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import pytest

from reigen.cluster.membership.views.candidate import MAX_ASKED_HOSTS, CandidateState, ElasticCandidate
from reigen.cluster.membership.views.events import (
    FENCED_EXIT_CODE,
    BuildLayouts,
    ChangeRequested,
    Copied,
    CopyStarted,
    EndProcess,
    Evidence,
    JoinView,
    KillMember,
    LayoutsBuilt,
    LeaveRequested,
    MembersLate,
    PlaneRevoked,
    Received,
    RevokePlane,
    Rolled,
    RollTo,
    RunView,
    SendTo,
    StartTimer,
    StepApplied,
    TimerFired,
    UseFreshSegments,
    Verdict,
    ViewTimer,
)
from reigen.cluster.membership.views.late_members import SilentHosts
from reigen.cluster.membership.views.member import ElasticMember, ElasticState, ViewTimeouts, revoke_neighbours
from reigen.cluster.membership.views.messages import (
    VIEW_CODEC,
    AcceptView,
    AskMember,
    Ballot,
    BallotPreempted,
    BehindView,
    ChangeAt,
    HeldSums,
    MemberReady,
    MemberReport,
    PrepareView,
    RevokeView,
    StateLost,
    StepProgress,
    StepReached,
    ViewAccepted,
    ViewBuilding,
    ViewDecided,
    ViewGo,
    ViewInstalled,
    ViewPromise,
    WaitOver,
)
from reigen.cluster.membership.views.paxos import Acceptor, Proposer
from reigen.cluster.membership.views.planning import explain_lost_state, plan_view
from reigen.cluster.membership.views.quorum import QuorumRule, choose_rule, count_voters, has_quorum
from reigen.cluster.membership.views.record import (
    MAX_VIEW_BYTES,
    MemberId,
    SamplePosition,
    StepBase,
    View,
    ViewHost,
    ViewMember,
    VoterId,
    Witness,
)
from reigen.cluster.membership.views.slots import NUM_SLOTS, decode_slots, encode_slot
from reigen.errors import WireError
from tests.unit.cluster.views_search import make_view


def member(slot: int, incarnation: int = 1) -> MemberId:
    return MemberId(slot, incarnation)


def progress(applied: int, *buckets: int, epoch: int = 1) -> StepProgress:
    return StepProgress(
        applied, SamplePosition(0, applied * 10), SamplePosition(0, applied * 10 + 10), HeldSums(epoch, buckets, 2)
    )


def reports(view: View, *applied: int, **changes: Any) -> dict[MemberId, MemberReport]:
    """Reports of the first members, in the order of ranks."""
    return {
        each: MemberReport(view.epoch + 1, each, progress(step), **changes)
        for each, step in zip(view.members, applied, strict=False)
    }


def ready(slot: int, host: str, applied: int = 0, incarnation: int = 2, life: int = 1) -> MemberReady:
    return MemberReady(1, ViewHost(host, life, "", (ViewMember(slot, incarnation, 1),)), applied)


# -- quorums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_witness", [False, True])
@pytest.mark.parametrize("num_hosts", range(1, 8))
def test_all_quorums_of_a_view_intersect(num_hosts: int, has_witness: bool) -> None:
    rule = choose_rule(num_hosts, has_witness=has_witness)
    voters = range(count_voters(rule, num_hosts))
    quorums = [
        set(some)
        for count in range(len(voters) + 1)
        for some in combinations(voters, count)
        if has_quorum(rule, num_hosts, some)[0]
    ]

    assert set(voters) in quorums
    assert all(one & other for one in quorums for other in quorums)
    one_less = [set(voters) - {voter} in quorums for voter in voters]
    assert all(one_less[1:]), "any host but the first of two may be lost"
    assert one_less[0] == (num_hosts > 2 or (has_witness and num_hosts == 2))


def test_quorums_of_small_jobs() -> None:
    two = choose_rule(2, has_witness=False)
    assert two is QuorumRule.FIRST_HOST
    assert has_quorum(two, 2, {0}) == (True, "host(s) 0 of 2 answered, half of them with host 0, that of rank 0")
    assert has_quorum(two, 2, {1}) == (
        False,
        "host(s) 1 of 2 answered, half of them without host 0, that of rank 0: a witness would decide (--witness-dir)",
    )
    assert has_quorum(QuorumRule.WITNESS, 2, {1, 2})[0]
    assert has_quorum(QuorumRule.WITNESS, 2, {1}) == (
        False,
        "host(s) 1 of 2 answered, the witness did not; 2 are needed",
    )
    assert choose_rule(3, has_witness=True) is QuorumRule.MAJORITY
    assert not has_quorum(QuorumRule.MAJORITY, 3, {1, 3})[0], "the witness has no vote among an odd number of hosts"
    assert has_quorum(QuorumRule.MAJORITY, 3, ()) == (False, "host(s) none of 3 answered; 2 are needed")


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_hosts", "ranks_each"), [(1024, 1), (128, 8), (4, 256), (1, 1024)])
def test_a_view_of_1024_ranks_is_small(num_hosts: int, ranks_each: int) -> None:
    hosts = [
        ViewHost(
            f"node{host:04}.cluster.local",
            1 << 31,
            f"10.255.{host // 256}.{host % 256}",
            tuple(ViewMember(host * ranks_each + rank, 1 << 15, 1 << 15, 65_535) for rank in range(ranks_each)),
            "r17",
        )
        for host in range(num_hosts)
    ]
    base = StepBase(
        1 << 40, SamplePosition(1 << 20, 1 << 40), 1 << 40, sums_epoch=1, completes=True, sum_sources=(1023,) * 200
    )
    view = View.make(1 << 15, hosts, base=base, sizes=(1, 1024))
    view.validate()
    data = VIEW_CODEC.encode(ViewDecided(view.epoch, view))

    assert view.size == 1024
    assert len(data) < MAX_VIEW_BYTES
    assert VIEW_CODEC.decode(data) == ViewDecided(view.epoch, view)
    with pytest.raises(WireError):
        VIEW_CODEC.decode(data[:-1])


def test_ranks_go_host_by_host() -> None:
    view = make_view(2, ranks_each=2)

    assert view.ranks == {member(0): 0, member(1): 1, member(2): 2, member(3): 3}
    assert view.host_numbers[member(2)] == 1
    assert view.neighbours(member(2)) == (member(3),)
    assert view.voters == (VoterId("h0", 1), VoterId("h1", 1))
    assert make_view(2, witness=True).voters == (VoterId("h0", 1), VoterId("h1", 1), VoterId("w", 1))
    assert make_view(3, witness=True).voters == (VoterId("h0", 1), VoterId("h1", 1), VoterId("h2", 1))


# -- plans -------------------------------------------------------------------------------------------------------------


def planned(view: View, *args: Any) -> tuple[View, str]:
    found, reason = plan_view(view, *args)
    assert found is not None, reason
    found.validate()
    return found, reason


def test_members_that_go_on_keep_their_order() -> None:
    view = make_view(3, ranks_each=2)
    left = {each: report for each, report in reports(view, 5, 5, 5, 5, 5, 5).items() if each.slot not in {0, 3}}
    found, reason = planned(view, left)

    assert found.members == (member(1), member(2), member(4), member(5))
    assert found.epoch == 2
    assert reason == "view 2 has 4 rank(s), without rank(s) 0, 3; step 6 is run again"


def test_a_host_keeps_its_place_when_its_oldest_member_dies() -> None:
    """By the ages of their oldest members the hosts would change places, and with them ranks that go on."""
    view = make_view(2, ranks_each=2)
    view, _ = planned(view, reports(view, 5, 5, 5, 5), [ready(9, "h0")])
    assert view.members == (member(0), member(1), member(9, 2), member(2), member(3))
    alive = {each: report for each, report in reports(view, 7, 7, 7, 7, 7).items() if each.slot > 1}
    found, _ = planned(view, alive)

    assert found.members == (member(9, 2), member(2), member(3))


def test_who_holds_no_state_stands_behind_those_who_do() -> None:
    """A member that came, and had not got the state when the oldest of its host died."""
    view = make_view(2)
    view = msgspec.structs.replace(view, base=StepBase(5, stable_step=5))
    view, _ = planned(view, reports(view, 5, 5), [ready(9, "h0", applied=2)])
    assert view.members == (member(0), member(9, 2), member(1))
    assert view.base.behind == (1,)
    alive = {
        member(9, 2): MemberReport(3, member(9, 2), progress(2)),
        member(1): MemberReport(3, member(1), progress(5)),
    }
    found, _ = planned(view, alive)

    assert found.members == (member(1), member(9, 2))
    assert found.base.behind == (1,)


def test_candidates_come_as_far_as_there_is_place() -> None:
    view = msgspec.structs.replace(make_view(2), max_size=3)
    candidates = [ready(5, "h0"), ready(6, "h9"), ready(1, "h8")]
    found, reason = planned(view, reports(view, 3, 3), candidates)

    assert found.members == (member(0), member(5, 2), member(1))
    assert reason.startswith("view 2 has 3 rank(s), with 1 more; ")
    found, _ = planned(view, reports(view, 3), candidates, {member(1)})
    assert found.members == (member(0), member(5, 2), member(6, 2))
    assert [host.name for host in found.hosts] == ["h0", "h9"]
    found, _ = planned(view, reports(view, 3), [ready(1, "h1", life=2)])
    assert found.voters == (VoterId("h0", 1), VoterId("h1", 2)), "another life of a host is another voter"
    found, _ = planned(view, reports(view, 3, 3), [ready(5, "h1", life=2)])
    assert found.voters == (VoterId("h0", 1), VoterId("h1", 2)), "and has one vote"


def test_voters_without_memory_vote_again_in_the_next_view() -> None:
    view = make_view(2, witness=True)
    found, _ = planned(view, reports(view, 3, 3), (), (), {"w": 4, "h1": 2, "h9": 7})

    assert found.voters == (VoterId("h0", 1), VoterId("h1", 2), VoterId("w", 4))


def test_the_latest_step_goes_to_all() -> None:
    view = make_view(3)
    found, reason = planned(view, reports(view, 4, 5, 4))

    assert found.base == StepBase(5, SamplePosition(0, 50), stable_step=4, behind=(0, 2))
    assert found.base.target == 5
    assert reason.endswith("step 5 goes on to those who had not applied it")


def test_a_step_is_completed_if_all_its_sums_are_there() -> None:
    view = make_view(3)
    said = reports(view, 4, 4)
    said[member(0)] = msgspec.structs.replace(said[member(0)], progress=progress(4, 1))
    found, _ = planned(view, said)
    assert (found.base.target, found.base.completes) == (4, False)

    said[member(1)] = msgspec.structs.replace(said[member(1)], progress=progress(4, 0))
    found, reason = planned(view, said)
    assert found.base == StepBase(4, SamplePosition(0, 40), 4, (), True, 1, (1, 0))
    assert found.base.target == 5
    assert reason.endswith("step 5 is completed: all its sums are there")

    said[member(1)] = msgspec.structs.replace(said[member(1)], progress=progress(4, 0, epoch=7))
    found, _ = planned(view, said)
    assert not found.base.completes, "sums of two views do not belong together"


def test_of_two_who_cannot_reach_each_other_one_goes() -> None:
    view = make_view(3, ranks_each=2)
    said = reports(view, 5, 5, 5, 5, 5, 5)

    def complain(slot: int, *others: int) -> None:
        unreachable = tuple(member(other) for other in others)
        said[member(slot)] = msgspec.structs.replace(said[member(slot)], unreachable=unreachable)

    complain(1, 4)
    assert planned(view, said)[0].members == tuple(member(slot) for slot in (0, 1, 2, 3, 5))
    complain(0, 4, 5)
    complain(1, 4, 5)
    assert planned(view, said)[0].members == tuple(member(slot) for slot in range(4)), "a host that is cut from another"
    complain(3, 4)
    complain(4, 0, 1, 3)
    complain(5, 0, 1)
    assert planned(view, said)[0].members == tuple(member(slot) for slot in range(4))
    del said[member(0)], said[member(1)]
    complain(5, 9)
    assert planned(view, said)[0].members == (member(2), member(3), member(5)), "who is gone is cut from nobody"


def test_there_is_no_view_without_the_state() -> None:
    view = msgspec.structs.replace(make_view(2), base=StepBase(5, stable_step=5))

    assert plan_view(view, {}) == (None, "no member that is left holds the state of step 5, which all had applied")
    assert plan_view(view, reports(view, 3, 3))[0] is None
    found, reason = plan_view(view, reports(view, 6, 6, is_leaving=True))
    assert found is None
    assert reason == "all members that are left and hold the state of step 5 want to leave"


def test_the_state_is_lost_when_all_are_dead_who_could_hold_it() -> None:
    view = msgspec.structs.replace(make_view(2, ranks_each=2), base=StepBase(5, stable_step=5))
    said = reports(view, 0, 0)

    assert explain_lost_state(view, said, {member(2)}) == "", "rank 3 has not said how far it is"
    assert explain_lost_state(view, reports(view, 0, 5), {member(2), member(3)}) == ""
    assert explain_lost_state(view, reports(view, 0, 5), {member(1), member(2), member(3)}), "it has died since"
    assert explain_lost_state(view, said, {member(2), member(3)}) == (
        "no process is left that holds the state of the training: "
        "rank(s) 2, 3 of view 1 have ended, and rank(s) 0, 1 had "
        "not received it, or were in the middle of an update. Start the job again from its last checkpoint"
    )
    assert "died" not in explain_lost_state(view, reports(view, 0, 0, 0, 4), ())
    assert explain_lost_state(make_view(2), reports(make_view(2), 0, 0), ()) == "", "at the beginning all hold it"


# -- voters ------------------------------------------------------------------------------------------------------------


def test_a_voter_promises_accepts_and_learns() -> None:
    view, value = make_view(3), planned(make_view(3), reports(make_view(3), 1, 1))[0]
    voter = Acceptor(VoterId("h1", 1), view)

    voter, reply = voter.handle(PrepareView(2, Ballot(2, 0)))
    assert reply == ViewPromise(2, Ballot(2, 0), 1)
    assert voter.handle(PrepareView(2, Ballot(1, 5)))[1] == BallotPreempted(2, Ballot(1, 5), Ballot(2, 0))
    assert voter.handle(AcceptView(2, Ballot(1, 5), value)) == (voter, BallotPreempted(2, Ballot(1, 5), Ballot(2, 0)))
    voter, reply = voter.handle(AcceptView(2, Ballot(2, 0), value))
    assert reply == ViewAccepted(2, Ballot(2, 0), 1)
    assert voter.handle(PrepareView(2, Ballot(3, 1)))[1] == ViewPromise(2, Ballot(3, 1), 1, Ballot(2, 0), value)
    assert voter.handle(PrepareView(3, Ballot(1, 0)))[1] == BehindView(3, 1)
    voter, reply = voter.handle(ViewDecided(2, value))
    assert (voter, reply) == (Acceptor(VoterId("h1", 1), value), None)
    assert voter.handle(PrepareView(2, Ballot(9, 9)))[1] == ViewDecided(2, value)
    assert voter.handle(PrepareView(3, Ballot(1, 0)))[1] == ViewPromise(3, Ballot(1, 0), 1)


def test_who_is_no_voter_of_a_view_does_not_vote() -> None:
    view = make_view(3)
    another_life = Acceptor(VoterId("h1", 2), view)

    shows_itself = ViewDecided(1, view)
    assert another_life.handle(PrepareView(2, Ballot(1, 0))) == (another_life, shows_itself)
    assert another_life.handle(AcceptView(2, Ballot(1, 0), view)) == (another_life, shows_itself)
    assert Acceptor(VoterId("h1", 2)).handle(PrepareView(2, Ballot(1, 0)))[1] == BehindView(2, 0)


def test_a_proposer_adopts_what_may_have_been_decided() -> None:
    view = make_view(3)
    one, other = (planned(view, reports(view, step, step))[0] for step in (1, 2))
    proposer = Proposer(view, Ballot(3, 0)).take(ViewPromise(2, Ballot(3, 0), 0, Ballot(1, 1), one))
    assert proposer.may_propose == (False, "host(s) 0 of 3 answered; 2 are needed")
    assert proposer.take(ViewPromise(2, Ballot(2, 0), 1)) == proposer, "an answer to another attempt"
    proposer = proposer.take(ViewPromise(2, Ballot(3, 0), 2, Ballot(2, 2), other)).propose(None)

    assert proposer.request() == AcceptView(2, Ballot(3, 0), other)
    proposer = proposer.take(ViewAccepted(2, Ballot(3, 0), 2)).take(ViewAccepted(2, Ballot(3, 0), 2))
    assert not proposer.is_decided
    assert proposer.take(ViewAccepted(2, Ballot(3, 0), 0)).is_decided


def test_slots_survive_the_death_of_a_writer_at_any_byte() -> None:
    view = make_view(2)
    voters = [Acceptor(VoterId("h1", 1), view, Ballot(attempt, 0)) for attempt in range(4)]
    slots = [bytearray(4096) for _ in range(NUM_SLOTS)]
    assert decode_slots(slots).acceptor is None
    for sequence, voter in enumerate(voters, 1):
        before = decode_slots(slots)
        assert before.sequence == sequence - 1
        data = encode_slot(sequence, voter)
        for written in range(len(data)):
            torn = [bytearray(slot) for slot in slots]
            torn[before.next_slot][:written] = data[:written]
            if torn[before.next_slot][: len(data)] == data:  # what was missing stood there already
                continue
            if before.acceptor is None and any(torn[before.next_slot]):
                with pytest.raises(WireError, match="must not vote"):
                    decode_slots(torn)
            else:
                assert decode_slots(torn) == before
        slots[before.next_slot][: len(data)] = data
        assert decode_slots(slots).acceptor == voter


def test_a_leader_learns_that_a_voter_has_lost_its_memory() -> None:
    each = running(0)
    each.handle(Evidence(member(1), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(7)))
    for slot in (2, 3):
        each.handle(Received(member(slot), MemberReport(2, member(slot), progress(7))))
    actions = each.handle(Received(VoterId("h1", 2), BehindView(2, 0)))
    assert actions == [SendTo(VoterId("h1", 2), ViewDecided(1, each.view))]
    each.handle(Received(VoterId("h0", 1), ViewPromise(2, Ballot(1, 0), 0)))
    each.handle(Received(VoterId("h0", 1), ViewAccepted(2, Ballot(1, 0), 0)))

    assert each.view.voters == (VoterId("h0", 1), VoterId("h1", 2))


def test_a_revoke_reaches_all_by_few_messages() -> None:
    assert [revoke_neighbours(rank, 4) for rank in range(4)] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert revoke_neighbours(0, 1) == []
    for size in (2, 7, 8, 100, 1024):
        dead = set(range(1, size, 3)) if size > 7 else set()
        reached, waiting = {0}, [0]
        while waiting:
            rank = waiting.pop()
            neighbours = revoke_neighbours(rank, size)
            assert len(neighbours) <= 2 * size.bit_length()
            waiting += [each for each in neighbours if each not in reached and each not in dead]
            reached.update(waiting)
        assert reached == set(range(size)) - dead


# -- members -----------------------------------------------------------------------------------------------------------


def running(me: int, view: View | None = None, **times: float) -> ElasticMember:
    """A member that runs steps in a view."""
    view = view or make_view(2, ranks_each=2)
    each = ElasticMember(member(me), view, ViewTimeouts(**times))
    assert BuildLayouts(view) in each.start()
    each.handle(LayoutsBuilt(view.epoch))
    if each.rank == 0:
        for other in view.members[1:]:
            actions = each.handle(Received(other, ViewInstalled(view.epoch, other)))
    else:
        actions = each.handle(Received(view.members[0], ViewGo(view.epoch)))
    assert RollTo(view) in actions
    assert RunView(view) in each.handle(Rolled(view.epoch))
    assert each.state is ElasticState.RUNNING
    return each


def messages(actions: list[Any], kind: type) -> list[Any]:
    return [action.receiver for action in actions if isinstance(action, SendTo) and isinstance(action.message, kind)]


def decide(each: ElasticMember, *members: int, epoch: int = 2) -> list[Any]:
    """A view of these members, as another leader has decided it."""
    hosts = [
        msgspec.structs.replace(host, members=tuple(one for one in host.members if one.slot in members))
        for host in each.view.hosts
    ]
    view = View.make(epoch, hosts, base=StepBase(), sizes=(1, 4))
    return each.handle(Received(each.view.members[0], ViewDecided(epoch, view)))


def test_evidence_stops_the_plane_and_tells_all() -> None:
    each = running(1)
    actions = each.handle(Evidence(member(2), Verdict.DEAD))

    assert each.state is ElasticState.CHANGING
    assert RevokePlane(1) in actions
    assert messages(actions, RevokeView) == [member(0), member(2), member(3)]
    assert messages(actions, PrepareView) == [], "rank 0 leads"
    assert [type(action) for action in actions] == [SendTo] * 3 + [RevokePlane] + [StartTimer] * 5
    assert each.handle(Evidence(member(3), Verdict.DEAD)) == []


def test_a_report_is_given_when_the_plane_is_stopped() -> None:
    each = running(1)
    asked = each.handle(Received(member(0), AskMember(2, member(0))))
    assert RevokePlane(1) in asked
    assert messages(asked, MemberReport) == []
    actions = each.handle(PlaneRevoked(1, progress(7)))

    assert actions == [SendTo(member(0), MemberReport(2, member(1), progress(7)))]
    assert each.handle(Received(member(0), AskMember(2, member(0)))) == actions, "it was lost"


def test_the_lowest_rank_that_is_left_leads() -> None:
    """It asks before its own plane is stopped, which may take a while, and waits for answers from then on."""
    each = running(1)
    actions = each.handle(Evidence(member(0), Verdict.DEAD))
    stop = actions.index(RevokePlane(1))
    assert all(isinstance(action, SendTo) for action in actions[:stop])
    timers = {action.timer: action.seconds for action in actions[stop + 1 :] if isinstance(action, StartTimer)}
    assert len(actions) == stop + 1 + len(timers) + 1, "that for those who are stuck is set twice"
    assert timers[ViewTimer.STUCK] == 5.0
    assert messages(actions, PrepareView) == [VoterId("h0", 1), VoterId("h1", 1)]
    assert messages(actions, AskMember) == [member(0), member(2), member(3)]
    each.handle(PlaneRevoked(1, progress(7)))
    for slot in (2, 3):
        each.handle(Received(member(slot), MemberReport(2, member(slot), progress(7))))
    proposed = each.handle(Received(VoterId("h0", 1), ViewPromise(2, Ballot(1, 1), 0)))
    assert messages(proposed, AcceptView) == [VoterId("h0", 1), VoterId("h1", 1)]
    decided = each.handle(Received(VoterId("h0", 1), ViewAccepted(2, Ballot(1, 1), 0)))

    assert each.view.members == (member(1), member(2), member(3))
    assert each.reason == "view 2 has 3 rank(s), without rank(s) 0; step 8 is run again"
    assert messages(decided, ViewDecided) == [member(0), member(2), member(3), VoterId("h0", 1), VoterId("h1", 1)]
    assert BuildLayouts(each.view) in decided


def test_a_leader_that_was_preempted_tries_again_later() -> None:
    each = running(0)
    each.handle(Evidence(member(3), Verdict.UNREACHABLE))
    each.handle(PlaneRevoked(1, progress(7)))
    actions = each.handle(Received(VoterId("h0", 1), BallotPreempted(2, Ballot(1, 0), Ballot(4, 2))))
    assert actions == [StartTimer(ViewTimer.BACK_OFF, 0.04)]
    assert each.handle(Evidence(member(3), Verdict.UNREACHABLE)) == [], "what happens meanwhile does not put it off"
    actions = each.handle(TimerFired(ViewTimer.BACK_OFF))

    assert SendTo(VoterId("h0", 1), PrepareView(2, Ballot(5, 0))) in actions


def test_a_leader_of_a_high_rank_does_not_back_off_until_the_change_is_given_up() -> None:
    """Another one, whose ballot was the highest, may be dead: seed 10060592 of the nightly schedules."""
    each = running(3, stuck=1.0)
    for slot in (0, 1, 2):
        each.handle(Evidence(member(slot), Verdict.UNREACHABLE))
    each.handle(PlaneRevoked(1, progress(7)))
    seconds = []
    for attempt in range(1, 8):
        ballot, higher = Ballot(2 * attempt - 1, 3), Ballot(2 * attempt, 0)
        actions = each.handle(Received(VoterId("h1", 1), BallotPreempted(2, ballot, higher)))
        seconds += [action.seconds for action in actions if isinstance(action, StartTimer)]
        each.handle(TimerFired(ViewTimer.BACK_OFF))

    assert seconds == pytest.approx([0.16, 0.64, *[1.75] * 5])


def building(me: int) -> ElasticMember:
    """A member that builds its first view; the times are five looks at who is silent, and one minute."""
    each = ElasticMember(member(me), make_view(2, ranks_each=2), ViewTimeouts(stuck=5.0, install=60.0))
    assert StartTimer(ViewTimer.PROGRESS, 1.0) in each.start()
    return each


def test_rank_0_leaves_out_who_builds_and_is_silent_and_waits_for_who_is_slow() -> None:
    each = building(0)
    each.handle(LayoutsBuilt(1))
    each.handle(Received(member(1), ViewInstalled(1, member(1))))  # it has nothing more to say
    for _ in range(100):
        actions = each.handle(TimerFired(ViewTimer.PROGRESS))
        assert messages(actions, ViewBuilding) == [member(1), member(2), member(3)]
        assert StartTimer(ViewTimer.PROGRESS, 1.0) in actions
        for slow in (2, 3):
            assert each.handle(Received(member(slow), ViewBuilding(1, member(slow)))) == []
    for _ in range(5):
        each.handle(TimerFired(ViewTimer.PROGRESS))
        each.handle(Received(member(3), ViewBuilding(1, member(3))))
    assert each.state is ElasticState.INSTALLING
    assert RevokePlane(1) in each.handle(TimerFired(ViewTimer.PROGRESS))
    assert each.lost == {member(2): Evidence(member(2), Verdict.STUCK, "silent while a view is built")}
    assert messages(each.handle(TimerFired(ViewTimer.PROGRESS)), RevokeView) == [], "it has begun"


@pytest.mark.parametrize("is_built", [False, True])
def test_rank_0_is_left_out_if_it_is_silent_for_twice_as_long(is_built: bool) -> None:
    """Also by who has built, and waits for its word."""
    each = building(2)
    if is_built:
        each.handle(LayoutsBuilt(1))
    for _ in range(10):
        assert messages(each.handle(TimerFired(ViewTimer.PROGRESS)), ViewBuilding) == [member(0)]
    each.handle(Received(member(0), ViewBuilding(1, member(0))))
    for _ in range(10):
        each.handle(TimerFired(ViewTimer.PROGRESS))
    assert each.state is ElasticState.INSTALLING
    assert RevokePlane(1) in each.handle(TimerFired(ViewTimer.PROGRESS))
    assert member(0) in each.lost


def leading() -> ElasticMember:
    """Rank 0 of four, where rank 3 is dead and rank 1 has reported."""
    each = running(0, stuck=5.0, install=20.0)
    each.handle(Evidence(member(3), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(7)))
    each.handle(Received(member(1), MemberReport(2, member(1), progress(7))))
    return each


def test_a_leader_leaves_out_who_is_silent_and_waits_for_who_is_in_an_update() -> None:
    each = leading()
    for _ in range(3):
        each.handle(Received(member(2), ViewBuilding(1, member(2))))
        each.handle(TimerFired(ViewTimer.STUCK))
        assert each.lost.keys() == {member(3)}
    each.handle(TimerFired(ViewTimer.STUCK))
    assert each.lost.keys() == {member(2), member(3)}, "it has said nothing since the last look"


def test_an_update_that_does_not_end_is_not_waited_for_longer_than_a_view_that_is_built() -> None:
    each = leading()
    for look in range(4):
        assert each.lost.keys() == {member(3)}, look
        each.handle(Received(member(2), ViewBuilding(1, member(2))))
        actions = each.handle(TimerFired(ViewTimer.STUCK))
        assert StartTimer(ViewTimer.STUCK, 5.0) in actions
    assert each.lost.keys() == {member(2), member(3)}


def test_who_is_in_an_update_says_so_when_it_is_asked_again() -> None:
    each, ask = running(1), Received(member(0), AskMember(2, member(0)))
    assert messages(each.handle(ask), ViewBuilding) == []
    for _ in range(2):
        assert each.handle(ask) == [SendTo(member(0), ViewBuilding(1, member(1)))]
    each.handle(PlaneRevoked(1, progress(7)))
    assert messages(each.handle(ask), ViewBuilding) == []


def test_who_leads_a_change_says_that_it_lives_and_the_others_wait_for_it() -> None:
    leader, each = leading(), running(1)
    for _ in range(2):
        actions = leader.handle(TimerFired(ViewTimer.PROGRESS))
        assert messages(actions, ViewBuilding) == [member(1), member(2), member(3)]
        assert StartTimer(ViewTimer.PROGRESS, 1.0) in actions
    each.handle(Received(member(0), AskMember(2, member(0))))
    each.handle(PlaneRevoked(1, progress(7)))
    assert messages(each.handle(TimerFired(ViewTimer.PROGRESS)), ViewBuilding) == []
    each.handle(Received(member(0), ViewBuilding(1, member(0))))
    each.handle(TimerFired(ViewTimer.STUCK))
    assert each.lost == {}
    each.handle(TimerFired(ViewTimer.STUCK))
    assert each.lost.keys() == {member(0)}


def test_who_builds_a_view_that_has_passed_learns_it() -> None:
    each = running(0)
    each.handle(Evidence(member(3), Verdict.DEAD))
    late = Received(member(1), ViewBuilding(1, member(1)))
    assert each.handle(late) == []
    each.handle(PlaneRevoked(1, progress(7)))
    decide(each, 0, 1, 2)
    assert each.handle(late) == [SendTo(member(1), ViewDecided(2, each.view))]
    assert each.handle(Received(member(1), ViewBuilding(3, member(1)))) == [SendTo(member(1), BehindView(3, 2))]


def test_who_was_stopped_is_killed_before_its_memory_is_used() -> None:
    each = running(1)
    each.handle(Evidence(member(0), Verdict.STUCK))
    each.handle(PlaneRevoked(1, progress(7)))
    actions = decide(each, 1, 2, 3)
    assert KillMember(member(0)) in actions
    assert StartTimer(ViewTimer.KILL, 0.5) in actions
    assert not any(isinstance(action, BuildLayouts) for action in actions)

    assert each.handle(Evidence(member(0), Verdict.DEAD)) == [BuildLayouts(each.view)]


def test_who_was_taken_for_stuck_and_has_reported_since_is_a_member_like_the_others() -> None:
    """Otherwise each view would be followed by another one: the two need never speak with each other."""
    each = running(1)
    each.handle(Evidence(member(0), Verdict.STUCK))
    each.handle(Evidence(member(3), Verdict.UNREACHABLE))
    each.handle(PlaneRevoked(1, progress(7)))
    decide(each, 0, 1, 2)

    assert each.state is ElasticState.INSTALLING
    assert not each.lost


def test_who_was_late_in_a_collective_is_left_out_soon_if_it_is_silent_in_the_change() -> None:
    each = running(0)
    assert each.handle(MembersLate(1, (member(1), member(2)))) == [], "their programs may be slow"
    assert each.handle(TimerFired(ViewTimer.LATE)) == []
    assert StartTimer(ViewTimer.LATE, 2.0) in each.handle(ChangeRequested(1, "a collective failed"))
    each.handle(PlaneRevoked(1, progress(7)))
    for silent, answering in ((1, 2), (2, 3)):
        assert member(silent) not in each.lost
        each.handle(Received(member(answering), MemberReport(2, member(answering), progress(7))))
    each.handle(TimerFired(ViewTimer.LATE))

    assert list(each.lost) == [member(1)]
    assert each.lost[member(1)].verdict is Verdict.STUCK
    decide(each, 0, 2, 3)
    assert each.handle(TimerFired(ViewTimer.LATE)) == [], "it was about the view before"


def test_where_rank_0_was_late_and_is_silent_the_next_one_leads() -> None:
    each = running(1)
    each.handle(ChangeRequested(1, "a collective failed"))
    assert each.handle(MembersLate(1, (member(0), member(1)))) == [StartTimer(ViewTimer.LATE, 2.0)]
    actions = each.handle(TimerFired(ViewTimer.LATE))

    assert messages(actions, AskMember) == [member(0), member(2), member(3)], "it may have woken"
    assert each.handle(MembersLate(2, (member(2),))) == [], "of a view that this member does not know"


def test_who_does_not_die_loses_its_memory() -> None:
    each = running(1)
    each.handle(Evidence(member(0), Verdict.STUCK))
    each.handle(PlaneRevoked(1, progress(7)))
    decide(each, 1, 2, 3)

    assert each.handle(TimerFired(ViewTimer.KILL)) == [UseFreshSegments((member(0),)), BuildLayouts(each.view)]
    assert each.handle(TimerFired(ViewTimer.KILL)) == []


def test_who_is_left_out_is_fenced() -> None:
    each = running(3)
    (end,) = decide(each, 0, 1, 2)

    assert end == EndProcess(
        FENCED_EXIT_CODE, "view 2 was decided without this process: it was silent, stopped or cut off"
    )
    assert each.state is ElasticState.FENCED
    assert each.handle(StepApplied(1)) == []


def test_who_was_a_member_does_not_come_back_as_the_candidate_that_it_was() -> None:
    """View 2 had it, view 3 was decided without it; a late `MemberReady` has brought its name into view 4."""
    each = running(3)
    each.handle(Received(member(0), RevokeView(1)))
    each.handle(PlaneRevoked(1, progress(9)))
    (end,) = decide(each, 0, 1, 2, 3, epoch=4)

    assert end.exit_code == FENCED_EXIT_CODE
    assert end.reason.startswith("view 3 was decided without this process")


def test_who_has_not_said_how_far_it_is_is_in_no_view() -> None:
    each = running(3)
    each.handle(Received(member(0), RevokeView(1)))
    decide(each, 0, 1, 2, 3)

    assert each.state is ElasticState.FENCED


def test_who_leaves_says_when_and_is_not_fenced() -> None:
    each, other = running(3), running(0)
    each.handle(StepApplied(4))
    actions = each.handle(LeaveRequested())
    assert each.state is ElasticState.LEAVING
    assert actions == [SendTo(member(slot), ChangeAt(1, 6, member(3))) for slot in range(3)]
    assert each.handle(StepApplied(5)) == []
    assert each.handle(StepApplied(6))[0] == SendTo(member(0), StepReached(1, 6, member(3)))
    assert each.state is ElasticState.PAUSED
    assert RevokePlane(1) in each.handle(Received(member(0), RevokeView(1)))
    each.handle(PlaneRevoked(1, progress(6)))
    assert decide(each, 0, 1, 2) == [EndProcess(0, "left in good order")]
    assert each.state is ElasticState.GONE

    other.handle(Received(member(3), ChangeAt(1, 6, member(3))))
    assert other.handle(StepApplied(5)) == []
    assert RevokePlane(1) not in other.handle(StepApplied(6))
    for slot in (3, 1):
        assert other.handle(Received(member(slot), StepReached(1, 6, member(slot)))) == []
    assert SendTo(member(2), ChangeAt(1, 6)) in other.handle(TimerFired(ViewTimer.RETRY)), "it may not know"
    assert RevokePlane(1) in other.handle(Received(member(2), StepReached(1, 6, member(2))))


def test_who_does_not_come_to_the_step_at_which_all_stop_is_not_waited_for() -> None:
    for event in (TimerFired(ViewTimer.STUCK), Evidence(member(2), Verdict.DEAD)):
        each = running(0)
        each.handle(Received(member(3), ChangeAt(1, 6, member(3))))
        assert each.state is ElasticState.RUNNING
        each.handle(StepApplied(6))
        assert each.state is ElasticState.PAUSED
        assert RevokePlane(1) in each.handle(event)
        assert member(1) not in each.lost


@pytest.mark.parametrize(
    ("base", "is_planned"),
    [
        (StepBase(6, stable_step=6), True),
        (StepBase(7, stable_step=7), True),
        (StepBase(6, stable_step=5, behind=(1,)), False),
        (StepBase(5, stable_step=5), False),
        (StepBase(6, stable_step=6, completes=True, sum_sources=(0,)), False),
    ],
)
def test_a_change_is_planned_if_all_who_go_on_have_stopped_at_the_step(base: StepBase, is_planned: bool) -> None:
    """Whoever has died meanwhile; and it still is if the next view cannot be run, but no other change is."""
    each = running(0)
    each.handle(Received(member(3), ChangeAt(1, 6, member(3))))
    each.handle(StepApplied(6))
    each.handle(Evidence(member(2), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(6)))
    adopt(each, base, 0, 1)
    assert each.is_planned == is_planned

    each.handle(ChangeRequested(2, "it cannot be built"))
    each.handle(PlaneRevoked(2, progress(base.target)))
    adopt(each, base if not base.completes else StepBase(base.target, stable_step=base.target), 0, 1)
    assert (each.view.epoch, each.is_planned) == (3, is_planned)
    each.handle(LayoutsBuilt(3))
    each.handle(Received(member(1), ViewInstalled(3, member(1))))
    assert RunView(each.view) in each.handle(Rolled(3))

    each.handle(Evidence(member(1), Verdict.DEAD))
    each.handle(PlaneRevoked(3, progress(base.target)))
    adopt(each, StepBase(base.target, stable_step=base.target), 0)
    assert not each.is_planned


def adopt(each: ElasticMember, base: StepBase, *members: int) -> None:
    """Take in the next view: of these members, with this base."""
    hosts = [
        msgspec.structs.replace(host, members=tuple(one for one in host.members if one.slot in members))
        for host in each.view.hosts
    ]
    hosts = [host for host in hosts if host.members]
    view = View.make(each.view.epoch + 1, hosts, base=base, sizes=(1, 4))
    each.handle(Received(each.view.members[-1], ViewDecided(view.epoch, view)))


def test_rank_0_learns_from_others_at_which_step_to_stop() -> None:
    each = running(0)
    each.handle(StepApplied(5))
    assert each.handle(Received(member(1), StepReached(1, 6, member(1)))) == []
    each.handle(StepApplied(6))
    assert each.state is ElasticState.PAUSED


def test_change_that_is_asked_for_keeps_the_members() -> None:
    each = running(0)
    actions = each.handle(ChangeRequested(1, "an engine gave up"))
    assert RevokePlane(1) in actions
    assert SendTo(member(1), RevokeView(1)) in actions
    assert each.handle(ChangeRequested(1, "another one did, too")) == []
    each.handle(PlaneRevoked(1, progress(7)))
    decide(each, 0, 1, 2, 3)

    assert each.view.epoch == 2
    assert each.view.members == tuple(member(slot) for slot in range(4))
    assert each.state is ElasticState.INSTALLING


def test_change_because_of_a_view_that_has_passed_is_none() -> None:
    each = running(0)
    each.handle(Evidence(member(3), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(7)))
    decide(each, 0, 1, 2)

    assert each.handle(ChangeRequested(1, "its engine has lost rank 3")) == []
    assert RevokePlane(2) in each.handle(ChangeRequested(2, "its build failed"))


def test_messages_of_a_view_that_has_passed_are_answered_with_the_present_one() -> None:
    each = running(0)
    each.handle(Evidence(member(3), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(7)))
    decide(each, 0, 1, 2)
    decided = ViewDecided(2, each.view)

    for message in (RevokeView(1), AskMember(2, member(3)), ViewInstalled(1, member(3)), ChangeAt(1, 5)):
        assert SendTo(member(3), decided) in each.handle(Received(member(3), message))
    assert each.handle(Received(member(3), RevokeView(4))) == [SendTo(member(3), BehindView(4, 2))]


def test_a_change_without_a_quorum_ends_with_a_reason() -> None:
    each = running(2, make_view(2, ranks_each=2))
    for slot in (0, 1):
        each.handle(Evidence(member(slot), Verdict.UNREACHABLE))
    each.handle(PlaneRevoked(1, progress(7)))
    each.handle(Received(VoterId("h1", 1), ViewPromise(2, Ballot(1, 2), 1)))
    (end,) = each.handle(TimerFired(ViewTimer.CHANGE))

    assert end.exit_code == 1
    assert end.reason == (
        "no view could follow view 1: host(s) 1 of 2 answered, half of them without host 0, that of rank 0: a witness "
        "would decide (--witness-dir) (rank 0 cannot be reached, rank 1 cannot be reached)"
    )


def test_too_few_members_wait_for_others() -> None:
    view = msgspec.structs.replace(make_view(2), min_size=3)
    each = ElasticMember(member(0), view)
    each.start()
    each.handle(LayoutsBuilt(1))
    each.handle(Received(member(1), ViewInstalled(1, member(1))))
    actions = each.handle(Rolled(1))
    assert actions == [StartTimer(ViewTimer.WAIT, 600.0)]
    assert each.state is ElasticState.WAITING

    assert RevokePlane(1) in each.handle(Received(member(9, 2), ready(9, "h1")))
    assert each.state is ElasticState.CHANGING
    other = ElasticMember(member(0), view)
    other.start()
    other.handle(LayoutsBuilt(1))
    other.handle(Received(member(1), ViewInstalled(1, member(1))))
    other.handle(Rolled(1))
    *_, end = other.handle(TimerFired(ViewTimer.WAIT))
    assert end.reason == "2 rank(s) are left, steps need 3, and no more came in 600 s (HOROVOD_ELASTIC_TIMEOUT)"


def waiting(slot: int, view: View) -> ElasticMember:
    """A member of a view that is too small."""
    each = ElasticMember(member(slot), view)
    each.start()
    each.handle(LayoutsBuilt(1))
    for other in view.members:
        each.handle(Received(other, ViewInstalled(1, other) if slot == 0 else ViewGo(1)))
    each.handle(Rolled(1))
    assert each.state is ElasticState.WAITING
    return each


def test_a_host_that_newcomers_do_not_reach_is_looked_at_once_while_members_wait() -> None:
    """All its processes may be stopped, and no step shows that; or the newcomers are cut off."""
    view = msgspec.structs.replace(make_view(3), min_size=4)
    newcomers = [cut_off(slot, "h2") for slot in (8, 9)]
    for slot, seconds in ((0, 5.0), (1, 10.0)):  # rank 0 may be stopped itself
        each = waiting(slot, view)
        assert each.handle(Received(member(8, 2), newcomers[0])) == [], "without host 2 there are too few"
        timer = StartTimer(ViewTimer.STUCK, seconds)
        assert each.handle(Received(member(9, 2), newcomers[1])) == [timer]
        assert each.handle(Received(member(9, 2), newcomers[1])) == [], "it is not put off"
        assert RevokePlane(1) in each.handle(TimerFired(ViewTimer.STUCK))
    each = waiting(0, view)
    for newcomer in newcomers:
        each.handle(Received(newcomer.host.members[0].id, newcomer))
    answered = msgspec.structs.replace(newcomers[1], unreached=())
    assert RevokePlane(1) in each.handle(Received(member(9, 2), answered)), "there are enough with all hosts"


def cut_off(slot: int, *hosts: str, epoch: int = 1) -> MemberReady:
    return msgspec.structs.replace(ready(slot, "h0"), unreached=hosts, epoch=epoch)


def test_newcomers_that_are_cut_off_cause_one_change() -> None:
    hosts = SilentHosts()
    view = msgspec.structs.replace(make_view(3), min_size=4)
    newcomers = [cut_off(slot, "h2") for slot in (7, 8, 9)]
    assert hosts.newcomers(view, newcomers[:1], 4) == set()
    assert hosts.newcomers(view, newcomers[:2], 4) == {member(7, 2), member(8, 2)}
    hosts.note_change([*newcomers[:2], cut_off(9)])
    assert hosts.newcomers(view, newcomers[:2], 4) == set()
    assert hosts.newcomers(view, newcomers, 4) == {member(9, 2)}, "it had reached all"


def test_a_change_for_newcomers_that_another_member_has_begun_is_not_begun_again() -> None:
    view = msgspec.structs.replace(make_view(3), min_size=4)
    each = waiting(1, view)
    for newcomer in (cut_off(8, "h2"), cut_off(9, "h2")):
        each.handle(Received(newcomer.host.members[0].id, newcomer))
    assert RevokePlane(1) in each.handle(Received(member(0), RevokeView(1)))
    again = wait_in_next_view(each)
    assert again == [], "the timer of those who wait goes on, and all have been asked"
    assert each.handle(Received(member(9, 2), cut_off(9, "h2", epoch=2))) == []
    assert each.handle(Received(member(7, 2), cut_off(7, "h2", epoch=2))) == [StartTimer(ViewTimer.STUCK, 10.0)], (
        "another one"
    )


def wait_in_next_view(each: ElasticMember) -> list[Any]:
    """The next view has the same members, and is too small, too; returns what they do in it."""
    epoch = each.view.epoch
    each.handle(PlaneRevoked(epoch, progress(0)))
    following = View.make(epoch + 1, each.view.hosts, base=StepBase(), sizes=(each.view.min_size, each.view.max_size))
    each.handle(Received(member(0), ViewDecided(epoch + 1, following)))
    each.handle(LayoutsBuilt(epoch + 1))
    each.handle(Received(member(0), ViewGo(epoch + 1)))
    return each.handle(Rolled(epoch + 1))


def test_the_time_for_more_members_is_not_put_off_by_changes_among_too_few() -> None:
    view = msgspec.structs.replace(make_view(3), min_size=4)
    each = waiting(1, view)
    each.handle(Received(member(0), RevokeView(1)))
    assert wait_in_next_view(each) == []
    *_, end = each.handle(TimerFired(ViewTimer.WAIT))
    assert end.reason == "3 rank(s) are left, steps need 4, and no more came in 600 s (HOROVOD_ELASTIC_TIMEOUT)"

    each = waiting(1, view)
    each.handle(Received(member(0), RevokeView(1)))
    assert each.handle(TimerFired(ViewTimer.WAIT)) == [StartTimer(ViewTimer.CHANGE, 10.0)], "it may bring enough"
    *_, end = wait_in_next_view(each)
    assert end.exit_code == 1


def test_a_change_that_begins_when_the_time_for_more_members_is_over_has_no_time_of_its_own() -> None:
    view = msgspec.structs.replace(make_view(3), min_size=4)
    each = waiting(1, view)
    assert StartTimer(ViewTimer.CHANGE, 600.0) in each.handle(Received(member(0), RevokeView(1)))
    each.handle(PlaneRevoked(1, progress(0)))
    following = View.make(2, view.hosts, base=StepBase(), sizes=(4, view.max_size))
    each.handle(Received(member(0), ViewDecided(2, following)))
    assert each.handle(TimerFired(ViewTimer.WAIT)) == [], "the view is built"
    assert StartTimer(ViewTimer.CHANGE, 10.0) in each.handle(Evidence(member(0), Verdict.DEAD))
    (end,) = each.handle(TimerFired(ViewTimer.CHANGE))
    assert end.exit_code == 1


def test_a_change_without_a_view_and_a_view_with_too_few_members_are_one_wait() -> None:
    view = make_view(3)
    each = running(1, view)
    each.required_size = 4
    assert StartTimer(ViewTimer.WAIT, 600.0) in each.handle(ChangeRequested(1, "an engine gave up"))
    assert wait_in_next_view(each) == [], "the timer goes on"
    assert each.state is ElasticState.WAITING


def test_who_has_come_while_others_wait_ends_with_them() -> None:
    view = msgspec.structs.replace(make_view(3), min_size=4)
    first = waiting(0, view)
    actions = first.handle(TimerFired(ViewTimer.WAIT))
    over = WaitOver(1, "3 rank(s) are left, steps need 4, and no more came in 600 s (HOROVOD_ELASTIC_TIMEOUT)")
    assert actions == [SendTo(member(1), over), SendTo(member(2), over), EndProcess(1, over.reason)]
    newcomer = waiting(2, view)
    assert newcomer.handle(Received(member(0), WaitOver(0, "another view"))) == []
    assert newcomer.handle(Received(member(0), over)) == [EndProcess(1, over.reason)]
    others = running(2, make_view(3))
    assert others.handle(Received(member(0), over)) == [], "there are enough by now"


def test_who_hears_that_the_wait_is_over_before_it_waits_ends_when_it_would_wait() -> None:
    view = msgspec.structs.replace(make_view(3), min_size=4)
    over = WaitOver(1, "no more came")
    newcomer = ElasticMember(member(2), view)
    newcomer.start()
    newcomer.handle(LayoutsBuilt(1))
    newcomer.handle(Received(member(0), ViewGo(1)))
    assert newcomer.state is ElasticState.ROLLING
    assert newcomer.handle(Received(member(0), over)) == [], "the state is still being brought to it"
    *_, end = newcomer.handle(Rolled(1))
    assert end == EndProcess(1, "3 rank(s) are left, steps need 4, and no more came in 600 s (HOROVOD_ELASTIC_TIMEOUT)")


def test_who_hears_in_a_change_that_the_wait_is_over_only_finds_out_who_is_stuck() -> None:
    view = msgspec.structs.replace(make_view(3), min_size=4)
    each = waiting(1, view)
    each.handle(Received(member(0), RevokeView(1)))
    over = WaitOver(1, "no more came")
    assert each.handle(Received(member(2), over)) == [StartTimer(ViewTimer.CHANGE, 10.0)]
    *_, end = wait_in_next_view(each)
    assert end.exit_code == 1


def test_the_time_for_more_members_begins_anew_when_there_were_enough() -> None:
    view = msgspec.structs.replace(make_view(3), min_size=4)
    for fires in (False, True):
        each = waiting(1, view)
        each.handle(Received(member(0), RevokeView(1)))
        if fires:
            each.handle(TimerFired(ViewTimer.WAIT))
        each.view = msgspec.structs.replace(view, min_size=1)
        wait_in_next_view(each)
        assert each.state is ElasticState.RUNNING
        assert each.handle(TimerFired(ViewTimer.WAIT)) == []
        assert each.state is ElasticState.RUNNING
        assert StartTimer(ViewTimer.WAIT, 600.0) in each.handle(Received(member(0), RevokeView(2)))
        each.required_size = 4
        assert wait_in_next_view(each) == []
        assert each.state is ElasticState.WAITING


def test_all_end_at_once_when_those_are_dead_who_held_the_state() -> None:
    view = msgspec.structs.replace(make_view(1, ranks_each=4), base=StepBase(5, stable_step=5))
    each = running(1, view)
    each.handle(Evidence(member(0), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(0)))
    each.handle(Received(VoterId("h0", 1), ViewPromise(2, Ballot(1, 1), 0)))
    each.handle(Received(member(3), MemberReport(2, member(3), progress(0))))
    each.handle(Evidence(member(2), Verdict.UNREACHABLE))
    assert each.state is ElasticState.CHANGING, "rank 2 may hold it"
    actions = each.handle(Evidence(member(2), Verdict.DEAD))

    assert messages(actions, StateLost) == [member(0), member(2), member(3)]
    assert isinstance(actions[-1], EndProcess)
    assert actions[-1].exit_code == 1
    assert "no process is left that holds the state" in actions[-1].reason
    assert each.state is ElasticState.STOPPED


def test_without_a_quorum_nobody_says_that_the_state_is_lost() -> None:
    """The others may have gone on in another view."""
    each = running(1, msgspec.structs.replace(make_view(3), base=StepBase(5, stable_step=5)))
    each.handle(Evidence(member(0), Verdict.DEAD))
    each.handle(Evidence(member(2), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(0)))
    each.handle(Received(VoterId("h1", 1), ViewPromise(2, Ballot(1, 1), 1)))
    assert each.state is ElasticState.CHANGING


def test_who_is_told_that_the_state_is_lost_ends_unless_it_holds_it() -> None:
    view = msgspec.structs.replace(make_view(1, ranks_each=4), base=StepBase(5, stable_step=5))
    told = Received(member(1), StateLost(2, "why"))
    for applied, end in ((0, [EndProcess(1, "why")]), (5, [])):
        each = running(3, view)
        each.handle(Received(member(1), RevokeView(1)))
        assert each.handle(told) == [], "it has not said how far it is"
        each.handle(PlaneRevoked(1, progress(applied)))
        assert each.handle(Received(member(1), StateLost(3, "another view"))) == []
        assert each.handle(told) == end


def test_where_the_program_is_done_the_state_is_not_missed() -> None:
    """Members that have finished end; who has not read the state then ends by itself."""
    view = msgspec.structs.replace(make_view(1, ranks_each=2), base=StepBase(5, stable_step=5))
    each = running(1, view)
    each.is_ending = True
    each.handle(Evidence(member(0), Verdict.DEAD))
    each.handle(PlaneRevoked(1, progress(0)))
    assert each.handle(Received(VoterId("h0", 1), ViewPromise(2, Ballot(1, 1), 0))) == []
    assert each.handle(Received(member(0), StateLost(2, "why"))) == []


def test_rank_0_names_a_step_for_those_who_come() -> None:
    each = running(0, msgspec.structs.replace(make_view(2), max_size=2))
    each.handle(StepApplied(3))
    actions = each.handle(Received(member(9, 2), ready(9, "h1")))
    assert messages(actions, ChangeAt) == [], "there is no place for more"

    each = running(0, msgspec.structs.replace(make_view(2), max_size=3))
    each.handle(StepApplied(3))
    actions = each.handle(Received(member(9, 2), ready(9, "h1")))
    assert actions == [SendTo(member(1), ChangeAt(1, 5))]
    each.handle(StepApplied(5))
    assert RevokePlane(1) in each.handle(Received(member(1), StepReached(1, 5, member(1))))


def test_a_candidate_is_ready_with_the_right_digest_and_joins() -> None:
    view = make_view(2)
    host = ready(9, "h1").host
    each = ElasticCandidate(member(9, 2), host)
    assert each.handle(CopyStarted(view)) == []
    assert each.state is CandidateState.COPYING
    assert each.handle(Copied(4, matches=False)) == []
    each.handle(Evidence(member(1), Verdict.DEAD))
    actions = each.handle(Copied(4, matches=True))
    assert actions == [SendTo(member(0), MemberReady(1, host, 4, ("h0",))), StartTimer(ViewTimer.RETRY, 0.1)]
    assert each.handle(TimerFired(ViewTimer.RETRY)) == actions, "member 1 is dead"
    other = planned(view, reports(view, 4, 4))[0]
    actions = each.handle(Received(member(0), ViewDecided(2, other)))
    assert actions[0] == SendTo(member(0), MemberReady(2, host, 4)), "its host has answered"
    joined = planned(other, reports(other, 5, 5), [ready(9, "h1")])[0]

    assert each.handle(Received(member(0), ViewDecided(3, joined))) == [JoinView(joined)]
    assert each.state is CandidateState.JOINED


def test_a_candidate_says_which_hosts_have_not_answered_it() -> None:
    view = make_view(2, ranks_each=2)
    host = ready(9, "h5").host
    each = ElasticCandidate(member(9, 2), host)
    each.handle(CopyStarted(view))

    def said(actions: Sequence[Any]) -> dict[MemberId, tuple[str, ...]]:
        return {each.receiver: each.message.unreached for each in actions if isinstance(each, SendTo)}

    first = said(each.handle(Copied(4, matches=True)))
    assert set(first.values()) == {("h0", "h1")}
    assert first.keys() >= {member(0)}
    assert first.keys() & {member(2), member(3)}, "a member of the other host is asked, too"
    assert each.handle(Received(member(0), BehindView(1, 1))) == [], "another host was asked"
    assert said(each.handle(Received(member(2), BehindView(1, 1))))[member(0)] == ()
    each.handle(Evidence(member(2), Verdict.UNREACHABLE))
    again = said(each.handle(TimerFired(ViewTimer.RETRY)))
    assert again[member(0)] == ("h1",)
    assert {member(2), member(3)} & again.keys(), "it asks on"
    assert said(each.handle(Received(member(3), BehindView(1, 1))))[member(0)] == ()


def test_a_candidate_asks_few_hosts_at_once() -> None:
    view = make_view(MAX_ASKED_HOSTS + 2)
    each = ElasticCandidate(member(99, 2), ready(99, "h99").host)
    each.handle(CopyStarted(view))
    actions = each.handle(Copied(4, matches=True))
    num_unreached = [len(actions[0].message.unreached)]
    for number in range(view.size):
        actions = each.handle(Received(member(number), BehindView(1, 1)))
        num_unreached += [len(actions[0].message.unreached)] if actions else []
    assert num_unreached == [MAX_ASKED_HOSTS, 2, 0]


def test_candidates_are_taken_when_they_reach_all_hosts() -> None:
    """Of a view in which two cannot reach each other one is left out, and whatever is started in its place."""
    view = make_view(2)
    first = running(0, view)
    unready, is_ready = (msgspec.structs.replace(ready(9, "h5"), unreached=names) for names in (("h0", "h1"), ("h0",)))
    answer = SendTo(member(9, 2), BehindView(1, 1))
    assert first.handle(Received(member(9, 2), unready)) == [answer], "it can be reached, and does not stop"
    unready = msgspec.structs.replace(unready, unreached=("h1",))
    assert first.handle(Received(member(9, 2), unready)) == []
    found, _ = planned(view, reports(view, 3, 3), [unready])
    assert found.members == view.members
    found, _ = planned(view, reports(view, 3), [unready], {member(1)})
    assert found.members == (member(0), member(9, 2)), "the host that it cannot reach is not there any more"
    assert first.handle(Received(member(9, 2), is_ready)) == [answer, SendTo(member(1), ChangeAt(1, 2))], "it is heard"


def test_every_message_travels() -> None:
    view = make_view(2, witness=True)
    value = planned(view, reports(view, 1, 2))[0]
    said: list[Any] = [
        PrepareView(2, Ballot(1, 0)),
        ViewPromise(2, Ballot(2, 0), 1, Ballot(1, 0), value),
        AcceptView(2, Ballot(1, 0), value),
        ViewAccepted(2, Ballot(1, 0), 1),
        BallotPreempted(2, Ballot(1, 0), Ballot(2, 0)),
        ViewDecided(2, value),
        BehindView(2, 0),
        AskMember(2, member(0)),
        MemberReport(2, member(0), progress(3, 1), (member(1),), (member(2),), True),
        RevokeView(1, (member(1),)),
        ViewInstalled(1, member(1)),
        ViewGo(1),
        ChangeAt(1, 7, member(0)),
        ready(3, "h1"),
        WaitOver(1, "why"),
    ]
    assert [VIEW_CODEC.decode(VIEW_CODEC.encode(message)) for message in said] == said
    assert view.witness == Witness("w", 1, "")
