"""Elastic jobs under random schedules of faults, and each rule that is broken on purpose is found.

REIGEN_SIM_SEED=<seed> replays one schedule. `views_nightly` plays a million of them.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reigen.cluster.membership.views import leader, planning
from reigen.cluster.membership.views import member as member_module
from reigen.cluster.membership.views.candidate import ElasticCandidate
from reigen.cluster.membership.views.events import (
    Copied,
    EndProcess,
    Evidence,
    PlaneRevoked,
    RevokePlane,
    Rolled,
    RunView,
    StartTimer,
    Verdict,
)
from reigen.cluster.membership.views.installation import Installation
from reigen.cluster.membership.views.late_members import MemberShortage
from reigen.cluster.membership.views.member import ElasticMember, ElasticState
from reigen.cluster.membership.views.messages import AskMember, HeldSums, MemberReport, RevokeView, StepProgress
from reigen.cluster.membership.views.paxos import Acceptor
from reigen.cluster.membership.views.record import MemberId, SamplePosition, StepBase, View, ViewHost, VoterId
from tests.unit.cluster.views_nightly import (
    BLOCK_SIZE,
    Block,
    blocks_to_play,
    plan_of,
    play_block,
    read_blocks,
    summarize,
)
from tests.unit.cluster.views_simulator import (
    DEADLINE_SECONDS,
    NUM_BUCKETS,
    TIMEOUTS,
    Host,
    Process,
    Rules,
    Simulator,
    make_plan,
    play,
)

_REPLAY = os.environ.get("REIGEN_SIM_SEED")
#: All that may happen in a schedule, and must in some.
EVENTS = {
    *("cut", "one way", "host", "kill", "stop", "pause", "tear", "forget", "link", "join", "leave", "request"),
    *("all leave", "slow build", "step", "view", "completed", "shot", "fresh segments", "joined", "read"),
    *("gone", "fenced", "stopped", "goes on", "ends"),
}

#: Schedules beyond the first ones in which a process takes fresh segments, which is rare.
FRESH_SEGMENTS = (1195, 1928, 4079)


#: All ways from one state to another.
TRANSITIONS = {
    ("lobby", "copying"), ("copying", "ready"), ("ready", "joined"),
    ("installing", "rolling"), ("rolling", "running"), ("rolling", "waiting"), ("rolling", "leaving"),
    ("running", "leaving"), ("running", "paused"), ("leaving", "paused"), ("paused", "changing"),
    ("running", "changing"), ("leaving", "changing"), ("waiting", "changing"),
    ("installing", "changing"), ("rolling", "changing"),
    ("changing", "installing"), ("changing", "gone"), ("changing", "fenced"), ("changing", "stopped"),
}  # fmt: skip


def run_schedules(seeds: Sequence[int]) -> tuple[Counter[str], set[tuple[str, str]]]:
    """Play schedules; returns in how many of them each thing has happened, and all transitions of states."""
    seen: Counter[str] = Counter()
    transitions: set[tuple[str, str]] = set()
    for seed in seeds:
        simulator = play(seed)
        seen.update(dict.fromkeys(simulator.seen, 1))
        transitions |= simulator.transitions
    return seen, transitions


def test_schedules() -> None:
    seeds = (*range(1000), *FRESH_SEGMENTS)
    seen, transitions = run_schedules(seeds if _REPLAY is None else [int(_REPLAY)])

    if _REPLAY is None:
        assert set(seen) == EVENTS
        assert min(seen[what] for what in EVENTS - {"fresh segments"}) >= 15, seen
        assert transitions >= TRANSITIONS


def test_schedules_with_more_hosts_and_faults() -> None:
    """As `views_nightly` plays them: from six members on, there are some that never speak with each other."""
    for seed in (4 * number for number in range(100)):
        Simulator(seed, plan=plan_of(seed)).run()
    # views without end, a leader that was never heard, a slow build, a newcomer that never read the state, a back-off
    for seed in (1011392, 1016576, 1019888, 1025748, 1042056, 1073161, 1102008, 10060592):
        Simulator(seed, plan=plan_of(seed)).run()


def seconds_after_a_death() -> float:
    """Return the longest time from a death until all run again, where no message is lost and no host is silent."""
    longest = 0.0
    for seed in range(100):
        plan = make_plan(random.Random(seed))
        plan.faults, plan.loss, plan.travel, plan.min_size = ["kill"], 0.0, 0.002, 1
        longest = max(longest, Simulator(seed, plan=plan).run().resume_seconds)
    return longest


def test_members_go_on_soon_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others wait for is evidence (0.1 s at most), and a few messages; without evidence, for a deadline."""
    assert seconds_after_a_death() < 0.25

    on_evidence = ElasticMember._on_evidence

    def doubt(self: ElasticMember, event: Evidence) -> Any:
        return [] if event.verdict is Verdict.DEAD else on_evidence(self, event)

    monkeypatch.setitem(ElasticMember._HANDLERS, Evidence, doubt)
    assert seconds_after_a_death() > 1.0


class StopsInBuild(Simulator):
    """One member, which the seed chooses, is stopped for ever when it begins to build the second view."""

    is_stopped, stopped_rank = False, 0

    def _build(self, process: Process, view: View) -> None:
        super()._build(process, view)
        if view.epoch == 2 and view.ranks[process.id] == self.stopped_rank:
            self.is_stopped = True
            process.waiting = deque()

    def _wake(self, process: Process) -> None:
        """It stays as it is."""


def seconds_after_a_stop_in_a_build() -> tuple[float, float]:
    """Return the longest time from a death until all run again, where one is stopped: rank 0, and another one."""
    longest = {True: 0.0, False: 0.0}
    for seed in range(40):
        plan = make_plan(random.Random(seed))
        plan.hosts, plan.min_size, plan.max_size = ((3,), (4,), (5,))[seed % 3], 1, 5
        plan.faults, plan.loss, plan.travel = ["kill"], 0.0, 0.002
        simulator = StopsInBuild(seed, plan=plan)
        simulator.stopped_rank = seed % 2
        simulator.run()
        assert simulator.is_stopped
        longest[seed % 2 == 0] = max(longest[seed % 2 == 0], simulator.resume_seconds)
    return longest[True], longest[False]


def test_who_is_silent_while_a_view_is_built_is_soon_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the deadline of those who build.

    Rank 0 is left out after twice the time, and one more where its successor hears of it by others: it asks for itself.
    """
    of_rank_0, of_others = seconds_after_a_stop_in_a_build()
    assert of_others < 1.6 * TIMEOUTS.stuck
    assert of_rank_0 < 4.0 * TIMEOUTS.stuck

    monkeypatch.setattr(Installation, "find_silent", lambda *_: [])
    assert min(seconds_after_a_stop_in_a_build()) > TIMEOUTS.install


def play_slow_builds() -> Counter[str]:
    """Let a member die where all others build for long, but not too long; returns numbers of views and of the dead."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        plan = make_plan(random.Random(seed))
        plan.hosts, plan.min_size, plan.max_size = ((3,), (2, 1, 1), (4,))[seed % 3], 1, 4
        plan.faults, plan.loss = ["kill"], 0.0
        simulator = Simulator(seed, plan=plan)
        for process in simulator.processes.values():
            process.build_seconds = 0.8 * TIMEOUTS.install
        simulator.run()
        seen["views"] += max(simulator.views) - 1
        seen["dead"] += sum(not process.is_alive for process in simulator.processes.values())
    return seen


def test_who_builds_for_long_and_says_so_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = play_slow_builds()
    assert (seen["views"], seen["dead"]) == (40, 40)

    monkeypatch.setattr(Installation, "hear", lambda *_: None)
    assert play_slow_builds()["views"] > 80


def test_where_all_leave_all_end_in_good_order() -> None:
    for seed in range(60):
        plan = make_plan(random.Random(seed))
        plan.faults, plan.loss = ["all leave"], (0.0, 0.1)[seed % 2]
        simulator = Simulator(seed, plan=plan).run()
        assert {each.member.state for each in simulator.processes.values()} == {ElasticState.GONE}, seed


def test_one_cut_connection_costs_one_host() -> None:
    """The others reach both of its ends, and the network does not heal."""
    for seed in range(60):
        plan = make_plan(random.Random(seed))
        plan.hosts = ((1, 1, 1), (2, 1, 1), (1, 1, 1, 1))[seed % 3]
        plan.faults, plan.heals, plan.loss, plan.min_size, plan.max_size = ["link"], False, 0.0, 1, sum(plan.hosts)
        simulator = Simulator(seed, plan=plan).run()
        assert simulator.seen["goes on"], seed
        assert len(simulator.views[max(simulator.views)].hosts) == len(plan.hosts) - 1, seed
        assert max(simulator.views) == 2, "by one change"


class LosesHolders(Simulator):
    """All who hold the state are killed, or cut off for a while, when a newcomer reads it."""

    lost_at, ended_seconds, is_cut = 0.0, 0.0, False

    def _begin_step(self, process: Process, view: View) -> None:
        super()._begin_step(process, view)
        if process.is_reading and not self.lost_at:
            self.lost_at = self.now
            self.at(0.0, lambda: self._lose_holders(view))

    def _lose_holders(self, view: View) -> None:
        holders = [self.processes[member] for member in view.members if not self.processes[member].is_reading]
        if self.is_cut:
            names = {holder.host for holder in holders}
            self.cuts |= {pair for name in names for other in self.hosts for pair in ((name, other), (other, name))}
            self._see_cuts()
            self.at(5 * TIMEOUTS.stuck, self.cuts.clear)
        else:
            for holder in holders:
                self._die(holder)

    def _carry(self, process: Process, actions: list[Any]) -> None:
        super()._carry(process, actions)
        if any(isinstance(action, EndProcess) for action in actions):
            self.ended_seconds = self.now - self.lost_at


def lose_holders(*, is_cut: bool = False) -> list[LosesHolders]:
    """Let jobs lose all holders of the state; returns those that did."""
    found: list[LosesHolders] = []
    for seed in range(60):
        plan = make_plan(random.Random(seed))
        plan.hosts, plan.faults, plan.loss, plan.travel = ((2,), (1,), (2, 1))[seed % 3], ["join"] * 2, 0.0, 0.002
        plan.witness, plan.min_size, plan.max_size, plan.fault_seconds = False, 1, 5, 1.0
        simulator = LosesHolders(seed, plan=plan)
        simulator.is_cut = is_cut
        simulator.run()
        if simulator.lost_at and simulator.ended_seconds:
            found.append(simulator)
    assert len(found) > 10
    return found


def test_a_job_whose_state_is_lost_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(each.ended_seconds for each in lose_holders()) < 0.5

    monkeypatch.setattr(leader, "explain_lost_state", lambda *_: "")
    assert max(each.ended_seconds for each in lose_holders()) > TIMEOUTS.change


def exit_reasons(simulators: Sequence[Simulator]) -> str:
    return "\n".join(process.exit.reason for each in simulators for process in each.processes.values() if process.exit)


def test_a_state_that_cannot_be_reached_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no process is left" not in exit_reasons(lose_holders(is_cut=True))

    explain = planning.explain_lost_state

    def give_up(view: View, reports: dict[MemberId, MemberReport], dead: Any) -> str:
        return explain(view, reports, {*dead, *(member for member in view.members if member not in reports)})

    monkeypatch.setattr(leader, "explain_lost_state", give_up)
    assert "no process is left" in exit_reasons(lose_holders(is_cut=True))


def wait_beside_newcomers_that_are_cut_off(seed: int) -> tuple[int, float]:
    """Let four members wait for a fifth, while two newcomers do not reach one of them.

    Returns how many changes there were, and how long it took until one of the members gave up.
    """
    plan = make_plan(random.Random(seed))
    plan.hosts, plan.loss, plan.travel, plan.min_size, plan.max_size = (1, 1, 1, 1), 0.0, 0.002, 5, 6
    simulator = Simulator(seed, plan=plan)
    simulator._until(lambda: False, 1.0)
    for number in range(2):
        host = Host(f"n{number}", Acceptor(VoterId(f"n{number}", 1)))
        simulator.hosts[host.name] = host
        simulator.cuts |= {(host.name, "h3"), ("h3", host.name)}
        simulator.start_candidate(MemberId(4 + number, 1), host)
    simulator._until(lambda: False, TIMEOUTS.wait - 1.0)
    num_changes = max(simulator.views) - 1
    simulator._until(lambda: len(simulator._members()) < 4, 10 * TIMEOUTS.wait)
    return num_changes, simulator.now


def test_newcomers_that_are_cut_off_cause_one_change_of_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """And put off the end of waiting not at all."""
    for seed in range(20):
        num_changes, seconds = wait_beside_newcomers_that_are_cut_off(seed)
        assert num_changes == 1
        assert seconds < TIMEOUTS.wait + 1.0

    for kind in (RevokeView, AskMember):
        monkeypatch.setitem(ElasticMember._MESSAGE_HANDLERS, kind, _forget_changes_of_others(kind))
    assert max(wait_beside_newcomers_that_are_cut_off(seed)[0] for seed in range(20)) > 1


def _forget_changes_of_others(kind: type) -> Callable[..., Any]:
    handle = ElasticMember._MESSAGE_HANDLERS[kind]

    def handle_and_forget(self: ElasticMember, *args: Any) -> Any:
        before = {*self._silent_hosts._tried}
        actions = handle(self, *args)
        self._silent_hosts._tried = before
        return actions

    return handle_and_forget


def test_the_end_of_waiting_is_not_put_off_by_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = MemberShortage.begin

    def begin_anew(shortage: MemberShortage) -> Iterator[StartTimer]:
        shortage.end()
        return begin(shortage)

    monkeypatch.setattr(MemberShortage, "begin", begin_anew)
    assert wait_beside_newcomers_that_are_cut_off(0)[1] > TIMEOUTS.wait + 1.0


class Reading(Simulator):
    """A newcomer always reads the state while the first step of its view is made; if it is so chosen, it never ends.

    Then the member that has the state is stopped, and runs again only when the step should long have been over.
    """

    is_endless = False

    def _may_read_later(self, process: Process, view: View) -> bool:
        return view.epoch == 2 and view.ranks[process.id] == 1

    def _begin_step(self, process: Process, view: View) -> None:
        super()._begin_step(process, view)
        if process.is_reading and self.is_endless:
            holder = self.processes[view.members[0]]
            holder.waiting = deque()
            self.at(2 * DEADLINE_SECONDS, lambda: self._wake(holder))

    def _read_state(self, process: Process, view: View) -> None:
        if not self.is_endless:
            super()._read_state(process, view)


def take_a_newcomer(seed: int, *, encodes: bool = False, is_endless: bool = False) -> Reading:
    """Let a job of one process become one of two, and run for a while."""
    plan = make_plan(random.Random(seed))
    plan.hosts, plan.witness, plan.min_size, plan.max_size, plan.encodes = (1,), False, 1, 2, encodes
    plan.loss, plan.doubling, plan.travel, plan.step_seconds = 0.0, 0.0, 0.002, 0.1
    simulator = Reading(seed, plan=plan)
    simulator.is_endless = is_endless
    simulator._until(lambda: False, 1.0)
    simulator.start_candidate(MemberId(1, 1), simulator.hosts["h0"])
    simulator._until(lambda: False, 6.0)
    return simulator


def test_a_newcomer_reads_from_a_member_that_has_got_the_view_in_another_message() -> None:
    for seed in range(10):
        for encodes in (False, True):
            simulator = take_a_newcomer(seed, encodes=encodes)
            assert simulator.seen["read"] == 1
            assert max(simulator.views) == 2, "nobody was taken for stuck"


def test_whoever_was_stopped_when_a_step_should_be_over_looks_for_the_stuck_when_it_runs() -> None:
    for seed in range(10):
        simulator = take_a_newcomer(seed, is_endless=True)
        assert max(simulator.views) == 3
        assert len(simulator.bases[3]) < len(simulator.stable), "steps are made again"


class Restarting(Simulator):
    """In the place of a process that ends another one is started, on the same host."""

    def _die(self, process: Process) -> None:
        if process.is_alive:
            me = MemberId(process.id.slot, process.id.incarnation + 1)
            self.at(0.3, lambda: self.start_candidate(me, self.hosts[process.host]))
        super()._die(process)


def cut_two_hosts(seed: int, seconds: int = 20) -> tuple[int, int]:
    """Cut two of three hosts from each other, which both reach that of rank 0, and heal that.

    Returns how many views have followed until then, and how many steps were made in the last second.
    """
    plan = make_plan(random.Random(seed))
    plan.hosts = ((1, 1, 1), (2, 2, 2), (2, 1, 1))[seed % 3]
    plan.loss, plan.min_size, plan.max_size, plan.step_seconds, plan.travel = 0.0, 1, sum(plan.hosts), 0.1, 0.002
    simulator = Restarting(seed, plan=plan)
    simulator._until(lambda: False, 1.0)
    simulator.cuts |= {("h1", "h2"), ("h2", "h1")}
    simulator._see_cuts()
    simulator._until(lambda: False, 1.0 + seconds)
    num_steps = len(simulator.stable)
    simulator._until(lambda: False, 2.0 + seconds)
    num_views, num_steps = max(simulator.views) - 1, len(simulator.stable) - num_steps
    simulator.cuts.clear()
    simulator._until(lambda: False, 7.0 + seconds)
    assert simulator.views[max(simulator.views)].size == plan.max_size, "all are there again"
    return num_views, num_steps


def test_what_is_started_on_a_host_that_another_one_cannot_reach_waits_until_it_does() -> None:
    for seed in range(30):
        num_views, num_steps = cut_two_hosts(seed)
        assert num_views <= 2, "of two members of the host one may be left out after the other"
        assert num_steps > 3


def test_whoever_is_taken_and_does_not_reach_all_hosts_ends_each_view(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (planning, member_module):
        monkeypatch.setattr(module, "reaches", lambda candidate, hosts: True)

    assert min(cut_two_hosts(seed)[0] for seed in range(3)) > 10


def play_planned_changes() -> int:
    """Let processes come and leave, with no other faults; returns how many views had members that stopped apart."""
    num_apart = 0
    for seed in range(150):
        plan = make_plan(random.Random(seed))
        plan.faults, plan.loss, plan.doubling, plan.fault_seconds = ["join", "leave", "join"], 0.0, 0.0, 2.0
        plan.step_seconds, plan.min_size, plan.max_size = (0.01, 0.1)[seed % 2], 1, sum(plan.hosts) + 1
        simulator = Simulator(seed, plan=plan).run()
        num_apart += sum(len(steps) > 1 for steps in simulator.stops.values())
    return num_apart


def test_members_stop_at_one_step_for_those_who_come_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short a step is: no member is cut off in one that others have applied."""
    assert play_planned_changes() == 0

    monkeypatch.setattr(ElasticMember, "_consider_pause", _stop_at_once)
    assert play_planned_changes() > 10


def _stop_at_once(self: ElasticMember) -> list[Any]:
    is_there = self._stop.is_due(self._applied)
    return self._begin_change() if is_there and self.state.value in {"running", "leaving"} else []


def play_warm_spares(seeds: Sequence[int], rules: Rules | None = None) -> Counter[str]:
    """Play schedules of jobs that have one or two warm spares, which are there from the beginning or come later."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        plan = make_plan(random.Random(seed))
        plan.num_spares = 1 + seed % 2
        plan.max_size = max(sum(plan.hosts), plan.num_spares + 1) + seed % 3 % 2
        plan.faults += ["kill", "join"]
        seen.update(dict.fromkeys(Simulator(seed, rules, plan).run().seen, 1))
    return seen


def test_a_warm_spare_has_the_state_when_it_takes_samples() -> None:
    seen = play_warm_spares(range(300))
    assert min(seen[what] for what in ("relieved", "completed", "joined", "step")) >= 15, seen


def test_a_warm_spare_that_makes_no_steps_has_not() -> None:
    with pytest.raises(AssertionError, match=r"13: spare .* lacks|holders of the state are at most one step apart"):
        play_warm_spares(range(300), Rules(spares_follow=False))


def test_spares_must_not_be_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(self: View) -> frozenset[int]:
        ages = [each.joined for host in self.hosts for each in host.members]
        by_age = sorted(range(len(ages)), key=lambda rank: (-ages[rank], rank))
        return frozenset(by_age[self.max_size - self.num_spares :]) if self.num_spares else frozenset()

    monkeypatch.setattr(View, "spares", property(oldest))
    with pytest.raises(AssertionError, match=r"13: "):
        play_warm_spares(range(300))


# -- rules that are broken on purpose ----------------------------------------------------------------------------------


def hunt(
    match: str | tuple[str, ...],
    rules: Rules | None = None,
    *,
    hosts: tuple[int, ...] | None = None,
    faults: str = "",
    seconds: float = 0.5,
    heals: bool = True,
    kind: Callable[..., Simulator] = Simulator,
) -> None:
    """Play schedules until one breaks an invariant.

    Args:
        match: how the violation's text begins.
        rules: that are broken.
        hosts, faults, seconds, heals: of all schedules, instead of random ones; there is place for two more ranks then.
        kind: of simulator.
    """
    for seed in range(4_000):
        plan = make_plan(random.Random(seed))
        if hosts is not None:
            plan.hosts, plan.faults, plan.min_size, plan.max_size = hosts, faults.split(), 1, sum(hosts) + 2
            plan.fault_seconds, plan.step_seconds, plan.heals = seconds, 0.05, heals
        try:
            kind(seed, rules, plan).run()
        except AssertionError as violation:
            assert str(violation).startswith(match), violation
            return
    pytest.fail("no schedule has found anything")


def test_frames_need_an_epoch() -> None:
    hunt("2:", Rules(epoch_in_frames=False))


def test_memory_is_not_used_before_those_are_dead_who_were_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Installation, "__init__", _spare_the_dying(Installation.__init__))

    hunt("8:")


def test_who_was_stopped_writes_into_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by what comes of it, and not by who may write where."""
    monkeypatch.setattr(Installation, "__init__", _spare_the_dying(Installation.__init__))

    hunt("2:", Rules(memory_is_checked=False), hosts=(2, 1), faults="stop stop cut")


def _spare_the_dying(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, me, view, dying=(): init(self, me, view)


def test_a_quorum_of_half_the_voters_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: View, voters: Any) -> tuple[bool, str]:
        return len(set(voters)) * 2 >= len(self.voters), "half"

    monkeypatch.setattr(View, "has_quorum", half)
    hunt("1:")


def test_dead_hosts_must_not_be_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    dead: set[str] = set()

    def subtract(self: View, voters: Any) -> tuple[bool, str]:
        gone = {number for number, voter in enumerate(self.voters) if voter.name in dead}
        alive, answered = len(self.voters) - len(gone), len(set(voters) - gone)
        return answered * 2 > alive or (answered * 2 == alive and 0 in voters), "those that live"

    class Subtracting(Simulator):
        def __init__(self, *args: Any) -> None:
            dead.clear()
            super().__init__(*args)

        def _lose_host(self, name: str) -> None:
            dead.add(name)
            super()._lose_host(name)

    monkeypatch.setattr(View, "has_quorum", subtract)
    hunt("1:", hosts=(1, 1, 1), faults="host cut stop", seconds=1.0, kind=Subtracting)


def test_hosts_cannot_be_ordered_by_the_age_of_their_oldest_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that one dies, members of two hosts that go on would change places."""
    order_hosts = planning._order_hosts

    def order_by_age(*args: Any) -> list[ViewHost]:
        hosts = [host for host in order_hosts(*args) if host.members]
        return sorted(hosts, key=lambda host: min(member.joined for member in host.members))

    monkeypatch.setattr(planning, "_order_hosts", order_by_age)
    hunt("6:", hosts=(1, 1), faults="join join join kill kill", seconds=2.0)


def test_hosts_without_state_cannot_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 could be one that has just come."""
    order_hosts = planning._order_hosts

    def keep_order(view: View, holders: Any, kept: Any, candidates: Any) -> list[ViewHost]:
        return order_hosts(view, kept, kept, candidates)

    monkeypatch.setattr(planning, "_order_hosts", keep_order)
    hunt("rank 0 holds the state", hosts=(1, 1), faults="join join join kill kill")


def test_only_stable_steps_are_copied_to_candidates() -> None:
    hunt(("3:", "4:"), Rules(copies_are_stable=False), hosts=(1, 1, 1), faults="join cut host kill")


def test_no_step_is_run_before_all_have_installed_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_alone(self: ElasticMember) -> Any:
        return self._roll() if self.me in self._installation.installed else []

    monkeypatch.setattr(ElasticMember, "_say_installed", go_alone)
    hunt("2:")


def test_who_has_reported_goes_no_further() -> None:
    """Members say how far they are when their planes are stopped, and not before."""

    class Hasty(Simulator):
        def _carry(self, process: Process, actions: list[Any]) -> None:
            for action in actions:
                super()._carry(process, [action])
                if isinstance(action, RevokePlane):
                    step, held = process.applied, HeldSums(process.held_epoch, tuple(process.held), NUM_BUCKETS)
                    progress = StepProgress(step, SamplePosition(0, step), SamplePosition(0, step + 1), held)
                    self.do(process, PlaneRevoked(action.epoch, progress))

    hunt("", hosts=(1, 1), faults="kill join", kind=Hasty)


def test_a_step_that_was_applied_by_some_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_base = planning._plan_base

    def undo(view: View, holders: Any) -> tuple[StepBase, str]:
        base, reason = plan_base(view, holders)
        return msgspec.structs.replace(base, step=base.stable_step, behind=()), reason

    monkeypatch.setattr(planning, "_plan_base", undo)
    hunt("4:")


def test_two_who_cannot_reach_each_other_cannot_both_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One view would follow the other, for each has both."""
    monkeypatch.setattr(planning, "_connected", lambda view, kept, holders: dict(kept))

    hunt("7:", hosts=(1, 1, 1), faults="link", heals=False)


def test_a_step_that_one_had_applied_may_be_run_anew_after_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that was to take it over was decided, and nobody began it. Otherwise the job would end."""
    plan_view = planning.plan_view

    def insist(view: View, reports: dict[MemberId, MemberReport], *args: Any) -> Any:
        if reports and max(report.progress.applied for report in reports.values()) < view.base.step:
            return None, "no member has the step at which this view begins"
        return plan_view(view, reports, *args)

    monkeypatch.setattr("reigen.cluster.membership.views.leader.plan_view", insist)
    hunt("7:", hosts=(1, 1, 1), faults="kill kill")


def test_a_view_needs_a_member_with_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, those who have just come would go on from an older step."""
    plan_view = planning.plan_view

    def go_on_anyway(view: View, reports: dict[MemberId, MemberReport], *args: Any) -> Any:
        found = plan_view(view, reports, *args)
        if found[0] is None and reports:
            base = msgspec.structs.replace(view.base, stable_step=0, step=0, completes=False)
            found = plan_view(msgspec.structs.replace(view, base=base), reports, *args)
        return found

    monkeypatch.setattr("reigen.cluster.membership.views.leader.plan_view", go_on_anyway)
    hunt(("3:", "4:", "6:"), hosts=(1, 1), faults="join join kill kill kill")


def test_only_stable_steps_are_written_to_checkpoints() -> None:
    hunt("5:", Rules(checkpoints_are_stable=False), hosts=(1, 1, 1), faults="cut host kill")


def test_no_step_is_run_with_fewer_than_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    on_rolled = ElasticMember._on_rolled

    def never_wait(self: ElasticMember, event: Any) -> Any:
        actions = on_rolled(self, event)
        if self.state is ElasticState.WAITING:
            self.state, actions = ElasticState.RUNNING, [RunView(self.view)]
        return actions

    monkeypatch.setitem(ElasticMember._HANDLERS, Rolled, never_wait)
    hunt("6:")


def test_who_is_fenced_ends() -> None:
    class Immortal(Simulator):
        def _carry(self, process: Process, actions: list[Any]) -> None:
            super()._carry(process, [action for action in actions if not isinstance(action, EndProcess)])

    hunt("8:", hosts=(1, 1), faults="stop", kind=Immortal)


def test_a_candidate_is_ready_only_with_the_digest_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ElasticCandidate.handle

    def trust(self: ElasticCandidate, event: Any) -> Any:
        return handle(self, Copied(event.step, matches=True) if isinstance(event, Copied) else event)

    monkeypatch.setattr(ElasticCandidate, "handle", trust)
    hunt(("3:", "4:"), hosts=(1, 1), faults="join join")


def test_who_reads_the_state_while_a_step_is_made_contributes_behind_that() -> None:
    hunt("9:", Rules(reads_before_it_contributes=False), hosts=(1, 1), faults="join join")


def test_members_do_not_stop_because_a_candidate_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    def react(self: ElasticMember) -> Any:
        if self.state is ElasticState.CHANGING:
            return [*self._consider_leading(), *self._advance()]
        return self._begin_change() if self.lost else []

    monkeypatch.setattr(ElasticMember, "_react", react)
    hunt("9:", hosts=(1, 1), faults="join host join host", seconds=2.0)


def test_whoever_ends_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    end = ElasticMember._end
    monkeypatch.setattr(ElasticMember, "_end", lambda self, state, code, _: end(self, state, code, ""))
    hunt("10:")


# -- a nightly run -----------------------------------------------------------------------------------------------------


def test_a_nightly_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    file = tmp_path / "played"
    whole = [Block(0, BLOCK_SIZE), Block(2 * BLOCK_SIZE, BLOCK_SIZE, violations={"2007": "4: twice"})]
    file.write_text("".join(json.dumps(asdict(block)) + "\n" for block in whole) + '{"first": 3000, "cou')

    done = read_blocks(file)

    assert done == whole
    assert [*blocks_to_play(done, 0, 4 * BLOCK_SIZE)] == [(BLOCK_SIZE, BLOCK_SIZE), (3 * BLOCK_SIZE, BLOCK_SIZE)]
    assert "2000 schedules" in summarize(done)
    assert "1 violation(s)\n  seed 2007: 4: twice" in summarize(done)


def test_a_nightly_block_tells_the_story_of_what_it_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(View, "has_quorum", lambda self, voters: (len({*voters}) * 2 >= len(self.voters), "half"))

    block = play_block(1_000, 300, tmp_path / "played")

    assert block.violations
    for seed, text in block.violations.items():
        assert text
        assert "fault" in (tmp_path / f"played.{seed}").read_text()
    assert 0 < block.seen["step"] <= 300 - len(block.violations)
