"""Workers of an elastic job with parameter servers: places that processes take and leave, and who is told of it."""

from __future__ import annotations

import pytest

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from reigen.cluster.membership.members import RECONNECT_GRACE_SECONDS, LossPolicy, parameter_server_job
from reigen.cluster.membership.messages import (
    BarrierOver,
    EnterBarrier,
    JobEnded,
    LeaveJob,
    MemberAssigned,
    MemberHeartbeat,
    MemberLeft,
    MemberLost,
    MemberRefused,
    MemberReturned,
    MemberRole,
    MembershipEvent,
    MembershipNews,
    MembershipReply,
    RegisterMember,
    WorkerRoster,
)
from reigen.cluster.membership.recorded_job import RecordedEvent, RecordedJob
from reigen.cluster.membership.table import MembershipTable
from reigen.cluster.membership.view import JobView

SPEC = parameter_server_job(3, 1, policy=LossPolicy.ELASTIC, return_seconds=60, first_workers=2)
JOB = 12


class Job:
    """A table with a clock, and what each connection was told since the last look."""

    def __init__(self, *owners: str) -> None:
        self.table, self.now = MembershipTable(SPEC, JOB), 0.0
        self.heard: dict[str, list[MembershipReply | MembershipEvent]] = {}
        for owner in owners:
            self.come(owner)

    def come(self, owner: str, incarnation: int | None = None, slot: tuple[int, int] | None = None) -> None:
        """A process registers; workers are told no number."""
        role: MemberRole = "server" if owner[0] == "s" else "worker"
        number = 0 if role == "server" else -1
        process = incarnation or int(owner[1:]) + 1
        register = RegisterMember(role, number, "h", process, SPEC.counts, slot=slot)
        self.take(self.table.handle(owner, register, self.now))

    def say(self, owner: str, message: EnterBarrier | LeaveJob | MemberHeartbeat) -> None:
        self.take(self.table.handle(owner, message, self.now))

    def die(self, owner: str) -> None:
        """Its connection ends, and it does not come back in time."""
        self.take(self.table.ended(owner, self.now))
        self.wait(RECONNECT_GRACE_SECONDS)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.table.due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.take(self.table.tick(self.now))
        self.now = end

    def take(self, replies: list[tuple[object, MembershipReply]]) -> None:
        self.table.validate()
        for owner, reply in replies:
            told = self.heard.setdefault(str(owner), [])
            told += reply.events if isinstance(reply, MembershipNews) else [reply]

    def told(self, owner: str) -> list[MembershipReply | MembershipEvent]:
        return self.heard.pop(owner, [])


def beat(job: Job, seconds: int, *owners: str) -> None:
    """Time passes, with heartbeats of these."""
    for _ in range(seconds):
        job.wait(1.0)
        for owner in owners:
            job.say(owner, MemberHeartbeat())


def test_it_begins_when_the_first_workers_have_come() -> None:
    job = Job("s0", "w5")
    assert WorkerRoster((0,), is_open=False, incarnations=(6,)) in job.told("w5")
    job.come("w6")
    both = WorkerRoster((0, 1), is_open=True, incarnations=(6, 7))
    assert job.told("w5")[-2:] == [MemberReturned("worker", 1, "h", 7, is_new=True), both]
    assert job.told("s0")[-1] == both


def test_it_begins_with_fewer_where_some_of_the_first_ones_have_ended() -> None:
    job = Job("s0", "w5")
    job.table.first_workers = 1
    job.take(job.table.tick(job.now))
    assert job.told("w5")[-1] == WorkerRoster((0,), is_open=True, incarnations=(6,))


def test_one_whose_process_has_ended_does_not_count_though_its_connection_lasts() -> None:
    job = Job("s0", "w5")
    job.take(job.table.note_death(6, job.now))
    job.table.first_workers = 1
    job.take(job.table.tick(job.now))
    assert not any(isinstance(each, WorkerRoster) and each.is_open for each in job.told("s0"))
    job.come("w6")
    assert any(isinstance(each, WorkerRoster) and each.is_open for each in job.told("s0"))


def test_it_begins_with_the_servers() -> None:
    job = Job("w5", "w6")
    assert job.told("w5")[-1] == MemberReturned("worker", 1, "h", 7, is_new=True)
    job.come("s0")
    assert job.told("w5")[-1] == WorkerRoster((0, 1), is_open=True, incarnations=(6, 7))


def test_one_that_dies_before_the_beginning_does_not_count() -> None:
    job = Job("w5")
    job.die("w5")
    job.come("s0")
    job.come("w6")
    assert not any(isinstance(each, WorkerRoster) and each.is_open for each in job.told("w6"))
    job.come("w7")
    assert job.told("w6")[-1].is_open


def test_a_newcomer_gets_a_free_place_and_is_the_last_in_order() -> None:
    job = Job("s0", "w5", "w6")
    job.die("w5")
    assert job.told("w6")[-1] == MemberLost("worker", 0, "h", "its process ended", incarnation=6)
    job.come("w7")
    assert isinstance(first := job.told("w7")[0], MemberAssigned)
    assert (first.number, first.is_recovery) == (2, True)  # a place that nobody has had
    job.come("w8")
    told = job.told("w8")
    assert isinstance(told[0], MemberAssigned)
    assert told[0].number == 0
    assert told[-1] == WorkerRoster((1, 2, 0), is_open=True, incarnations=(7, 8, 9))
    job.come("w9")
    assert job.told("w9") == [MemberRefused("all 3 worker(s) of this job are there already")]


def test_a_process_that_is_known_to_be_dead_is_not_waited_for() -> None:
    job = Job("s0", "w5", "w6")
    job.told("w6")
    job.take(job.table.note_death(6, job.now))
    assert job.told("w6") == [], "what it has sent is read first"
    job.take(job.table.ended("w5", job.now))
    assert job.told("w6") == [MemberLost("worker", 0, "h", "its process ended", incarnation=6)]


def test_one_whose_connection_has_ended_before_is_lost_at_once() -> None:
    job = Job("s0", "w5", "w6")
    job.told("w6")
    job.take(job.table.ended("w5", job.now))
    assert job.told("w6") == []
    job.take(job.table.note_death(99, job.now))
    job.take(job.table.note_death(6, job.now))
    assert job.told("w6") == [MemberLost("worker", 0, "h", "its process ended", incarnation=6)]
    job.come("w7", 8)
    job.come("w8", 9)
    job.told("w6")
    job.take(job.table.ended("w8", job.now))
    assert job.told("w6") == [], "the next one that has the place may connect again"


def test_one_that_has_left_before_its_end_has_left() -> None:
    job = Job("s0", "w5", "w6")
    job.told("w6")
    job.take(job.table.note_death(6, job.now))
    job.say("w5", LeaveJob())
    job.take(job.table.ended("w5", job.now))
    assert job.told("w6") == [MemberLeft("worker", 0, "h", incarnation=6)]


def test_a_place_whose_worker_has_left_is_free() -> None:
    job = Job("s0", "w5", "w6", "w7")
    job.say("w6", LeaveJob())
    job.told("w5")
    job.come("w8")
    assert job.told("w5") == [MemberReturned("worker", 1, "h", 9, is_new=True)]
    assert job.told("w8")[-1] == WorkerRoster((0, 2, 1), is_open=True, incarnations=(6, 8, 9))


def test_a_lost_process_that_lives_is_refused() -> None:
    job = Job("s0", "w5", "w6")
    beat(job, 19, "w6", "s0")
    job.wait(2.0)
    assert MemberLost("worker", 0, "h", "nothing was heard of it for 20 s", incarnation=6) in job.told("w6")
    job.say("w5", MemberHeartbeat())
    assert job.told("w5")[-1] == MemberRefused("it was given up: nothing was heard of it for 20 s")
    job.come("again", incarnation=6)  # in place of its connection, which was closed
    assert not any(isinstance(each, MemberReturned) and each.incarnation == 6 for each in job.told("w6")[1:])


def test_a_lost_process_does_not_come_back_by_another_connection() -> None:
    job = Job("s0", "w5", "w6")
    job.die("w5")
    known = RegisterMember("worker", 0, "h", 6, SPEC.counts, job=JOB)
    job.take(job.table.handle("again", known, job.now))
    assert job.told("again") == [MemberRefused("it was given up: its process ended")]


def test_a_barrier_counts_those_of_its_beginning() -> None:
    job = Job("s0", "w5", "w6")
    job.say("w5", EnterBarrier("b", 1))
    job.come("w7")
    assert isinstance(first := job.told("w7")[0], MemberAssigned)
    assert first.barriers == (("b", 1),)
    job.say("w6", EnterBarrier("b", 1))
    assert job.told("w6")[-1] == BarrierOver("b", 1)
    job.say("w5", EnterBarrier("b", 2))
    job.say("w6", EnterBarrier("b", 2))
    assert job.told("w5")[-1] == BarrierOver("b", 1)
    job.say("w7", EnterBarrier("b", 2))
    assert job.told("w7")[-1] == BarrierOver("b", 2)


def test_a_barrier_waits_for_no_dead_worker() -> None:
    job = Job("s0", "w5", "w6")
    job.say("w5", EnterBarrier("b", 1))
    job.die("w6")
    assert job.told("w5")[-1] == BarrierOver("b", 1)


def test_it_ends_when_the_last_one_has_left() -> None:
    job = Job("s0", "w5", "w6")
    job.die("w5")
    job.say("w6", LeaveJob())
    assert job.told("s0")[-2:] == [MemberLeft("worker", 1, "h", 7), JobEnded(0, "all workers have left")]


def test_when_all_are_lost_others_may_come() -> None:
    job = Job("s0", "w5", "w6")
    job.say("w5", LeaveJob())
    job.die("w6")
    beat(job, 30, "s0")
    assert job.table.stop is None
    job.come("w7")
    job.die("w7")
    beat(job, 59, "s0")
    assert job.table.stop is None
    job.wait(2.0)
    assert job.table.stop == JobEnded(
        WORKERS_LOST_EXIT_CODE, "all workers have left or are lost, and none came in their place"
    )


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_death_that_is_noticed_behind_the_leaving_of_the_next_process_does_not_keep_the_job(
    is_restarted: bool,
) -> None:
    """A host is lost without a word; its slot's next process comes to the others' end before that is noticed."""
    job = Job("s0")
    job.come("w5", slot=(0, 0))
    job.come("w6", slot=(1, 0))
    job.take(job.table.note_death(7, job.now))
    job.say("w5", LeaveJob())
    job.come("w8", slot=(1, 1))
    if is_restarted:
        job = RestartedJob(job, {6: (0, 0), 7: (1, 0), 9: (1, 1)})
        job.come_again("s0", 0)
        job.come_again("w8", 2)
    job.say("w8", LeaveJob())
    assert job.table.stop is None
    beat(job, 21, "s0")
    assert job.table.stop == JobEnded(0, "all workers have left")


def test_a_lost_server_ends_it() -> None:
    job = Job("s0", "w5", "w6")
    job.die("s0")
    assert job.told("w5")[-1] == JobEnded(1, "server 0 on host h is lost: its process ended")


@pytest.mark.parametrize(
    "gone", [MemberLost("worker", 2, "h", "its process ended", incarnation=3), MemberLeft("worker", 2, "h")]
)
def test_a_member_knows_who_is_there_in_order(gone: MembershipEvent) -> None:
    view = JobView(RegisterMember("worker", -1, "h", 9, SPEC.counts), is_loss_fatal=False)
    view.take(MemberAssigned(1, is_recovery=True, job=JOB))
    view.take(MembershipNews((WorkerRoster((2, 0, 1), is_open=True), gone)))
    assert view.roster == [0, 1]
    assert view.fatal_loss() is None
    view.take(MembershipNews((MemberReturned("worker", 2, "h", 10, is_new=True),) * 2))
    assert view.roster == [0, 1, 2]
    assert (view.left, view.lost) == ({}, {})


# -- another scheduler ------------------------------------------------------------------------------------------------


class RestartedJob(Job):
    """The same job with another table, made of what the one before it has announced."""

    def __init__(self, before: Job, slots: dict[int, tuple[int, int]] | None = None) -> None:
        super().__init__()
        slot_of = slots or {}
        entries = [
            RecordedEvent(event, number, slot_of.get(event.incarnation) if isinstance(event, MemberReturned) else None)
            for number, event in enumerate(before.table.announced, 1)
        ]
        self.table = MembershipTable(SPEC, JOB, recorded=RecordedJob.replay(entries), now=before.now)
        self.now = before.now

    def come_again(self, owner: str, number: int, *barriers: EnterBarrier) -> None:
        """A process that knows its place registers."""
        role: MemberRole = "server" if owner[0] == "s" else "worker"
        process = int(owner[1:]) + 1
        known = RegisterMember(role, number, "h", process, SPEC.counts, job=JOB, is_open=True, barriers=barriers)
        self.take(self.table.handle(owner, known, self.now))


def test_another_scheduler_knows_who_is_there_by_age() -> None:
    before = Job("s0", "w5", "w6", "w7")
    before.die("w5")
    before.come("w8")
    job = RestartedJob(before)
    job.come_again("w7", 2)
    assert WorkerRoster((1, 2, 0), is_open=True, incarnations=(7, 8, 9)) in job.told("w7")
    job.come_again("s0", 0)
    told = job.told("s0")
    assert MemberLost("worker", 0, "h", "its process ended", incarnation=6) in told, "it may not have heard of it"
    assert told.index(MemberLost("worker", 0, "h", "its process ended", incarnation=6)) < told.index(
        WorkerRoster((1, 2, 0), is_open=True, incarnations=(7, 8, 9))
    )


def test_newcomers_wait_for_those_who_know_the_job() -> None:
    before = Job("s0", "w5", "w6")
    before.say("w5", EnterBarrier("b", 1))
    job = RestartedJob(before)
    job.come("w9")
    job.come_again("s0", 0)
    job.come_again("w6", 1)
    assert job.told("w9") == []
    job.come_again("w5", 0, EnterBarrier("b", 1))
    (first, *_) = job.told("w9")
    assert isinstance(first, MemberAssigned)
    assert (first.number, first.barriers) == (2, (("b", 1),))


def test_newcomers_do_not_wait_for_one_that_has_ended_meanwhile() -> None:
    job = RestartedJob(Job("s0", "w5", "w6"))
    job.come_again("w6", 1)
    job.come("w9")
    assert MemberLost("worker", 0, "h", "its process ended", incarnation=6) not in job.told("w6")
    job.take(job.table.note_death(6, job.now))
    assert job.told("w6")[0] == MemberLost("worker", 0, "h", "its process ended", incarnation=6)
    assert isinstance(job.told("w9")[0], MemberAssigned)


def test_one_that_does_not_come_back_is_lost() -> None:
    job = RestartedJob(Job("s0", "w5", "w6"))
    job.come_again("s0", 0)
    job.come_again("w6", 1)
    beat(job, 21, "w6", "s0")
    loss = MemberLost("worker", 0, "h", "it did not come back within 20 s", incarnation=6)
    assert loss in job.told("s0")
    job.come_again("w5", 0)
    assert job.told("w5") == [MemberRefused("it was given up: it did not come back within 20 s")]


def test_one_that_was_not_told_its_place_gets_it() -> None:
    job = RestartedJob(Job("s0", "w5", "w6", "w7"))
    job.come("w7")
    job.come_again("w5", 0, EnterBarrier("b", 1))
    assert job.told("w7") == []
    job.come_again("w6", 1)
    (first, *_) = job.told("w7")
    assert isinstance(first, MemberAssigned)
    assert (first.number, first.is_recovery, first.barriers) == (2, True, (("b", 1),))
    assert not any(isinstance(each, MemberReturned) for each in job.told("w5")), "it is in the roster already"


def test_a_barrier_waits_for_those_who_have_not_come_back() -> None:
    job = RestartedJob(Job("s0", "w5", "w6"))
    job.come_again("w5", 0, EnterBarrier("b", 1))
    assert not any(isinstance(each, BarrierOver) for each in job.told("w5"))
    job.say("w5", EnterBarrier("b", 1, is_abandoned=True))
    assert not any(isinstance(each, BarrierOver) for each in job.told("w5")), "the other one may have passed it"
    job.come_again("w6", 1, EnterBarrier("b", 1, is_over=True))
    assert set(job.told("w5")) == {BarrierOver("b", 1)}


def test_the_job_does_not_begin_before_all_are_back() -> None:
    before = Job("w5")
    job = RestartedJob(before)
    job.come_again("s0", 0)
    job.come("w6")
    assert not any(isinstance(each, WorkerRoster) and each.is_open for each in job.told("s0"))
    job.come_again("w5", 0)
    assert job.told("s0")[-1] == WorkerRoster((0, 1), is_open=True, incarnations=(6, 7))


def test_workers_that_are_only_recorded_do_not_begin_the_job() -> None:
    job = RestartedJob(Job("w5", "w6"))
    job.come_again("s0", 0)
    job.come_again("w6", 1)
    assert job.told("s0")[-1] == WorkerRoster((0, 1), is_open=False, incarnations=(6, 7))
    job.take(job.table.note_death(6, job.now))
    assert not any(isinstance(each, WorkerRoster) for each in job.told("s0"))
    job.come("w9")
    assert job.told("s0")[-1] == WorkerRoster((1, 2), is_open=True, incarnations=(7, 10))


def test_one_that_has_missed_who_has_a_lost_workers_place_hears_it_by_age() -> None:
    before = Job("s0", "w5", "w6", "w7")
    before.die("w5")
    before.come("w8")
    before.die("w7")
    before.come("w9")
    job = RestartedJob(before)
    known = RegisterMember("worker", 1, "h", 7, SPEC.counts, job=JOB, lost=(("worker", 0),))
    job.take(job.table.handle("w6", known, job.now))
    told = [each for each in job.told("w6") if isinstance(each, WorkerRoster | MemberReturned)]
    assert told == [WorkerRoster((1, 0, 2), is_open=True, incarnations=(7, 9, 10))]


def test_the_job_is_not_over_before_servers_can_hear_of_it() -> None:
    before = Job("s0", "w5", "w6")
    before.say("w5", LeaveJob())
    job = RestartedJob(before)
    job.come_again("w6", 1)
    job.say("w6", LeaveJob())
    assert job.table.stop is None
    job.come_again("s0", 0)
    assert job.told("s0")[-1] == JobEnded(0, "all workers have left")


def test_who_comes_behind_the_end_is_told_of_it() -> None:
    before = Job("s0", "w5", "w6")
    for owner in ("w5", "w6"):
        before.say(owner, LeaveJob())
    assert before.table.stop is not None
    job = RestartedJob(before)
    job.come_again("s0", 0)
    assert job.told("s0") == [JobEnded(0, "all workers have left")]
    job.come("w9")
    assert job.told("w9") == [MemberRefused("the job is over: all workers have left")]


def test_a_process_whose_connection_breaks_before_it_knows_its_place_does_not_get_two() -> None:
    job = Job("s0", "w5", "w6")
    job.take(job.table.ended("w6", job.now))
    job.come("again", incarnation=7)
    (first, *_) = job.told("again")
    assert isinstance(first, MemberAssigned)
    assert first.number == 1
    job.wait(2.0)
    assert not any(isinstance(each, MemberLost) for each in job.told("w5"))


def test_a_view_that_hears_who_is_there_forgets_who_had_their_places() -> None:
    view = JobView(RegisterMember("worker", -1, "h", 9, SPEC.counts), is_loss_fatal=False)
    view.take(MemberAssigned(1, is_recovery=True, job=JOB))
    view.take(MembershipNews((MemberLost("worker", 0, "h", "its process ended", incarnation=3),)))
    view.take(MembershipNews((MemberLeft("worker", 2, "h", 4),)))
    view.take(MembershipNews((WorkerRoster((0, 2, 1), is_open=True, incarnations=(5, 6, 9)),)))
    assert (view.roster, view.lost, view.left) == ([0, 2, 1], {}, {})


def test_a_view_that_hears_again_of_a_loss_does_not_strike_who_has_the_place_now() -> None:
    """A server whose connection broke is told of losses of which it may not have heard."""
    view = JobView(RegisterMember("server", 0, "h", 9, SPEC.counts), is_loss_fatal=False)
    view.take(MemberAssigned(0, is_recovery=False, job=JOB))
    past = MemberLost("worker", 0, "h", "its process ended", incarnation=3)
    came = MemberReturned("worker", 0, "h", 5, is_new=True)
    view.take(MembershipNews((past, came)))
    view.take(MembershipNews((past,)))
    assert (view.roster, view.lost, view.events) == ([0], {}, [past, came])


def test_a_view_hears_of_each_loss_of_a_process_that_returns() -> None:
    """Where jobs are not elastic."""
    view = JobView(RegisterMember("server", 0, "h", 9, SPEC.counts), is_loss_fatal=False)
    view.take(MemberAssigned(0, is_recovery=False, job=JOB))
    lost = MemberLost("worker", 0, "h", "its process ended", incarnation=3)
    events = (lost, MemberReturned("worker", 0, "h", 3), lost)
    view.take(MembershipNews(events))
    assert view.events == list(events)
    assert view.lost == {("worker", 0): lost}
