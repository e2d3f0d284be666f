"""What a node makes of its scheduler's messages."""

from __future__ import annotations

from msgspec import structs

from reigen.cluster.membership.messages import (
    BarrierOver,
    EnterBarrier,
    HeldKeys,
    JobEnded,
    LeaveJob,
    MemberAssigned,
    MemberLeft,
    MemberLost,
    MemberRefused,
    MemberReturned,
    MembershipNews,
    RegisterMember,
    ServerInfo,
    ServerList,
    StatusQuery,
    StatusReply,
    format_members,
)
from reigen.cluster.membership.view import JobView
from reigen.errors import ConfigError, DeadlineError, PeerLostError

JOB = 4711
ME = RegisterMember("worker", -1, "here", 77, {"worker": 3, "server": 2})
SERVERS = (ServerInfo(0, "10.0.0.1:5000", 11, "a"), ServerInfo(1, "10.0.0.2:5000", 12, "b"))
LOST = MemberLost("worker", 2, "c", "its process ended")


def moved(server: ServerInfo) -> MemberReturned:
    return MemberReturned("server", server.number, server.host, server.incarnation, server.address)


def placed(*, is_loss_fatal: bool = True) -> JobView:
    standing = JobView(ME, is_loss_fatal=is_loss_fatal)
    standing.take(MemberAssigned(1, is_recovery=False, job=JOB))
    standing.take(ServerList(SERVERS))
    return standing


def test_the_scheduler_gives_a_number_which_is_said_from_then_on() -> None:
    standing = JobView(ME, is_loss_fatal=True)
    assert standing.registration() == ME
    assert standing.take(MemberAssigned(1, is_recovery=True, job=JOB)) == []
    assert (standing.number, standing.is_recovery, standing.name) == (1, True, "worker 1")
    assert standing.registration() == structs.replace(ME, number=1, job=JOB, is_recovery=True)


def test_who_is_held_for_lost_and_the_epoch_are_said_on_a_new_connection() -> None:
    standing = placed()
    standing.take(MembershipNews((LOST,), 12))
    assert (standing.registration().lost, standing.registration().epoch) == ((("worker", 2),), 12)


def test_a_refusal_at_first_is_about_how_it_was_started() -> None:
    standing = JobView(ME, is_loss_fatal=True)
    standing.take(MemberRefused("worker 1 is there already"))
    assert isinstance(standing.failure, ConfigError)
    assert "refuses this worker: worker 1 is there already" in str(standing.failure)
    assert standing.events == []


def test_a_refusal_later_says_that_it_was_replaced() -> None:
    standing = placed()
    standing.take(MemberRefused("another process has taken its place"))
    assert isinstance(standing.failure, PeerLostError)
    assert standing.failure.ranks == (1,)
    assert standing.events == [
        JobEnded(1, "this process, worker 1, is not in the job any more: another process has taken its place")
    ]


def test_a_new_scheduler_is_told_again_where_this_node_waits() -> None:
    standing = placed()
    first, second = standing.enter("b"), standing.enter("a")
    standing.take(BarrierOver(*first))
    standing.forget(first)
    standing.take(MembershipNews((MemberLeft("worker", 2, "c"), MemberLeft("server", 1, "b"))))
    assert standing.registration().left == (2,)
    third = standing.enter("c")
    standing.give_up(third)
    # of every barrier the last time, and where it waits
    again = [EnterBarrier("a", 1), EnterBarrier("b", 1, is_over=True), EnterBarrier("c", 1, is_abandoned=True)]
    assert standing.take(MemberAssigned(1, is_recovery=False, job=JOB)) == again
    assert standing.registration().barriers == tuple(again)
    standing.take(BarrierOver("c", 1, 0, (2,)))
    standing.forget(third)
    assert standing.registration().barriers[-1] == EnterBarrier("c", 1, is_abandoned=True, is_over=True)
    standing.has_left = True
    assert standing.take(MemberAssigned(1, is_recovery=False, job=JOB))[-1] == LeaveJob()
    assert standing.outcome(second) is None


def test_a_worker_goes_when_a_scheduler_has_heard_that_it_leaves() -> None:
    standing = placed()
    assert standing.is_out, "one that does not leave has nothing to say"
    standing.has_left = True
    assert not standing.is_out
    standing.take(MembershipNews((MemberLeft("worker", 1, "here"),)))
    assert standing.is_out


def test_barriers_of_one_name_are_counted() -> None:
    standing = placed()
    first = standing.enter("epoch")
    standing.take(BarrierOver("epoch", 1))
    assert standing.outcome(first) == BarrierOver("epoch", 1)
    standing.forget(first)
    second = standing.enter("epoch")
    standing.take(BarrierOver("epoch", 1))  # an answer that comes late
    assert standing.outcome(second) is None
    standing.take(BarrierOver("epoch", 2))
    assert standing.outcome(second) == BarrierOver("epoch", 2)


def test_who_takes_a_place_goes_on_there_with_barriers() -> None:
    standing = JobView(ME, is_loss_fatal=False)
    standing.take(MemberAssigned(1, is_recovery=True, job=JOB, barriers=(("epoch", 3),)))
    assert standing.enter("epoch") == ("epoch", 4)
    assert standing.enter("other") == ("other", 1)


def test_a_loss_is_told_once_however_often_it_comes() -> None:
    standing = placed()
    standing.take(MembershipNews((LOST,)))
    standing.take(MembershipNews((LOST,)))
    assert standing.events == [LOST]
    assert standing.fatal_loss() == LOST
    returned = MemberReturned("worker", 2, "d", 99)
    standing.take(MembershipNews((returned,)))
    assert standing.events == [LOST, returned]
    assert (standing.lost, standing.fatal_loss()) == ({}, None)


def test_without_which_nodes_nobody_can_go_on() -> None:
    assert placed(is_loss_fatal=False).fatal_loss() is None
    patient = placed(is_loss_fatal=False)
    patient.take(MembershipNews((LOST, MemberLost("server", 0, "a", "silent", will_return=True))))
    assert patient.fatal_loss() is None
    server = MemberLost("server", 1, "b", "silent")
    patient.take(MembershipNews((server,)))
    assert patient.fatal_loss() == server


def test_a_server_that_moved_is_found_at_its_new_place() -> None:
    new = ServerInfo(1, "10.0.0.3:6000", 13, "c")
    early = JobView(ME, is_loss_fatal=True)
    early.take(MembershipNews((moved(new),)))
    assert (early.servers, early.events) == ({}, []), "servers are known when all are"
    standing = placed()
    standing.take(MembershipNews((MemberLost("server", 1, "b", "silent", will_return=True), moved(new))))
    assert standing.servers[1] == new
    assert standing.lost == {}
    newer = ServerInfo(0, "10.0.0.4:6000", 14, "d")
    standing.events.clear()
    standing.take(ServerList((newer, new)))  # of a scheduler that was started again: the news was missed
    assert standing.servers == {0: newer, 1: new}
    assert standing.events == [moved(newer)]


def test_the_end_of_the_job_ends_waiting() -> None:
    standing = placed()
    stop = JobEnded(0, "all workers have left")
    standing.take(MembershipNews((stop,)))
    assert standing.events == [stop]
    assert "the job is over: all workers have left" in str(standing.failure)


def test_a_job_that_ends_before_all_have_come_has_missed_its_start() -> None:
    standing = JobView(ME, is_loss_fatal=True)
    standing.take(MemberAssigned(1, is_recovery=False, job=JOB))
    standing.take(MembershipNews((JobEnded(1, "worker 2 did not come in time", is_late=True, workers=(2,)),)))
    assert isinstance(standing.failure, DeadlineError)
    assert standing.failure.ranks == (2,)


def test_answers_are_kept() -> None:
    standing = placed()
    answer = StatusReply((0, 2), (), 3.0, 2)
    standing.take(answer)
    assert standing.status == {3.0: answer}


def test_nodes_in_words() -> None:
    assert format_members(workers=(2,), servers=()) == "worker 2"
    assert format_members(workers=(3, 0, 2), servers=(1,)) == "workers 0, 2 and 3, server 1"
    assert format_members(workers=(), servers=(0, 1)) == "servers 0 and 1"
    assert format_members(workers=(), servers=()) == ""


def test_another_scheduler_is_asked_again() -> None:
    view = JobView(RegisterMember("server", 0, "h", 9, {"worker": 1, "server": 1}))
    view.take(MemberAssigned(0, is_recovery=False, job=12))
    view.asked |= {3.0, 1.0}
    view.held_keys = HeldKeys(0, "1 key: 'a'")
    again = view.take(MemberAssigned(0, is_recovery=False, job=12))
    assert again == [StatusQuery(1.0), StatusQuery(3.0), HeldKeys(0, "1 key: 'a'")]
