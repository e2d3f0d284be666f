"""The launcher's decisions about an elastic job: events in, instructions out."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from signal import SIGKILL, SIGTERM

import msgspec
import pytest

from reigen.cluster.membership.views.history import ChangeNote, StepOutcome
from reigen.launch.elastic.job import (
    ALL_LEFT_TEXT,
    FIRST_VIEW_SECONDS,
    LEAVE_SECONDS,
    LEFT_EARLY_TEXT,
    LEFT_OUT_SECONDS,
    ORPHANED_SECONDS,
    ORPHANED_TEXT,
    RESET_LIMIT_TEXT,
    RESIZE_LIMIT_TEXT,
    CallHost,
    ChangeExplained,
    ElasticEvent,
    ElasticInstruction,
    ElasticJobState,
    HostNoticed,
    HostPrepared,
    HostsFound,
    HostUnusable,
    MemberFinished,
    MemberLeaving,
    MemberStraggles,
    PauseAnnounced,
    SayToUser,
    StartServers,
    StartSlots,
    TimePassed,
    ViewAnnounced,
    WorkerDeparted,
    WorkerEntered,
    WorkersBegan,
)
from reigen.launch.elastic.options import NEVER, Cooldown, ElasticOptions
from reigen.launch.elastic.slots import SlotState
from reigen.launch.elastic.stragglers import EJECTION_STEPS
from reigen.launch.elastic.view_line import OUTCOME_SECONDS
from reigen.launch.exit_report import EARLY_END_TEXT, EARLY_SUCCESS_TEXT
from reigen.launch.job_state import (
    FinishJob,
    HostLost,
    JobEvent,
    JobInstruction,
    JobPhase,
    ProcessesSwept,
    ProcessExited,
    RestartProcess,
    SignalProcesses,
    SignalReceived,
    TerminateProcesses,
)

DISCOVERED = "discover.sh"
#: A rest of just ten seconds, as often as it may be.
TEN_SECONDS = Cooldown(10, 10, max_failures=None)


class Job:
    """An elastic job under a virtual clock; hosts that are called are ready at once, but for those that are not to.

    The first view is announced as soon as its processes are started, if it ``begins``.
    """

    def __init__(
        self, options: ElasticOptions, *hosts: tuple[str, int], chance: float = 0.0, begins: bool = True
    ) -> None:
        self.now = 0.0
        self.begins = begins
        self.unusable: set[str] = set()
        self.state = ElasticJobState(options, lambda: chance, self.now)
        self.started: list[tuple[int, int, str, int]] = []
        self.texts: list[str] = []
        if hosts:
            self.find(*hosts)

    def handle(self, event: JobEvent | ElasticEvent) -> list[JobInstruction | ElasticInstruction]:
        instructions = self.state.handle_at(event, self.now)
        self.state.validate()
        for each in list(instructions):
            if isinstance(each, CallHost):
                answer = HostUnusable(each.host, "no") if each.host in self.unusable else HostPrepared(each.host)
                instructions += self.handle(answer)
            elif isinstance(each, StartSlots):
                self.started += [(one.slot, one.incarnation, one.host, one.local_rank) for one in each.starts]
                if self.begins and any(one.first_size for one in each.starts):
                    self.handle(ViewAnnounced(1, tuple((one.slot, one.incarnation) for one in each.starts)))
            elif isinstance(each, SayToUser):
                self.texts.append(each.text)
        return instructions

    def find(self, *hosts: tuple[str, int]) -> list[JobInstruction | ElasticInstruction]:
        return self.handle(HostsFound(hosts))

    def exit(self, slot: int, code: int = 1, cause: str = "") -> list[JobInstruction | ElasticInstruction]:
        return self.handle(ProcessExited(slot, code, cause))

    def at(self, now: float) -> list[JobInstruction | ElasticInstruction]:
        """Let the time pass until then, with each thing when it is due."""
        instructions: list[JobInstruction | ElasticInstruction] = []
        while (due := self.state.next_due()) <= now:
            assert due > self.now or not instructions, "what is due is done"
            self.now = max(self.now, due)
            instructions += self.handle(TimePassed())
        self.now = now
        return instructions + self.handle(TimePassed())

    @property
    def running(self) -> set[int]:
        return self.state.running

    def end(self) -> FinishJob:
        """Let everything that runs end, and return how the job ends."""
        instructions: list[JobInstruction | ElasticInstruction] = []
        for slot in sorted(self.running):
            instructions += self.exit(slot, -SIGTERM)
        assert self.state.phase is JobPhase.SWEEPING
        instructions += self.handle(ProcessesSwept())
        return next(each for each in instructions if isinstance(each, FinishJob))


def options(least: int = 2, most: int = 4, **others: object) -> ElasticOptions:
    return ElasticOptions(least, most, **{"cooldown": TEN_SECONDS, **others})  # type: ignore[arg-type]


def test_first_processes_have_their_ranks_as_slots() -> None:
    job = Job(options(), ("h1", 2), ("h2", 3))
    assert job.started == [(0, 0, "h1", 0), (1, 0, "h1", 1), (2, 0, "h2", 0), (3, 0, "h2", 1)]
    assert job.state.members == ((0, 0), (1, 0), (2, 0), (3, 0))


def test_a_job_waits_for_places() -> None:
    job = Job(options(discovery=DISCOVERED), ("h1", 1))
    assert job.started == []
    job.at(5)
    job.find(("h1", 1), ("h2", 1))
    assert [each[:2] for each in job.started] == [(0, 0), (1, 0)]


def test_a_job_that_never_gets_its_places_ends() -> None:
    job = Job(options(discovery=DISCOVERED, start_timeout_seconds=30), ("h1", 1))
    job.at(29)
    assert job.state.phase is JobPhase.RUNNING
    job.at(30)
    assert job.end() == FinishJob(1, None, None)
    text = "Timed out waiting for minimum number of slots to become available. Please check that you have enough "
    assert job.texts == [f"{text}resources to run at least 2 processes."]


def test_hosts_that_do_not_suffice_are_an_error_at_once() -> None:
    job = Job(options())
    job.unusable.add("h2")
    job.find(("h1", 1), ("h2", 2))
    assert job.texts == [
        "host h2 cannot take part: no; it is called again in 10 s",
        "the hosts that can take part have 1 slots, and 2 processes are needed at least; nothing was started",
    ]
    assert job.end().exit_code == 1


def test_a_job_begins_without_a_host_that_cannot_take_part() -> None:
    job = Job(options())
    job.unusable.add("h1")
    job.find(("h1", 4), ("h2", 2))
    assert job.started == [(0, 0, "h2", 0), (1, 0, "h2", 1)]


def test_a_death_ends_nobody_else_and_its_place_is_used_again() -> None:
    job = Job(options(), ("h1", 4))
    assert [type(each) for each in job.exit(1, -SIGKILL)] == [SayToUser]
    assert job.texts == ["slot 1: killed by SIGKILL; 3 processes go on, its place rests for 10 s"]
    assert job.running == {0, 2, 3}
    job.at(9.9)
    assert len(job.started) == 4
    job.at(10)
    assert job.started[4:] == [(1, 1, "h1", 1)]
    assert job.texts[1:] == ["slot 1 is started again (host h1)"]


def test_rank_0_may_die() -> None:
    job = Job(options(), ("h1", 4))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0), (2, 0), (3, 0))))
    job.exit(0)
    job.at(10)
    assert job.running == {0, 1, 2, 3}
    assert job.started[-1] == (0, 1, "h1", 0)


def test_a_free_place_is_used_before_one_that_rests() -> None:
    job = Job(options(), ("h1", 5))
    job.exit(1)
    assert job.started[4:] == [(4, 0, "h1", 4)]
    job.at(10)
    assert len(job.started) == 5, "there are enough"


def test_a_place_that_fails_again_and_again_is_given_up() -> None:
    job = Job(options(cooldown=Cooldown(), most=3), ("h1", 3))
    for _ in range(3):
        job.exit(2)
        job.at(job.now + 100)
    assert job.started[3:] == [(2, 1, "h1", 2), (2, 2, "h1", 2)]
    assert job.texts[-1] == "slot 2: exit code 1; 2 processes go on, its place is not used any more"


@pytest.mark.parametrize(
    ("cooldown", "num", "chance", "seconds"),
    [
        (Cooldown(), 1, 0.0, 10.0),
        (Cooldown(), 2, 0.0, 20.0),
        (Cooldown(), 2, 1.0, 30.0),
        (Cooldown(), 3, 0.0, None),
        (NEVER, 1, 0.5, None),
        # Horovod's: min * 2**count + U(0, 1) * min, with count from 1, at most max
        (Cooldown(10, 100, first_doublings=1, max_failures=None), 1, 0.5, 25.0),
        (Cooldown(10, 100, first_doublings=1, max_failures=None), 2, 0.0, 40.0),
        (Cooldown(10, 100, first_doublings=1, max_failures=None), 4, 0.0, 100.0),
        (Cooldown(10, 100, first_doublings=1, max_failures=None), 2000, 0.0, 100.0),
    ],
)
def test_rests(cooldown: Cooldown, num: int, chance: float, seconds: float | None) -> None:
    assert cooldown.rest_seconds(num, chance) == seconds


def test_failures_long_ago_are_forgotten() -> None:
    job = Job(options(cooldown=Cooldown(), most=3), ("h1", 3))
    for _ in range(5):
        job.exit(2)
        job.at(job.now + 700)
    assert job.started[-1] == (2, 5, "h1", 2)


def test_a_failure_takes_its_host_out_of_the_job_as_with_horovod() -> None:
    job = Job(options(blacklist="host", cooldown=NEVER), ("h1", 2), ("h2", 2))
    instructions = job.exit(2)
    assert SignalProcesses((3,), SIGTERM) in instructions
    assert job.texts == ["slot 2 (host h2): exit code 1; host h2 is not used any more; 2 processes go on"]
    job.exit(3, -SIGTERM)
    job.at(3600)
    assert job.running == {0, 1}
    assert len(job.started) == 4, "it never returns"


def test_a_host_is_left_when_others_have_the_state() -> None:
    """There are no members on other hosts: one is started there, and gets the state, before the host is left."""
    job = Job(options(2, 2, blacklist="host", cooldown=NEVER), ("h1", 2), ("h2", 2))
    instructions = job.exit(1)
    assert not [each for each in instructions if isinstance(each, SignalProcesses)]
    assert job.started[-1] == (2, 0, "h2", 0)
    assert SignalProcesses((0,), SIGTERM) in job.handle(ViewAnnounced(2, ((0, 0), (2, 0))))
    job.exit(0, 0)
    assert job.started[-1] == (3, 0, "h2", 1)


def test_a_host_returns_after_its_cooldown() -> None:
    rule = Cooldown(10, 100, first_doublings=1, max_failures=None)
    job = Job(options(blacklist="host", cooldown=rule), ("h1", 2), ("h2", 2))
    job.exit(2)
    job.exit(3, -SIGTERM)
    job.at(19)
    assert len(job.started) == 4
    job.at(20)
    assert job.started[4:] == [(2, 1, "h2", 0), (3, 1, "h2", 1)]


def test_all_hosts_are_blacklisted() -> None:
    job = Job(options(1, blacklist="host", cooldown=NEVER), ("h1", 1), ("h2", 1))
    job.exit(0, 3)
    job.exit(1, 4)
    end = job.end()
    assert (end.exit_code, end.failure and end.failure.rank) == (3, 0), "the first failure of the last members"


def test_all_processes_fail() -> None:
    job = Job(options(), ("h1", 2))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0))))
    job.exit(1, -SIGKILL)
    job.exit(0, 2)
    end = job.end()
    assert end.exit_code == 128 + SIGKILL
    assert end.failure is not None
    assert end.failure.rank == 1


def test_failures_before_the_last_view_did_not_end_the_job() -> None:
    job = Job(options(1), ("h1", 3))
    job.exit(2, 7)
    job.handle(ViewAnnounced(2, ((0, 0), (1, 0))))
    job.exit(0, 8)
    job.exit(1, 9)
    assert job.end().exit_code == 8


def test_hosts_that_appear_are_used() -> None:
    job = Job(options(discovery=DISCOVERED), ("h1", 2))
    job.find(("h1", 2), ("h2", 4))
    assert job.started[2:] == [(2, 0, "h2", 0), (3, 0, "h2", 1)], "no more than the maximum"
    assert job.texts == ["slot 2 is started (host h2); slot 3 is started (host h2)"]


def test_spares_wait_for_a_death() -> None:
    job = Job(options(most=3, spares=2), ("h1", 2), ("h2", 4))
    assert [each[:3] for each in job.started] == [(0, 0, "h1"), (1, 0, "h1"), (2, 0, "h2"), (3, 0, "h2"), (4, 0, "h2")]
    assert job.state.members == ((0, 0), (1, 0), (2, 0))
    job.exit(1)
    assert job.texts[1:] == [
        "slot 1 (host h1): exit code 1; 2 processes go on, its place rests for 10 s",
        "slot 5 is started (host h2)",  # the next spare
    ]
    job.handle(ViewAnnounced(2, ((0, 0), (2, 0), (3, 0))))
    job.exit(5)
    assert job.texts[-1] == "slot 5 (host h2): exit code 1; 3 processes go on, its place rests for 10 s"
    assert job.state.phase is JobPhase.RUNNING


def test_spares_are_no_first_members() -> None:
    job = Job(options(least=3, most=3, spares=2), ("h1", 3))
    assert len(job.started) == 3
    job = Job(options(least=3, most=4, spares=2, discovery=DISCOVERED), ("h1", 3))
    assert len(job.started) == 3
    job.find(("h1", 9))
    assert len(job.started) == 6


def test_a_warm_spare_counts_for_the_least_number() -> None:
    job = Job(options(least=3, most=3, spares=1, has_warm_spares=True, timeout_seconds=60.0), ("h1", 4))
    assert len(job.state.members) == 3, "it comes later"
    job.handle(ViewAnnounced(2, ((0, 0), (1, 0), (2, 0), (3, 0)), spares=(3,)))
    job.exit(1)
    assert job.texts[-1] == "slot 1: exit code 1; 3 processes go on, its place rests for 10 s"
    job.handle(ViewAnnounced(3, ((0, 0), (2, 0), (3, 0))))
    job.exit(2)
    assert job.state.next_due() < 61, "there are too few"


def test_a_straggler_is_ejected_where_a_warm_spare_takes_over() -> None:
    job = Job(options(least=3, most=3, spares=1, has_warm_spares=True, ejects_stragglers=True), ("h1", 4))
    job.handle(ViewAnnounced(2, ((0, 0), (1, 0), (2, 0), (3, 0)), spares=(3,)))
    assert SignalProcesses((1,), SIGTERM) in job.handle(late(1, min_ranks=3))


def test_planned_changes_have_a_limit_of_their_own() -> None:
    job = Job(options(reset_limit=1, resize_limit=1), ("h1", 4))
    job.exit(0)
    job.handle(ViewAnnounced(2, ((1, 0), (2, 0), (3, 0))))
    job.handle(ViewAnnounced(3, ((1, 0), (2, 0), (3, 0), (0, 1))))
    assert job.state.phase is JobPhase.RUNNING
    job.handle(ViewAnnounced(4, ((1, 0), (2, 0), (3, 0))))
    assert job.texts[-1] == RESIZE_LIMIT_TEXT.format(1)
    assert job.end() == FinishJob(1, None, None)


def late(slot: int, step: int = 50, incarnation: int = 0, min_ranks: int = 1) -> MemberStraggles:
    return MemberStraggles(slot, incarnation, step, 50, min_ranks, 0.42, 0.1)


LATE_TEXT = "s of work in each of the last 50 steps, where the median of the others is 0.1 s"


def test_stragglers_are_reported_once() -> None:
    job = Job(options(), ("h1", 4))
    assert not [each for each in job.handle(late(2)) if isinstance(each, SignalProcesses)]
    assert job.texts == [f"slot 2 is late: 0.42 {LATE_TEXT}; it stays: --eject-stragglers would replace it"]
    job.handle(late(2, 100))
    assert len(job.texts) == 1
    job.handle(late(1, 100))
    assert len(job.texts) == 2


def test_a_straggler_is_ejected_and_its_place_rests_as_after_a_failure() -> None:
    job = Job(options(ejects_stragglers=True), ("h1", 4))
    assert SignalProcesses((2,), SIGTERM) in job.handle(late(2))
    rest = "3 processes go on, its place rests for 10 s"
    assert job.texts == [f"slot 2 is late: 0.42 {LATE_TEXT}; it is asked to leave: {rest}"]
    job.handle(MemberLeaving(2, 0))  # it says so itself
    job.handle(late(2, 200))  # a word of before
    job.exit(2, 0)
    assert job.texts[1:] == ["slot 2 has left"]
    job.at(9.9)
    assert len(job.started) == 4
    job.at(10)
    assert job.started[4:] == [(2, 1, "h1", 2)]
    assert job.state.phase is JobPhase.RUNNING


def test_who_does_not_leave_though_it_is_late_is_killed() -> None:
    job = Job(options(ejects_stragglers=True), ("h1", 4))
    job.handle(late(2))
    assert SignalProcesses((2,), SIGKILL) in job.at(LEAVE_SECONDS)


def test_one_straggler_is_ejected_in_a_hundred_steps() -> None:
    job = Job(options(least=1, ejects_stragglers=True), ("h1", 4))
    job.handle(late(2, 50))
    job.handle(late(3, 49 + EJECTION_STEPS))
    assert job.texts[-1].endswith("; it stays: another one was ejected less than 100 steps ago")
    assert 3 not in {slot.number for slot in job.state.slots.in_state(SlotState.LEAVING)}
    job.handle(late(3, 50 + EJECTION_STEPS))
    assert {slot.number for slot in job.state.slots.in_state(SlotState.LEAVING)} == {2, 3}


@pytest.mark.parametrize(("least", "needed", "stays"), [(3, 1, True), (2, 3, True), (2, 2, False)])
def test_a_straggler_stays_where_too_few_would_be_left(least: int, needed: int, *, stays: bool) -> None:
    """The least number is the launcher's, or the program's."""
    job = Job(options(least=least, most=3, ejects_stragglers=True), ("h1", 3))
    signals = [each for each in job.handle(late(0, min_ranks=needed)) if isinstance(each, SignalProcesses)]
    assert bool(signals) is not stays
    assert ("it stays: no other process can take its place, and the job needs 3" in job.texts[0]) is stays


def test_a_spare_or_a_free_place_takes_the_place_of_a_straggler() -> None:
    job = Job(options(least=3, most=3, spares=1, ejects_stragglers=True), ("h1", 4))
    assert SignalProcesses((1,), SIGTERM) in job.handle(late(1))
    assert len(job.started) == 4
    job = Job(options(least=3, most=3, ejects_stragglers=True), ("h1", 4))
    job.handle(late(1))
    assert job.started[3:] == [(3, 0, "h1", 3)], "another one is started at once, in a place that does not rest"


def test_the_host_that_decides_is_not_left_without_a_substitute() -> None:
    job = Job(options(least=1, most=3, ejects_stragglers=True), ("h1", 1), ("h2", 2))
    job.handle(late(0))
    assert "it stays: it is the last one on the host of rank 0" in job.texts[0]
    assert SignalProcesses((1,), SIGTERM) in job.handle(late(1)), "another host may be left"
    job = Job(options(least=1, most=2, ejects_stragglers=True), ("h1", 1), ("h2", 2))
    assert SignalProcesses((0,), SIGTERM) in job.handle(late(0)), "there is a free place"


def test_words_about_processes_that_are_gone_are_not_heard() -> None:
    job = Job(options(ejects_stragglers=True), ("h1", 4))
    assert job.handle(late(9)) == []
    assert job.handle(late(2, incarnation=1)) == []
    assert job.texts == []


def test_hosts_that_vanish_are_left() -> None:
    job = Job(options(discovery=DISCOVERED), ("h1", 2), ("h2", 2))
    instructions = job.find(("h1", 2))
    assert SignalProcesses((2, 3), SIGTERM) in instructions
    assert job.texts == ["host h2 has vanished: slots 2, 3 are asked to leave"]
    job.exit(2, 0)
    job.exit(3, -SIGTERM)
    assert job.texts[1:] == ["slot 2 (host h2) has left", "slot 3 (host h2) has left"]
    job.find(("h1", 2), ("h2", 2))
    assert job.started[4:] == [(2, 1, "h2", 0), (3, 1, "h2", 1)], "its places keep their numbers"


def test_a_job_whose_hosts_are_all_replaced_says_what_it_lacks() -> None:
    job = Job(options(2, 4), ("h1", 2))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0))))
    job.handle(HostsFound((("h2", 2),)))
    assert job.texts[-1].startswith(
        "host h1 has vanished: slots 0, 1 are asked to leave; nobody stays who has the state"
    )


def test_hosts_that_vanish_before_the_first_view_are_left_behind_it() -> None:
    job = Job(options(discovery=DISCOVERED), ("h1", 2), ("h2", 2), begins=False)
    assert job.find(("h1", 1), ("h2", 2), ("h3", 1)) == []
    assert job.find(("h1", 2)) == []
    assert len(job.started) == 4
    instructions = job.handle(ViewAnnounced(1, ((0, 0), (1, 0), (2, 0), (3, 0))))
    assert SignalProcesses((2, 3), SIGTERM) in instructions
    assert job.texts == ["host h2 has vanished: slots 2, 3 are asked to leave"]


def test_a_host_that_is_taken_away_before_the_first_view_ends_the_job_soon() -> None:
    job = Job(options(), ("h1", 2), ("h2", 2), begins=False)
    job.handle(HostNoticed("h2", SIGTERM, 100.0))
    job.exit(2, 0)
    job.exit(3, -SIGTERM)
    job.at(FIRST_VIEW_SECONDS - 1)
    assert job.state.phase is JobPhase.RUNNING, "the view may be on its way"
    job.at(FIRST_VIEW_SECONDS)
    assert job.texts[-1] == LEFT_EARLY_TEXT
    assert job.end() == FinishJob(1, None, None)


def test_nothing_stays_due_when_a_program_without_views_has_ended_beside_one_that_failed() -> None:
    job = Job(options(), ("h1", 3), begins=False)
    job.exit(1, 1)
    job.exit(0, 0)
    job.now = 2 * FIRST_VIEW_SECONDS
    job.handle(TimePassed())
    assert job.state.next_due() > job.now
    assert job.running == {2}


def test_a_host_with_fewer_places_loses_its_highest_local_ranks() -> None:
    job = Job(options(1, discovery=DISCOVERED), ("h1", 3))
    assert SignalProcesses((1, 2), SIGTERM) in job.find(("h1", 1))


def test_a_process_that_leaves_by_itself_has_not_failed() -> None:
    job = Job(options(cooldown=Cooldown(10, 10, max_failures=1)), ("h1", 3), ("h2", 2))
    job.handle(MemberLeaving(1, 0))
    assert job.started[4:] == [(4, 0, "h2", 1)], "another place is free"
    job.handle(MemberLeaving(1, 0))
    job.exit(1, 0)
    job.handle(ViewAnnounced(2, ((0, 0), (2, 0), (3, 0))))
    job.handle(ViewAnnounced(3, ((0, 0), (2, 0), (3, 0), (4, 0))))
    assert job.texts == [
        "slot 1 (host h1) leaves; 3 processes go on",
        "slot 4 is started (host h2)",
        "slot 1 (host h1) has left; 4 processes go on, its place rests for 10 s",
        "view 2: 3 ranks go on; slot 1 has gone (SIGTERM, or hvd.elastic.leave()); ranks 2-3 are now 1-2",
        "view 3: 4 ranks go on; slot 4 joins as rank 3",
    ]
    job.exit(4, 1)  # which has failed, and is not used again
    job.at(9.9)
    assert len(job.started) == 5
    job.at(10)
    assert job.started[5:] == [(1, 1, "h1", 1)]
    job.handle(MemberLeaving(1, 0))
    assert job.state.slots[1].state is SlotState.RUNNING, "that was its last process"


def test_the_line_about_a_view_waits_for_what_its_members_make_of_the_step() -> None:
    job = Job(options(), ("h1", 3))
    first, told = job.state.members, ChangeNote(2, seconds=0.2)
    job.handle(ChangeExplained(told))
    job.exit(1, -SIGKILL)
    job.handle(ViewAnnounced(2, (first[0], first[2])))
    assert len(job.texts) == 1
    done = msgspec.structs.replace(told, outcome=StepOutcome.UNDONE, step=7, samples=(2, 112, 128))
    job.handle(ChangeExplained(done))
    job.handle(ChangeExplained(done))
    (text,) = job.texts[1:]
    assert text == (
        "view 2: 2 ranks go on 0.0 s after that; slot 1 has gone (killed by SIGKILL); rank 2 is now 1; "
        "step 7 (samples 112-127 of epoch 2) is undone and run again"
    )


@pytest.mark.parametrize("ends", ["time", "view", "finish", "signal"])
def test_the_line_about_a_view_does_not_wait_for_ever(ends: str) -> None:
    job = Job(options(), ("h1", 3))
    members = job.state.members
    job.handle(ChangeExplained(ChangeNote(2, "rank 2: the engine has failed", seconds=0.25)))
    job.handle(ViewAnnounced(2, members))
    assert job.texts == []
    if ends == "time":
        job.at(OUTCOME_SECONDS)
    else:
        event = {"view": ViewAnnounced(3, members), "finish": MemberFinished(0), "signal": SignalReceived(SIGTERM, 0)}
        job.handle(event[ends])
    assert job.texts[0] == "view 2: 3 ranks go on after 0.25 s; rank 2: the engine has failed"


def test_a_host_that_its_engine_takes_away_is_left() -> None:
    job = Job(options(least=1), ("h1", 2), ("h2", 2))
    instructions = job.handle(HostNoticed("h2", SIGTERM, 0.0))
    assert SignalProcesses((2, 3), SIGTERM) in instructions
    assert job.handle(HostNoticed("h2", SIGTERM, 0.0)) == []
    assert job.texts == ["slots 2, 3 are asked to leave"]
    job.exit(2, 0)
    job.exit(3, 0)
    job.at(60)
    assert len(job.started) == 4, "it is not used any more"
    job.handle(HostLost((2, 3), "its pod has gone", "h2"))
    job.at(70)
    assert [each[2] for each in job.started[4:]] == ["h2", "h2"], "it has come back"
    assert not job.state.slots.hosts["h2"].failures.times


def test_a_job_whose_hosts_are_all_taken_away_ends_by_that_signal() -> None:
    job = Job(options(), ("h1", 2), ("h2", 2))
    assert SignalProcesses((0, 1), SIGTERM) in job.handle(HostNoticed("h1", SIGTERM, 0.0))
    assert SignalProcesses((0, 1, 2, 3), SIGTERM) in job.handle(HostNoticed("h2", SIGTERM, 0.0))
    assert job.state.phase is JobPhase.STOPPING
    assert job.end() == FinishJob(128 + SIGTERM, None, SIGTERM)


def test_a_job_that_all_processes_leave_ends() -> None:
    job = Job(options(least=1), ("h1", 4))
    for slot in range(4):
        job.handle(MemberLeaving(slot, 0))
    for slot in range(4):
        assert job.state.phase is JobPhase.RUNNING
        job.exit(slot, 0)
    job.handle(ProcessesSwept())
    assert len(job.started) == 4
    assert job.texts[-1] == ALL_LEFT_TEXT
    assert job.state.phase is JobPhase.DONE


def test_who_does_not_leave_is_killed() -> None:
    job = Job(options(discovery=DISCOVERED), ("h1", 2), ("h2", 1))
    job.find(("h1", 2))
    assert not [each for each in job.at(LEAVE_SECONDS - 1) if isinstance(each, SignalProcesses)]
    assert SignalProcesses((2,), SIGKILL) in job.at(LEAVE_SECONDS)
    job.exit(2, -SIGKILL)
    assert job.running == {0, 1}


def test_a_host_that_cannot_take_part_disturbs_nobody() -> None:
    job = Job(options(discovery=DISCOVERED), ("h1", 2))
    job.unusable.add("h2")
    job.find(("h1", 2), ("h2", 2))
    assert job.texts == ["host h2 cannot take part: no; it is called again in 10 s"]
    assert job.running == {0, 1}
    job.unusable.clear()
    job.at(10)
    assert job.running == {0, 1, 2, 3}


def test_a_lost_host_takes_its_processes_with_it() -> None:
    job = Job(options(), ("h1", 2), ("h2", 2))
    job.handle(HostLost((2, 3), "it has not answered", "h2"))
    assert job.running == {0, 1}
    assert "host h2 was lost, with slots 2, 3: it has not answered" in job.texts[0]
    job.at(10)
    assert job.started[4:] == [(2, 1, "h2", 0), (3, 1, "h2", 1)]


def test_fewer_than_the_minimum_for_too_long() -> None:
    job = Job(options(3, timeout_seconds=60, discovery=DISCOVERED), ("h1", 2), ("h2", 2))
    job.find(("h1", 2))
    job.at(59)
    assert job.state.phase is JobPhase.RUNNING
    job.at(60)
    assert job.state.phase is JobPhase.STOPPING
    assert job.texts[-1].startswith("Timed out waiting for minimum number of slots to become available.")
    assert job.end().exit_code == 1


def test_a_job_that_can_never_have_enough_again_ends_at_once() -> None:
    job = Job(options(3, blacklist="host", cooldown=NEVER), ("h1", 2), ("h2", 2))
    job.exit(0)
    assert job.state.phase is JobPhase.STOPPING
    assert job.texts[-1].startswith("Timed out waiting for minimum number of slots")


def test_places_come_back_in_time() -> None:
    job = Job(options(4, timeout_seconds=60), ("h1", 4))
    job.exit(3)
    job.at(60)
    assert job.running == {0, 1, 2, 3}
    job.at(1000)
    assert job.state.phase is JobPhase.RUNNING


@pytest.mark.parametrize(("limit", "num_survived"), [(0, 0), (1, 1), (3, 3)])
def test_reset_limit(limit: int, num_survived: int) -> None:
    job = Job(options(reset_limit=limit), ("h1", 4))
    for epoch in range(1, num_survived + 1):
        job.handle(ViewAnnounced(epoch, tuple((slot, 0) for slot in range(4))))
        job.state.members = tuple(job.state.slots[slot].id for slot in range(4))
        job.exit(3)
        job.at(job.now + 10)
        assert job.state.phase is JobPhase.RUNNING
    job.handle(ViewAnnounced(num_survived + 1, tuple(job.state.slots[slot].id for slot in range(4))))
    job.exit(2)
    assert job.state.phase is JobPhase.STOPPING
    assert job.texts[-1] == (
        f"Job has been shutdown because number of resets during elastic job exceeded limit: {limit}"
    )
    assert job.end().exit_code == 1


def test_a_death_that_is_noticed_behind_the_view_without_it_is_no_planned_change() -> None:
    job = Job(options(1, reset_limit=1, resize_limit=0), ("h1", 4))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0), (2, 0), (3, 0))))
    job.handle(ViewAnnounced(2, ((0, 0), (1, 0), (2, 0))))
    job.exit(3)
    assert job.state.phase is JobPhase.RUNNING
    job.exit(2)
    assert job.texts[-1] == RESET_LIMIT_TEXT.format(1)


def test_deaths_of_one_change_count_once() -> None:
    job = Job(options(1, reset_limit=1), ("h1", 4))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0), (2, 0), (3, 0))))
    job.exit(1)
    job.exit(2)
    job.exit(3)
    assert job.state.phase is JobPhase.RUNNING


@pytest.mark.parametrize(("counts_resizes", "ends"), [(False, False), (True, True)])
def test_planned_changes_count_with_horovod_alone(*, counts_resizes: bool, ends: bool) -> None:
    job = Job(options(1, reset_limit=1, counts_resizes=counts_resizes), ("h1", 4))
    for epoch in range(1, 4):
        job.handle(ViewAnnounced(epoch, tuple((slot, 0) for slot in range(4))))
    assert (job.state.phase is JobPhase.STOPPING) == ends


def test_exit_code_0_is_a_death_unless_the_program_is_done() -> None:
    job = Job(options(1), ("h1", 2))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0))))
    job.exit(1, 0)
    assert job.texts == [
        "slot 1: it has ended before the job (exit code 0); 1 process goes on, its place rests for 10 s"
    ]
    job.at(10)
    assert job.started[-1] == (1, 1, "h1", 1)


def test_a_job_whose_processes_all_end_with_exit_code_0_says_what_to_do() -> None:
    job = Job(options(1), ("h1", 2))
    job.exit(1, 0)
    job.exit(0, 0)
    assert job.texts[-1] == EARLY_END_TEXT
    assert job.end() == FinishJob(1, None, None)


def test_horovods_jobs_are_done_when_all_processes_end_with_exit_code_0() -> None:
    job = Job(options(1, accepts_early_end=True), ("h1", 3))
    job.exit(2, -SIGKILL)
    job.handle(ViewAnnounced(2, ((0, 0), (1, 0))))
    job.exit(1, 0)
    job.exit(0, 0)
    assert job.texts[-1] == EARLY_SUCCESS_TEXT
    assert job.end() == FinishJob(0, None, None)


def test_exit_code_0_does_not_hide_a_failure() -> None:
    for code in (0, 7):
        job = Job(options(1, accepts_early_end=True), ("h1", 3))
        for slot, each in enumerate((0, 7, code)):
            job.exit(slot, each)
        end = job.end()
        assert (end.exit_code, end.failure and end.failure.rank) == (7, 1)


def test_hosts_that_are_given_up_do_not_end_a_job_whose_processes_end_with_exit_code_0() -> None:
    job = Job(options(2, blacklist="host", cooldown=NEVER, accepts_early_end=True), ("h1", 2), ("h2", 2))
    for slot in (0, 2, 3, 1):
        job.exit(slot, 0)
    assert job.texts[-1] == EARLY_SUCCESS_TEXT
    assert job.end() == FinishJob(0, None, None)


def test_the_job_ends_when_its_members_have_finished() -> None:
    job = Job(options(), ("h1", 4))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0), (2, 0), (3, 0))))
    job.exit(3)
    job.handle(ViewAnnounced(2, ((0, 0), (1, 0), (2, 0))))
    job.at(10)
    assert job.running == {0, 1, 2, 3}
    instructions = job.handle(MemberFinished(1))
    assert SignalProcesses((3,), SIGTERM) in instructions, "it was no member yet"
    job.exit(3, -SIGTERM)
    for slot in (1, 0, 2):
        job.exit(slot, 0)
    assert job.end() == FinishJob(0, None, None)
    assert len(job.started) == 5, "nobody is started any more"


def test_a_member_that_fails_when_others_have_finished_gives_the_exit_code() -> None:
    job = Job(options(), ("h1", 2))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0))))
    job.handle(MemberFinished(0))
    job.exit(1, 5)
    job.exit(0, 0)
    end = job.end()
    assert (end.exit_code, end.failure and end.failure.rank) == (5, 1)
    assert job.texts == ["slot 1: exit code 5"]


def test_a_failure_behind_the_view_without_it_is_told_though_the_job_ends() -> None:
    job = Job(options(1), ("h1", 3))
    job.handle(ViewAnnounced(2, ((0, 0), (2, 0))))
    job.handle(MemberFinished(0))
    assert not [each for each in job.at(1) if isinstance(each, SignalProcesses)], "it ends by itself, by its own code"
    job.exit(1, 5)
    job.exit(0, 0)
    job.exit(2, 0)
    assert job.texts[-1] == "slot 1: exit code 5"
    assert job.end() == FinishJob(0, None, None), "the others have gone on without it"


def test_a_process_that_was_left_out_and_does_not_end_is_asked_to_leave_at_the_end_of_the_job() -> None:
    job = Job(options(1), ("h1", 3))
    job.handle(ViewAnnounced(2, ((0, 0), (2, 0))))
    job.handle(MemberFinished(0))
    assert SignalProcesses((1,), SIGTERM) in job.at(LEFT_OUT_SECONDS)
    texts = list(job.texts)
    assert SignalProcesses((1,), SIGKILL) in job.at(LEFT_OUT_SECONDS + LEAVE_SECONDS)
    job.exit(1, -SIGKILL)
    assert job.texts == texts, "nothing is told of those that the launcher ends"


def test_a_number_that_no_process_has_is_not_finished() -> None:
    job = Job(options(), ("h1", 2))
    job.handle(MemberFinished(2))
    job.handle(MemberFinished(-1))
    job.exit(1)
    job.at(10)
    assert job.running == {0, 1}


def test_an_excluded_process_is_no_failure_of_the_job() -> None:
    job = Job(options(1, blacklist="host", cooldown=TEN_SECONDS), ("h1", 1), ("h2", 1))
    job.exit(1, 75)
    assert job.texts == ["slot 1 (host h2): its fellows have excluded it; 1 process goes on, its place rests for 10 s"]
    job.at(10)
    job.handle(MemberFinished(0))
    job.exit(1, 75)
    job.exit(0, 0)
    assert job.end() == FinishJob(0, None, None)


def test_a_program_that_does_not_know_of_elastic_jobs_may_just_end() -> None:
    job = Job(options(), ("h1", 2), begins=False)
    job.exit(0, 0)
    job.exit(1, 0)
    assert job.end() == FinishJob(0, None, None)


def test_candidates_alone_are_no_job() -> None:
    job = Job(options(1), ("h1", 3))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0), (2, 0))))
    job.exit(2)
    job.at(10)
    job.exit(0, 4)
    last = job.exit(1, 4)
    said = [each.text for each in last if isinstance(each, SayToUser)]
    assert said[0].startswith("slot 1: exit code 4; 0 processes go on"), "one that has come has no state"
    assert said[1:] == [ORPHANED_TEXT]
    assert job.state.phase is JobPhase.RUNNING, "it may have become a member without the launcher's knowledge"
    job.at(job.now + ORPHANED_SECONDS)
    assert job.state.phase is JobPhase.STOPPING
    assert job.end().exit_code == 1


def test_a_job_whose_first_view_cannot_be_ends() -> None:
    job = Job(options(1), ("h1", 2), begins=False)
    job.exit(1, 3)
    job.at(FIRST_VIEW_SECONDS)
    assert job.end().exit_code == 3


def test_a_first_view_may_be_announced_after_a_death() -> None:
    job = Job(options(1), ("h1", 2), begins=False)
    job.exit(1, 3)
    job.at(FIRST_VIEW_SECONDS - 1)
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0))))
    job.at(10)
    assert job.running == {0, 1}


def test_a_view_that_is_announced_late_saves_the_job() -> None:
    job = Job(options(1), ("h1", 2))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0))))
    job.exit(1)
    job.at(10)
    job.exit(0)
    job.at(15)
    job.handle(ViewAnnounced(3, ((1, 1),)))
    job.at(1000)
    assert job.state.phase is JobPhase.RUNNING


def test_a_signal_stops_a_job_that_has_not_begun() -> None:
    job = Job(options(discovery=DISCOVERED), ("h1", 1))
    job.handle(SignalReceived(SIGTERM, 1.0))
    assert job.end() == FinishJob(128 + SIGTERM, None, SIGTERM)


def test_a_signal_stops_everything() -> None:
    job = Job(options(), ("h1", 4))
    assert SignalProcesses((0, 1, 2, 3), SIGTERM) in job.handle(SignalReceived(SIGTERM, 1.0))
    assert job.end() == FinishJob(128 + SIGTERM, None, SIGTERM)
    assert len(job.started) == 4


def test_nothing_is_due_in_a_job_that_is_well() -> None:
    job = Job(options(), ("h1", 4))
    assert job.state.next_due() == inf


# -- parameter servers ------------------------------------------------------------------------------------------------

SERVERS = (100, 101)


class ServedJob(Job):
    """A job of two servers, numbered 100 and 101, the last of them for the scheduler."""

    def __init__(
        self,
        options: ElasticOptions,
        *hosts: tuple[str, int],
        begins: bool = True,
        restarts: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(options, begins=False)
        self.state = ElasticJobState(options, lambda: 0.0, self.now, SERVERS, restarts)
        self.find(*hosts)
        if begins:
            for slot in sorted(self.state.running - set(SERVERS)):
                self.handle(WorkerEntered(slot, 0))
            self.handle(WorkersBegan())


def signalled(instructions: list[JobInstruction | ElasticInstruction]) -> list[tuple[int, ...]]:
    return [each.ranks for each in instructions if isinstance(each, SignalProcesses) and each.signum == SIGTERM]


def test_servers_are_started_with_the_first_processes() -> None:
    job = ServedJob(options(), begins=False)
    starts = [each for each in job.find(("h1", 3)) if isinstance(each, StartServers | StartSlots)]
    assert starts[0] == StartServers(3)
    assert job.running == {0, 1, 2, *SERVERS}


def test_workers_are_started_again_though_no_view_has_been_announced() -> None:
    job = ServedJob(options(), ("h1", 3))
    job.exit(1, -SIGKILL)
    job.at(10.0)
    assert job.started[-1] == (1, 1, "h1", 1)
    job.handle(WorkerEntered(1, 1))
    assert job.texts[-1] == "slot 1 joins; 3 workers go on"
    assert job.state.members == ((0, 0), (2, 0), (1, 1))


def test_a_death_before_the_first_workers_have_joined_is_as_later_ones() -> None:
    """The servers begin without it, and another process joins them."""
    job = ServedJob(options(), ("h1", 3), begins=False)
    job.exit(1, -SIGKILL)
    job.at(FIRST_VIEW_SECONDS)
    assert job.running == {0, 2, *SERVERS}
    for slot in (0, 2):
        job.handle(WorkerEntered(slot, 0))
    job.handle(WorkersBegan())
    job.at(10.0)
    assert job.started[-1] == (1, 1, "h1", 1)
    job.handle(WorkerEntered(1, 1))
    assert job.texts[-1] == "slot 1 joins; 3 workers go on"
    assert job.state.members == ((0, 0), (2, 0), (1, 1))


def test_the_deaths_of_all_first_workers_before_any_has_joined_end_the_job() -> None:
    job = ServedJob(options(1, 2), ("h1", 2), begins=False)
    for slot in (0, 1):
        job.exit(slot, 1)
    assert job.state.phase is JobPhase.STOPPING
    failure = job.end().failure
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (0, 1)


def test_the_job_survives_the_death_of_all_workers() -> None:
    job = ServedJob(options(2, 3), ("h1", 3))
    for slot in range(3):
        job.exit(slot, -SIGKILL)
    job.at(10.0)
    assert job.running == {0, 1, 2, *SERVERS}
    assert [start[:2] for start in job.started[-3:]] == [(0, 1), (1, 1), (2, 1)]


def test_workers_that_leave_in_good_order_end_the_job() -> None:
    job = ServedJob(options(), ("h1", 3))
    job.exit(2, -SIGKILL)
    job.at(10.0)
    assert signalled(job.handle(WorkerDeparted(0, 0))) == [(2,)]  # it has not joined, and would come in vain
    job.exit(0, 0)
    job.exit(2, -SIGTERM)
    job.exit(1, 0)
    assert job.state.phase is JobPhase.ENDING
    for server in SERVERS:
        job.exit(server, 0)
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_exit_code_0_of_a_worker_that_has_not_left_is_a_death() -> None:
    job = ServedJob(options(), ("h1", 3))
    job.exit(0, 0)
    assert "it has ended before the job (exit code 0)" in job.texts[-1]
    job.at(10.0)
    assert job.started[-1] == (0, 1, "h1", 0)


@pytest.mark.parametrize("has_workers", [True, False])
def test_a_server_that_dies_ends_the_job(has_workers: bool) -> None:
    job = ServedJob(options(1, 2), ("h1", 2))
    if not has_workers:
        job.exit(0, -SIGKILL)
        job.exit(1, -SIGKILL)
    instructions = job.exit(100, -SIGKILL)
    assert signalled(instructions) == ([(0, 1)] if has_workers else [])
    for slot in sorted(job.running - {101}):
        instructions = job.exit(slot, -SIGTERM)
    assert TerminateProcesses((101,)) in instructions  # the scheduler, when no worker is left
    job.exit(101, -SIGTERM)
    (finish,) = job.handle(ProcessesSwept())
    assert isinstance(finish, FinishJob)
    assert (finish.exit_code, finish.failure.rank if finish.failure else None) == (128 + SIGKILL, 100)


def test_a_server_that_is_killed_is_started_again_where_it_may_be() -> None:
    job = ServedJob(options(), ("h1", 3), restarts={100: 2})
    assert job.exit(100, -SIGKILL) == [RestartProcess(100, 1, -SIGKILL)]
    assert job.exit(100, 128 + SIGKILL, "out of memory") == [RestartProcess(100, 2, 128 + SIGKILL, "out of memory")]
    assert signalled(job.exit(100, -SIGKILL)) == [(0, 1, 2)]
    assert job.state.failure is not None
    assert job.state.failure.num_restarts == 2


def test_a_scheduler_that_is_killed_while_servers_are_told_of_the_end_is_started_again() -> None:
    job = ServedJob(options(1, 2), ("h1", 2), restarts={100: 1, 101: 2})
    for slot in (0, 1):
        job.handle(WorkerDeparted(slot, 0))
        job.exit(slot, 0)
    assert job.state.phase is JobPhase.ENDING
    assert job.exit(101, -SIGKILL) == [RestartProcess(101, 1, -SIGKILL)]
    stopped = job.exit(100, 0)
    assert TerminateProcesses((101,)) in stopped, "it may wait for a server that the one before it has told"
    job.exit(101, -SIGTERM)
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_a_scheduler_that_is_killed_when_no_server_is_left_is_not_started_again() -> None:
    job = ServedJob(options(1, 1), ("h1", 1), restarts={100: 1, 101: 2})
    job.handle(WorkerDeparted(0, 0))
    job.exit(0, 0)
    assert not any(isinstance(each, TerminateProcesses) for each in job.exit(100, 0)), "it ends by itself"
    assert not any(isinstance(each, RestartProcess) for each in job.exit(101, -SIGKILL))
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_members_that_are_killed_with_the_scheduler_are_the_failure_of_the_job() -> None:
    """The next scheduler reports again that the job has begun."""
    job = ServedJob(options(1, 3), ("h1", 3), restarts={101: 1})
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0))))
    job.exit(1, -SIGKILL)
    job.exit(101, -SIGKILL)
    job.exit(0, -SIGKILL)
    job.handle(WorkersBegan())
    job.at(ORPHANED_SECONDS)
    for number in sorted(job.running):
        job.exit(number, -SIGTERM)
    end = job.end()
    assert (end.exit_code, end.failure and end.failure.rank) == (128 + SIGKILL, 1)


def test_a_scheduler_is_needed_while_workers_leave_after_a_notice() -> None:
    job = ServedJob(options(1, 2), ("h1", 2), restarts={101: 2})
    job.handle(SignalReceived(SIGTERM, 0.0))
    assert job.exit(101, -SIGKILL) == [RestartProcess(101, 1, -SIGKILL)]
    job.exit(0, 0)
    assert TerminateProcesses(SERVERS) in job.exit(1, 0)
    assert not any(isinstance(each, RestartProcess) for each in job.exit(101, -SIGTERM))


def test_a_server_that_ends_with_an_error_is_not_started_again() -> None:
    job = ServedJob(options(), ("h1", 3), restarts={100: 2})
    assert signalled(job.exit(100, 1)) == [(0, 1, 2)]


def test_servers_run_until_the_workers_have_ended_by_a_notice() -> None:
    job = ServedJob(options(), ("h1", 3))
    assert signalled(job.handle(SignalReceived(SIGTERM, 0.0))) == [(0, 1, 2)]
    assert not any(isinstance(each, TerminateProcesses) for slot in (0, 1) for each in job.exit(slot, -SIGTERM))
    assert TerminateProcesses(SERVERS) in job.exit(2, -SIGTERM)


def test_members_are_those_of_views_where_the_program_announces_some() -> None:
    job = ServedJob(options(), ("h1", 3))
    job.handle(ViewAnnounced(1, ((0, 0), (1, 0), (2, 0))))
    job.handle(WorkerDeparted(0, 0))
    job.exit(1, -SIGKILL)
    job.at(10.0)
    assert job.started[-1] == (1, 1, "h1", 1)
    job.handle(WorkerEntered(1, 1))
    assert job.state.members == ((0, 0), (1, 0), (2, 0))
    job.handle(MemberFinished(0))
    assert job.state.finished == {0}


def test_a_pause_is_said_when_it_is_announced() -> None:
    job = Job(options(), ("h1", 4))
    job.handle(ViewAnnounced(2, ((0, 0), (1, 0), (2, 0), (3, 0))))
    before = len(job.texts)
    job.handle(PauseAnnounced(2.13, 5 << 29, (-1, 77)))
    assert job.texts[before:] == [], "nobody waits for processes that there are not"
    job.handle(PauseAnnounced(2.13, 5 << 29, (3, 77)))
    assert job.texts[before:] == ["members wait about 2.1 s while slot 3 gets the state (2.5 GiB)"]
    job.handle(PauseAnnounced(2.13, 5 << 29, (3,)))
    assert len(job.texts) == before + 1, "once in a view"
