"""Who is in the job: messages in, what to tell whom out. "w0" and "s1" are connections; a prime is another process."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from reigen.cluster.membership.barriers import MAX_BARRIERS
from reigen.cluster.membership.members import RECONNECT_GRACE_SECONDS, JobSpec, LossPolicy, parameter_server_job
from reigen.cluster.membership.messages import (
    MEMBERSHIP_REPLY_CODEC,
    BarrierOver,
    EnterBarrier,
    JobEnded,
    LeaveJob,
    MemberAssigned,
    MemberHeartbeat,
    MemberLeft,
    MemberLost,
    MemberMessage,
    MemberRefused,
    MemberReturned,
    MembershipEvent,
    MembershipNews,
    MembershipReply,
    RegisterMember,
    SavedJob,
    ServerInfo,
    ServerList,
    StatusQuery,
    StatusReply,
)
from reigen.cluster.membership.table import MembershipTable
from reigen.errors import DeadlineError

TERMS = parameter_server_job(2, 1)
WAIT, CONTINUE = (parameter_server_job(2, 1, policy=policy) for policy in (LossPolicy.WAIT, LossPolicy.CONTINUE))


#: number of the job
JOB = 4711


def assigned(number: int, is_recovery: bool, barriers: tuple[tuple[str, int], ...] = ()) -> MemberAssigned:
    return MemberAssigned(number, is_recovery, JOB, barriers=barriers)


def register(owner: str, terms: JobSpec = TERMS, *, number: int | None = None, known: bool = False) -> RegisterMember:
    """What the process of a connection says of itself: "w0'" is the second process that is worker 0."""
    role = "worker" if owner[0] == "w" else "server"
    process = 1 + owner.count("'")
    return RegisterMember(
        role,
        int(owner[1]) if number is None else number,
        f"h{owner[1]}",
        process,
        terms.counts,
        "" if role == "worker" else f"h{owner[1]}:{7000 + process}",
        job=JOB if known else 0,
    )


def peer(owner: str) -> ServerInfo:
    message = register(owner)
    return ServerInfo(message.number, message.address, message.incarnation, message.host)


class Job:
    """A roster with a clock, validated after every step; keeps what each connection was told last."""

    def __init__(self, terms: JobSpec = TERMS, *present: str, known_first_seconds: float = 0.0) -> None:
        self.epochs: dict[str, int] = {}
        self.terms, self.roster, self.now = terms, MembershipTable(terms, JOB, 100.0 + known_first_seconds), 100.0
        for owner in present:
            self.come(owner)

    def _told(
        self, instructions: list[tuple[object, MembershipReply]]
    ) -> dict[str, list[MembershipReply | MembershipEvent]]:
        self.roster.validate()
        told: dict[str, list[MembershipReply | MembershipEvent]] = {}
        for owner, answer in instructions:
            assert MEMBERSHIP_REPLY_CODEC.decode(MEMBERSHIP_REPLY_CODEC.encode(answer)) == answer
            if isinstance(answer, MembershipNews | MemberAssigned):  # what happens has a higher number each time
                assert answer.epoch >= self.epochs.get(str(owner), 0)
                self.epochs[str(owner)] = answer.epoch
            if isinstance(answer, MembershipNews):
                told.setdefault(str(owner), []).extend(answer.events)
            else:
                plain = structs.replace(answer, epoch=0) if isinstance(answer, MemberAssigned) else answer
                told.setdefault(str(owner), []).append(plain)
        return told

    def come(self, owner: str, **said: object) -> dict[str, list[MembershipReply | MembershipEvent]]:
        return self.say(owner, register(owner, self.terms, **said))  # type: ignore[arg-type]

    def say(self, owner: str, message: MemberMessage) -> dict[str, list[MembershipReply | MembershipEvent]]:
        return self._told(self.roster.handle(owner, message, self.now))

    def end(self, owner: str) -> dict[str, list[MembershipReply | MembershipEvent]]:
        return self._told(self.roster.ended(owner, self.now))

    def wait(self, seconds: float) -> dict[str, list[MembershipReply | MembershipEvent]]:
        """Time passes, and ticks come when they are due; what everybody was told meanwhile."""
        until, told = self.now + seconds, {}
        while (due := self.roster.due()) is not None and due <= until:
            self.now = max(self.now, due)
            for owner, answers in self._told(self.roster.tick(self.now)).items():
                told.setdefault(owner, []).extend(answers)
        self.now = until
        return told

    def beat(self, seconds: float, *owners: str) -> dict[str, list[MembershipReply | MembershipEvent]]:
        """Time passes, with heartbeats of these."""
        told: dict[str, list[MembershipReply | MembershipEvent]] = {}
        for _ in range(int(seconds)):
            for owner, answers in self.wait(1).items():
                told.setdefault(owner, []).extend(answers)
            for owner in owners:
                for other, answers in self.say(owner, MemberHeartbeat()).items():
                    told.setdefault(other, []).extend(answers)
        return told


def started(terms: JobSpec = TERMS) -> Job:
    return Job(terms, "s0", "w0", "w1")


# -- numbers, start ---------------------------------------------------------------------------------------------------


def test_everybody_is_told_where_the_servers_are_when_all_have_come() -> None:
    job = Job(parameter_server_job(2, 2))
    assert job.come("w1") == {"w1": [assigned(1, False)]}
    assert job.come("s1") == {"s1": [assigned(1, False)]}
    welcome = ServerList((peer("s0"), peer("s1")))
    assert job.come("s0") == {"s0": [assigned(0, False), welcome], "w1": [welcome], "s1": [welcome]}
    assert job.come("w0") == {"w0": [assigned(0, False), welcome]}


def test_numbers_go_by_arrival_where_nobody_was_told_one() -> None:
    job = Job(parameter_server_job(3, 1))
    assert job.come("w1") == {"w1": [assigned(1, False)]}
    assert job.come("w7", number=-1) == {"w7": [assigned(0, False)]}
    assert job.come("w8", number=-1) == {"w8": [assigned(2, False)]}
    assert job.come("w9", number=-1) == {"w9": [MemberRefused("all 3 worker(s) of this job are there already")]}


def test_what_makes_no_sense_is_refused() -> None:
    job = Job(TERMS, "w0")
    assert job.come("w5") == {"w5": [MemberRefused("there is no worker 5 among 2")]}
    assert job.come("w0") == {"w0": [MemberRefused("this connection has registered before")]}
    (refused,) = job.say("w1", register("w1", parameter_server_job(4, 1)))["w1"]
    assert isinstance(refused, MemberRefused)
    assert refused.reason.startswith("it expects 4 worker(s) and 1 server(s), but this job has 2 and 1")
    assert job.say("nobody", MemberHeartbeat()) == {}


def test_a_process_that_ends_before_the_start_is_forgotten() -> None:
    job = Job(TERMS, "w0", "w1")
    job.say("w0", EnterBarrier("b", 1))
    assert job.end("w0") == {}
    assert job.come("w0'") == {"w0'": [assigned(0, False)]}
    job.come("s0")
    assert job.say("w1", EnterBarrier("b", 1)) == {}
    assert job.say("w0'", EnterBarrier("b", 1)) == {"w0'": [BarrierOver("b", 1)], "w1": [BarrierOver("b", 1)]}


def test_servers_that_do_not_come_end_the_job() -> None:
    job = Job(TERMS, "w0")
    assert job.say("w0", StatusQuery()) == {"w0": [StatusReply((1,), (0,))]}
    told = job.beat(31, "w0")
    reason = (
        "worker 1, server 0 did not come in time: after the first process, servers are waited for 30 s "
        "(REIGEN_START_TIMEOUT), workers 600 s (REIGEN_DEADLINE)"
    )
    assert told["w0"] == [JobEnded(1, reason, is_late=True, workers=(1,))] == [job.roster.stop]
    assert job.come("s0") == {"s0": [MemberRefused(f"the job is over: {reason}")]}


def test_workers_have_longer_to_come() -> None:
    job = Job(TERMS, "w0", "s0")
    assert job.beat(599, "w0", "s0") == {}
    (stop,) = job.beat(2, "w0", "s0")["s0"]
    assert isinstance(stop, JobEnded)
    assert "worker 1 did not come in time" in stop.reason
    with pytest.raises(DeadlineError, match="the job is over: worker 1 did not come") as caught:  # servers had come
        raise stop.error()
    assert caught.value.ranks == (1,)


def test_nobody_is_late_because_the_scheduler_did_not_run() -> None:
    job = Job(TERMS, "w0")
    job.now += 1000
    assert job.say("w0", MemberHeartbeat()) == {}
    assert job.wait(5) == {}
    assert job.come("w1") == {"w1": [assigned(1, False)]}
    job.come("s0")
    assert job.roster.stop is None
    job.end("w1")
    job.now += 1000
    job.come("w1")
    assert job.beat(60, "w0", "w1", "s0") == {}


# -- loss and return --------------------------------------------------------------------------------------------------


def test_a_connection_that_ends_is_a_loss_that_all_are_told() -> None:
    job = started()
    assert job.end("w1") == {}
    loss = MemberLost("worker", 1, "h1", "its process ended", False, 1)
    assert job.wait(RECONNECT_GRACE_SECONDS) == {"s0": [loss], "w0": [loss]}
    (refused,) = job.come("w1'")["w1'"]
    assert refused == MemberRefused(
        "worker 1 on host h1 is lost: its process ended; this job does not go on without it"
    )
    assert job.say("w0", LeaveJob())["s0"][-1] == JobEnded(WORKERS_LOST_EXIT_CODE, str(loss))


def test_a_connection_may_be_made_again() -> None:
    job = started()
    job.end("w1")
    assert job.come("w1", known=True) == {"w1": [assigned(1, False), ServerList((peer("s0"),))]}
    assert job.beat(60, "w0", "w1", "s0") == {}
    job.say("w1 again", register("w1", known=True))  # before the end of the old one was seen
    assert job.end("w1") == {}
    assert job.beat(60, "w0", "w1 again", "s0") == {}


@pytest.mark.parametrize("terms", [WAIT, CONTINUE])
def test_a_process_that_comes_for_a_lost_workers_number_takes_its_place(terms: JobSpec) -> None:
    job = started(terms)
    job.end("w1")
    loss = MemberLost("worker", 1, "h1", "its process ended", terms is WAIT, 1)
    back = MemberReturned("worker", 1, "h1", 2)
    assert job.come("w1'") == {  # its predecessor cannot be there any more
        "s0": [loss, back],
        "w0": [loss, back],
        "w1'": [assigned(1, True), back, ServerList((peer("s0"),))],
    }
    (refused,) = job.come("w1", known=True)["w1"]
    assert refused == MemberRefused("another process has become worker 1")


def test_a_process_without_a_number_takes_a_lost_ones_place() -> None:
    job = started(WAIT)
    job.end("w0")
    job.wait(5)
    assert job.come("w9'", number=-1)["w9'"][0] == assigned(0, True)


def test_silence_is_a_loss_and_whoever_was_silent_may_be_there_again() -> None:
    job = started(WAIT)
    told = job.beat(21, "w0", "s0")
    loss = MemberLost("worker", 1, "h1", "nothing was heard of it for 20 s", True, 1)
    assert told == {"w0": [loss], "s0": [loss], "w1": [loss]}
    back = MemberReturned("worker", 1, "h1", 1)
    assert job.say("w1", MemberHeartbeat()) == {"w0": [back], "s0": [back], "w1": [back]}


def test_under_abort_whoever_was_silent_too_long_is_told_that_it_was_given_up() -> None:
    job = started()
    job.beat(21, "w0", "s0")
    assert job.say("w1", MemberHeartbeat()) == {
        "w1": [MemberRefused("it was given up: nothing was heard of it for 20 s")]
    }


def test_while_the_first_may_be_alive_another_process_waits_for_its_place() -> None:
    job = started(WAIT)
    assert job.come("w1'") == {}
    assert job.come("w1''") == {"w1''": [MemberRefused("worker 1 is there already, on host h1")]}
    assert job.say("w1", MemberHeartbeat()) == {"w1'": [MemberRefused("worker 1 is there already, on host h1")]}
    assert job.come("w1''") == {}
    told = job.beat(21, "w0", "s0")  # its machine has crashed, and nobody closed its connection
    assert told["w1''"][:1] == [assigned(1, True)]
    assert told["w1"][-1] == MemberRefused("another process has become worker 1")
    assert told["w0"] == [
        MemberLost("worker", 1, "h1", "nothing was heard of it for 20 s", True, 1),
        MemberReturned("worker", 1, "h1", 3),
    ]


def test_a_process_that_waits_for_a_place_may_go() -> None:
    job = started(WAIT)
    job.come("w1'")
    job.end("w1'")
    assert job.end("w1") == {}
    assert list(job.wait(1)) == ["s0", "w0"]


def test_a_process_that_waits_for_a_place_asks_for_no_other() -> None:
    job = started(WAIT)
    job.come("w1'")
    assert job.come("w1'", number=0) == {"w1'": [MemberRefused("this connection has registered before")]}


def test_an_older_connection_of_a_process_asks_for_no_other_place() -> None:
    job = Job(TERMS, "s0", "w0")
    job.say("again", register("w0"))  # the same process: what it had before is kept for what it may still say
    assert job.come("w0", number=1) == {"w0": [MemberRefused("this connection has registered before")]}
    assert job.come("w1")["w1"][0] == assigned(1, False)


def test_without_heartbeats_nobody_waits_for_a_place_that_is_taken() -> None:
    job = started(parameter_server_job(2, 1, policy=LossPolicy.WAIT, heartbeat_timeout_seconds=math.inf))
    assert job.come("w1'") == {"w1'": [MemberRefused("worker 1 is there already, on host h1")]}
    assert job.wait(10_000) == {}


def test_time_in_which_the_scheduler_did_not_run_is_nobodys_silence() -> None:
    job = started()
    job.now += 1000  # suspended
    job.roster.tick(job.now)
    assert job.beat(60, "w0", "w1", "s0") == {}


def test_a_connection_that_is_made_again_is_no_restart_of_the_scheduler() -> None:
    job = Job(parameter_server_job(3, 1), "w0", "s0")
    job.end("w0")
    job.come("w0", known=True)
    assert job.come("w1")["w1"][0] == assigned(1, False)
    early = Job(TERMS, "w0")
    early.end("w0")  # before the start: forgotten
    assert early.come("w0", known=True) == {"w0": [assigned(0, False)]}
    assert early.come("w1")["w1"][0] == assigned(1, False)


def test_connections_of_one_process_may_be_heard_in_another_order() -> None:
    job = started()
    job.say("newer", register("w1", known=True))
    job.say("older", register("w1", known=True))
    assert job.end("older")["newer"][0] == assigned(1, False)
    assert job.end("w1") == {}
    assert job.beat(60, "w0", "newer", "s0") == {}


def test_a_server_that_is_started_again_is_found_where_it_is_now() -> None:
    job = started(parameter_server_job(2, 1, servers_return=True))
    job.end("s0")
    loss = MemberLost("server", 0, "h0", "its process ended", True, 1)
    assert job.wait(1) == {"w0": [loss], "w1": [loss]}
    moved = MemberReturned("server", 0, "h0", 2, peer("s0'").address)
    told = job.come("s0'")
    assert told["w0"] == told["w1"] == [moved]
    assert told["s0'"] == [assigned(0, True), moved, ServerList((peer("s0'"),))]


def test_a_server_that_nobody_starts_again_is_lost_for_good() -> None:
    job = started(parameter_server_job(2, 1, servers_return=True))
    job.end("s0")
    told = job.beat(32, "w0", "w1")
    assert told["w0"][1] == MemberLost("server", 0, "h0", "no process took its place within 30 s", False, 1)
    assert isinstance(job.come("s0'")["s0'"][0], MemberRefused)
    job.say("w0", LeaveJob())
    assert job.say("w1", LeaveJob())["w1"][-1] == JobEnded(
        1, "server 0 on host h0 is lost: no process took its place within 30 s"
    )


def test_who_comes_is_told_what_has_happened() -> None:
    job = started(parameter_server_job(2, 1, policy=LossPolicy.WAIT, servers_return=True))
    job.say("w0", LeaveJob())
    job.end("s0")
    job.wait(1)
    job.end("w1")
    told = job.come("s0'")["s0'"]
    assert told[-1] == MemberLeft("worker", 0, "h0")
    assert ServerList((peer("s0'"),)) in told


def test_who_was_away_when_another_returned_hears_of_it() -> None:
    job = started(WAIT)
    job.beat(21, "w0", "s0")  # worker 1 is silent
    job.end("s0")
    back = MemberReturned("worker", 1, "h1", 1)
    assert job.say("w1", MemberHeartbeat()) == {"w0": [back], "w1": [back]}
    again = structs.replace(register("s0", known=True), lost=(("worker", 1), ("worker", 9)))
    assert job.say("s0 again", again)["s0 again"][-1] == back


def test_after_a_restart_who_is_held_for_lost_is_announced_when_it_comes() -> None:
    job = Job(WAIT)
    job.say("w0", structs.replace(register("w0", known=True), lost=(("worker", 1),)))
    assert job.come("w1", known=True)["w0"] == [MemberReturned("worker", 1, "h1", 1)]


# -- barriers ---------------------------------------------------------------------------------------------------------


def test_a_barrier_is_done_when_all_have_entered_as_often() -> None:
    job = started()
    assert job.say("w0", EnterBarrier("b", 1)) == {}
    done = BarrierOver("b", 1)
    assert job.say("w1", EnterBarrier("b", 1)) == {"w0": [done], "w1": [done]}
    assert job.say("w1", EnterBarrier("b", 1)) == {"w1": [done]}
    assert job.say("w1", EnterBarrier("b", 2)) == job.say("w0", EnterBarrier("c", 2)) == {}


def test_a_barrier_that_one_gives_up_is_broken_for_all_whenever_they_come() -> None:
    job = Job(parameter_server_job(3, 1), "s0", "w0", "w1", "w2")
    for owner in ("w0", "w1"):
        job.say(owner, EnterBarrier("b", 1))
    broken = BarrierOver("b", 1, 0, (2,))
    assert job.say("w0", EnterBarrier("b", 1, is_abandoned=True)) == {"w0": [broken], "w1": [broken]}
    assert job.say("w0", EnterBarrier("b", 2)) == {}  # it tries again
    assert job.say("w2", EnterBarrier("b", 1)) == {"w2": [broken]}
    assert job.say("w2", EnterBarrier("b", 1)) == {"w2": [broken]}  # whose answer got lost
    assert job.say("w2", EnterBarrier("b", 2)) == {}
    done = BarrierOver("b", 2)
    assert job.say("w1", EnterBarrier("b", 2)) == {"w0": [done], "w1": [done], "w2": [done]}
    assert job.say("w0", EnterBarrier("b", 2, is_abandoned=True)) == {"w0": [done]}  # too late: all have come


def test_a_replacement_passes_over_barriers_that_are_broken() -> None:
    job = started(WAIT)
    job.say("w0", EnterBarrier("b", 1))
    job.say("w0", EnterBarrier("b", 1, is_abandoned=True))
    job.end("w1")
    assert job.come("w1'")["w1'"][0] == assigned(1, True, (("b", 1),))


@pytest.mark.parametrize("passed", [True, False])
def test_after_a_restart_nothing_is_given_up_that_somebody_may_have_passed(passed: bool) -> None:
    job = Job(parameter_server_job(2, 1))
    job.come("s0", known=True)
    job.come("w0", known=True)
    assert job.say("w0", EnterBarrier("b", 1, is_abandoned=True)) == {}  # worker 1 may have heard that all came
    one = structs.replace(register("w1", known=True), barriers=(EnterBarrier("b", 1, is_over=True),) if passed else ())
    told = job.say("w1", one)
    assert told["w0"][-1] == BarrierOver("b", 1) if passed else BarrierOver("b", 1, 0, (1,))


def test_how_a_barrier_ended_is_told_again_by_those_who_know_it() -> None:
    job = Job(parameter_server_job(2, 1))
    job.come("s0", known=True)
    broken = (EnterBarrier("b", 1, is_abandoned=True, is_over=True),)
    job.say("w0", structs.replace(register("w0", known=True), barriers=broken))
    told = job.say("w1", structs.replace(register("w1", known=True), barriers=(EnterBarrier("b", 1),)))
    assert told["w1"][-1] == BarrierOver("b", 1, 0, (1,))


def test_a_worker_that_leaves_is_not_waited_for_at_barriers() -> None:
    job = started()
    job.say("w0", EnterBarrier("b", 1))
    assert job.say("w1", LeaveJob())["w0"] == [MemberLeft("worker", 1, "h1"), BarrierOver("b", 1)]


def test_a_replacement_goes_on_with_the_barriers_where_the_others_are() -> None:
    job = started(WAIT)
    for sequence in (1, 2):
        job.say("w0", EnterBarrier("b", sequence))
        job.say("w1", EnterBarrier("b", sequence))
    job.say("w0", EnterBarrier("b", 3))
    job.end("w1")
    assert job.wait(1)["w0"][-1] != BarrierOver("b", 3)
    assert job.come("w1'")["w1'"][0] == assigned(1, True, (("b", 2),))
    assert job.say("w1'", EnterBarrier("b", 3))["w0"] == [BarrierOver("b", 3)]


def test_those_who_go_on_without_a_worker_do_not_wait_for_it_at_barriers() -> None:
    job = started(CONTINUE)
    job.say("w0", EnterBarrier("b", 1))
    job.end("w1")
    assert job.wait(1)["w0"][-1] == BarrierOver("b", 1)


def test_barriers_are_bounded() -> None:
    job = started()
    for number in range(MAX_BARRIERS):
        assert job.say("w0", EnterBarrier(str(number), 1)) == {}
    assert isinstance(job.say("w0", EnterBarrier("x", 1))["w0"][0], MemberRefused)
    assert isinstance(job.say("w1", EnterBarrier("x" * 257, 1))["w1"][0], MemberRefused)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_the_job_is_over_when_all_workers_have_left() -> None:
    job = started()
    left = MemberLeft("worker", 0, "h0")
    assert job.say("w0", LeaveJob()) == {"s0": [left], "w0": [left], "w1": [left]}
    assert job.end("w0") == {}
    (refused,) = job.come("w0'")["w0'"]
    assert refused == MemberRefused("worker 0 has left this job before; it cannot come back")
    assert job.say("w1", LeaveJob())["s0"] == [MemberLeft("worker", 1, "h1"), JobEnded(0, "all workers have left")]
    assert job.roster.due() is None
    assert job.end("s0") == job.end("w1") == {}


def test_a_worker_that_has_left_may_connect_again_and_be_silent() -> None:
    job = started()
    job.say("w0", LeaveJob())
    job.end("w0")
    assert job.come("w0", known=True)["w0"][0] == assigned(0, False)
    assert job.beat(60, "w1", "s0") == {}
    assert job.say("w1", LeaveJob())["s0"][-1] == JobEnded(0, "all workers have left")


def test_a_job_that_went_on_without_a_worker_ends_well() -> None:
    job = started(CONTINUE)
    job.end("w1")
    job.wait(1)
    assert job.say("w0", LeaveJob())["s0"][-1] == JobEnded(0, "all workers have left, but for those that were lost")


def test_a_job_that_has_lost_all_workers_ends_badly() -> None:
    job = started(CONTINUE)
    job.end("w0")
    job.end("w1")
    stop = job.wait(1)["s0"][-1]
    assert isinstance(stop, JobEnded)
    assert stop.exit_code == WORKERS_LOST_EXIT_CODE
    assert "worker 0 on host h0 is lost: its process ended; worker 1 on host h1" in stop.reason


def test_the_end_tells_of_the_first_loss_first() -> None:
    job = started()
    job.end("s0")
    job.wait(1)  # the workers see it, and give up
    job.end("w1")
    job.end("w0")
    told = job.wait(1)
    assert "w0" not in told
    assert job.roster.stop is not None
    assert job.roster.stop.reason.startswith("server 0 on host h0 is lost: its process ended; worker 0")
    assert job.roster.stop.exit_code == 1


def test_nobody_waits_forever_for_replacements_of_all_workers() -> None:
    job = started(WAIT)
    job.say("w0", LeaveJob())
    job.end("w1")
    assert not any(isinstance(event, JobEnded) for event in job.beat(30, "s0")["s0"])
    reason = "all workers have left or are lost, and none came in their place"
    assert job.beat(2, "s0")["s0"] == [JobEnded(WORKERS_LOST_EXIT_CODE, reason)]


# -- restart of the scheduler -----------------------------------------------------------------------------------------


def test_a_scheduler_that_is_started_again_learns_from_the_nodes_who_is_there() -> None:
    job = Job(TERMS)
    assert job.come("w1", known=True) == {"w1": [assigned(1, False)]}
    assert job.say("w1", EnterBarrier("b", 7)) == {}
    job.come("s0", known=True)
    told = job.come("w0", known=True)
    assert told == {"w0": [assigned(0, False), ServerList((peer("s0"),))]}
    assert job.say("w0", EnterBarrier("b", 7))["w1"] == [BarrierOver("b", 7)]
    assert job.beat(60, "w0", "w1", "s0") == {}


def test_whoever_does_not_come_back_to_it_is_lost_but_not_who_had_left() -> None:
    job = Job(parameter_server_job(3, 1))
    job.say("w0", structs.replace(register("w0", job.terms, known=True), left=(1,)))
    job.come("s0", known=True)
    told = job.beat(31, "w0", "s0")
    loss = MemberLost("worker", 2, "", "it did not come back within 30 s", False)
    assert told == {"w0": [loss], "s0": [loss]}
    assert job.come("w2", known=True) == {
        "w2": [MemberRefused("worker 2 was given up: it did not come back within 30 s")]
    }
    assert job.say("w0", LeaveJob())["s0"][-1] == JobEnded(WORKERS_LOST_EXIT_CODE, str(loss))


def test_a_worker_that_had_left_says_so_again() -> None:
    job = Job(TERMS)
    job.say("w0", structs.replace(register("w0", known=True), left=(1,)))
    job.come("s0", known=True)
    assert job.come("w1", known=True)["w1"][0] == assigned(1, False)
    job.say("w1", LeaveJob())
    assert job.say("w0", LeaveJob())["s0"][-1] == JobEnded(0, "all workers have left")


def test_servers_that_come_back_to_it_after_all_workers_are_told_of_the_end() -> None:
    job = Job(TERMS)
    for worker in ("w0", "w1"):
        job.come(worker, known=True)
        job.say(worker, LeaveJob())
    assert job.roster.stop is None
    assert job.come("s0", known=True)["s0"][-1] == JobEnded(0, "all workers have left")


def test_a_replacement_may_come_to_it_before_those_who_know_the_job() -> None:
    job = Job(WAIT)
    job.come("w0'")
    assert job.come("s0", known=True)["s0"][0] == assigned(0, False)
    assert job.come("w1", known=True)["w1"][0] == assigned(1, False)


def test_a_process_of_another_job_is_refused_by_name() -> None:
    new = started()
    (refused,) = new.say("w1 old", structs.replace(register("w1"), job=99))["w1 old"]
    assert isinstance(refused, MemberRefused)
    assert "serves another job, on the same port" in refused.reason
    again = Job(TERMS)
    told = again.say("w1", structs.replace(register("w1"), job=99))
    assert told == {"w1": [MemberAssigned(1, False, 99)]}  # the job that it goes on with
    assert again.say("s0", structs.replace(register("s0"), job=99))["s0"][0] == MemberAssigned(0, False, 99)
    assert isinstance(again.come("w0", known=True)["w0"][0], MemberRefused)


def test_a_new_job_does_not_mix_with_what_is_left_of_an_old_one() -> None:
    job = Job(TERMS)
    job.say("w1 old", structs.replace(register("w1", known=True), is_open=True))
    (refused,) = job.come("s0")["s0"]
    assert isinstance(refused, MemberRefused)
    assert "end the processes of the old one (worker 1 on host h1), or take another DMLC_PS_ROOT_PORT" in refused.reason
    with_snapshots = Job(parameter_server_job(2, 1, servers_return=True))
    with_snapshots.say("w1 old", structs.replace(register("w1", known=True), is_open=True))
    assert with_snapshots.come("s0")["s0"][0] == assigned(0, True)


def test_unknown_processes_wait_for_those_who_know_the_job() -> None:
    job = Job(WAIT, known_first_seconds=15)
    assert job.come("w1'") == {}
    assert job.come("w0", known=True) == {
        "w0": [assigned(0, False), MemberReturned("worker", 1, "h1", 2)],
        "w1'": [assigned(1, True), MemberReturned("worker", 1, "h1", 2)],
    }


def test_they_do_not_wait_when_nobody_is_left_who_knows_nor_for_ever() -> None:
    job = Job(TERMS, known_first_seconds=15)
    assert job.come("w0") == job.come("s0") == {}
    assert [answers[0] for answers in job.come("w1").values()] == [
        assigned(0, False),
        assigned(0, False),
        assigned(1, False),
    ]
    job = Job(TERMS, known_first_seconds=15)
    job.come("w0")
    assert job.wait(14) == {}
    assert job.roster.due() == 115.0
    assert job.wait(1) == {"w0": [assigned(0, False)]}


def test_one_that_waits_may_go_asks_once_and_hears_of_the_end() -> None:
    job = Job(WAIT, known_first_seconds=15)
    job.come("w1'")
    assert isinstance(job.come("w1'")["w1'"][0], MemberRefused)
    job.end("w1'")
    job.come("w1''")
    assert set(job.come("w0", known=True)) == {"w0", "w1''"}


def test_a_servers_snapshots_tell_a_new_scheduler_that_the_job_goes_on() -> None:
    job = Job(parameter_server_job(2, 1, policy=LossPolicy.WAIT, servers_return=True))
    saved = structs.replace(register("s0'", job.terms), saved=(SavedJob(9), SavedJob(JOB, left=(1,))))
    told = job.say("s0'", saved)["s0'"]
    assert told[0] == assigned(0, True)
    assert told[-1] == MemberLeft("worker", 1, "")
    assert job.come("w0'")["w0'"][0] == assigned(0, True)
    assert job.say("w0'", LeaveJob())["s0'"][-1] == JobEnded(0, "all workers have left")


def test_those_of_other_jobs_tell_it_nothing() -> None:
    job = Job(parameter_server_job(2, 1, policy=LossPolicy.WAIT, servers_return=True))
    assert job.say("s0", structs.replace(register("s0", job.terms), saved=(SavedJob(9, left=(1,)),))) == {
        "s0": [assigned(0, False), ServerList((peer("s0"),))]
    }


def test_servers_with_snapshots_come_first_of_those_that_waited() -> None:
    job = Job(parameter_server_job(2, 1, policy=LossPolicy.WAIT, servers_return=True), known_first_seconds=15)
    job.come("w0'")
    job.come("w1'")
    told = job.say("s0'", structs.replace(register("s0'", job.terms), saved=(SavedJob(JOB),)))
    assert [told[owner][0] for owner in ("w0'", "w1'", "s0'")] == [
        assigned(0, True),
        assigned(1, True),
        assigned(0, True),
    ]


def test_a_process_that_its_launcher_has_started_again_takes_the_place_of_a_lost_one() -> None:
    job = Job(WAIT)
    assert job.say("w0'", structs.replace(register("w0'"), is_restart=True))["w0'"][0] == assigned(0, True)
    job.end("w0'")
    again = job.say("w0''", structs.replace(register("w0''"), is_restart=True))["w0''"]
    assert again[0] == assigned(0, True)  # before the servers have come, who knows of a loss?


def test_one_without_a_number_does_not_take_the_place_of_one_that_may_come_back() -> None:
    job = Job(WAIT)
    job.come("s0", known=True)
    assert job.come("w1'", number=-1) == {}
    assert job.come("w0", known=True)["w1'"][0] == assigned(1, True)
    job = Job(WAIT)
    job.come("s0", known=True)
    job.come("w1'", number=-1)
    assert job.beat(31, "s0")["w1'"][0] == assigned(0, True)  # nobody came back


def num_silent(job: Job, seconds: float) -> int:
    ((answer,),) = job.say("w0", StatusQuery(seconds)).values()
    assert isinstance(answer, StatusReply)
    return answer.num_silent


def test_who_was_not_heard_of_is_counted() -> None:
    job = started(parameter_server_job(2, 1, policy=LossPolicy.CONTINUE, heartbeat_timeout_seconds=20.0))
    job.beat(10, "w0", "s0")
    assert num_silent(job, 9.5) == 1
    assert num_silent(job, 10.5) == 0
    job.beat(11, "w0", "s0")
    assert num_silent(job, 60.0) == 1  # it is known to be lost
    job.say("s0", LeaveJob())
    job.beat(10, "w0")
    assert num_silent(job, 5.0) == 1  # who has left is not dead


def test_a_process_that_it_does_not_know_is_a_replacement() -> None:
    job = Job(WAIT)
    job.come("w0", known=True)
    job.come("s0", known=True)
    assert job.come("w1'")["w0"] == [MemberReturned("worker", 1, "h1", 2)]
    assert isinstance(job.come("w1", known=True)["w1"][0], MemberRefused)


def test_members_that_were_lost_for_another_are_corrected_once_in_one_message() -> None:
    table = MembershipTable(WAIT, JOB)
    for owner in ("w0", "w1", "s0"):
        table.handle(owner, register(owner, WAIT), 0.0)
    table.ended("w0", 1.0)
    again = structs.replace(register("w0", WAIT, known=True), lost=(("worker", 1), ("server", 0)) * 1000)
    news = [reply for _, reply in table.handle("w0 again", again, 1.5) if isinstance(reply, MembershipNews)]
    assert [[(event.role, event.number) for event in one.events] for one in news] == [[("worker", 1), ("server", 0)]]


def test_a_forgotten_process_has_no_place_by_another_connection() -> None:
    terms = parameter_server_job(2, 1, heartbeat_timeout_seconds=20.0)
    table = MembershipTable(terms, JOB)
    table.handle("w0", register("w0", terms), 0.0)
    table.handle("w0 again", register("w0", terms), 0.1)
    table.tick(20.2)  # before all servers are there
    assert table.handle("w0", LeaveJob(), 20.3) == []
    table.validate()


def test_entries_of_one_worker_at_one_barrier_are_bounded() -> None:
    table = MembershipTable(TERMS, JOB)
    for owner in ("w0", "w1", "s0"):
        table.handle(owner, register(owner), 0.0)
    replies = [table.handle("w0", EnterBarrier("b", i + 1), 1.0) for i in range(MAX_BARRIERS + 1)]
    assert replies[:-1] == [[]] * MAX_BARRIERS
    [(_, refusal)] = replies[-1]
    assert isinstance(refusal, MemberRefused)
