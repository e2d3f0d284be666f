"""The rounds of a shard: event in, instructions out. Tokens say whose they are: "b3" is worker 1's push of round 3."""

from __future__ import annotations

import math

import msgspec
import pytest

from reigen.cluster.membership.members import LossPolicy
from reigen.kv.consistency.state_machine import (
    MAX_ROUNDS_AHEAD,
    AcknowledgePush,
    AnswerPull,
    ApplyPush,
    CombineRound,
    ConsistencyEngine,
    ConsistencyEvent,
    ConsistencyInstruction,
    ConsistencyState,
    DropRequest,
    FailRequest,
    PullRequested,
    PushReceived,
    RepeatAcknowledgement,
    RequestExpired,
    RoundRecovered,
    RoundsForgotten,
    WorkerDisconnected,
    WorkerLeft,
    WorkerLost,
    WorkerPresence,
    WorkerReappeared,
    WorkerResumed,
    WorkerReturned,
)

ASYNC = math.inf
ABORT, CONTINUE, WAIT, ELASTIC = LossPolicy


class Shard:
    """An engine that is validated after every step."""

    def __init__(self, num_workers: int, staleness: float = 0) -> None:
        self.engine = ConsistencyEngine(num_workers, staleness)

    def __call__(self, *events: ConsistencyEvent) -> list[ConsistencyInstruction]:
        """Take events in; what the last one leads to."""
        instructions: list[ConsistencyInstruction] = []
        for event in events:
            instructions = self.engine.handle(event)
            self.engine.validate()
        return instructions

    def restart(self) -> None:
        """The server dies, and another begins with a snapshot of now, as bytes."""
        data = msgspec.msgpack.encode(self.engine.state())
        self.engine = ConsistencyEngine.from_state(msgspec.msgpack.decode(data, type=ConsistencyState))
        self.engine.validate()


def push(token: str) -> PushReceived:
    return PushReceived("abcd".index(token[0]), int(token[1:].rstrip("'")), token)


def pull(token: str) -> PullRequested:
    return PullRequested("ABCD".index(token[0]), int(token[1:].rstrip("'")), token)


def ack(token: str) -> AcknowledgePush:
    p = push(token)
    return AcknowledgePush(p.worker, p.round, token)


def repeat(token: str) -> RepeatAcknowledgement:
    p = push(token)
    return RepeatAcknowledgement(p.worker, p.round, token)


def apply(token: str) -> ApplyPush:
    p = push(token)
    return ApplyPush(p.worker, p.round, token)


def answer(token: str) -> AnswerPull:
    return AnswerPull(pull(token).worker, token)


# -- synchronous ------------------------------------------------------------------------------------------------------


def test_a_round_is_combined_in_rank_order_when_all_have_contributed() -> None:
    shard = Shard(3)
    assert shard(push("c1")) == shard(push("a1")) == []
    assert {worker for wait in shard.engine.waits() for worker in wait.workers} == {1}
    assert shard(push("b1")) == [CombineRound(1, (0, 1, 2), ("a1", "b1", "c1"), 1.0), ack("a1"), ack("b1"), ack("c1")]
    assert [shard.engine.done(worker) for worker in range(3)] == [1, 1, 1]


def test_a_pull_sees_the_round_that_its_worker_has_pushed() -> None:
    shard = Shard(2)
    assert shard(pull("A0")) == [answer("A0")]
    assert shard(push("a1"), pull("A1")) == []
    assert shard(pull("B0")) == [answer("B0")]  # the slow worker still reads the old round
    assert shard(push("b1"))[1:] == [ack("a1"), ack("b1"), answer("A1")]
    assert shard(pull("B1")) == [answer("B1")]


def test_a_contribution_that_comes_early_waits_for_its_round() -> None:
    shard = Shard(2)
    assert shard(push("a2"), push("a1"), pull("A2"), push("b1")) == [
        CombineRound(1, (0, 1), ("a1", "b1"), 1.0),
        ack("a1"),
        ack("b1"),
    ]
    assert shard(push("b2")) == [CombineRound(2, (0, 1), ("a2", "b2"), 1.0), ack("a2"), ack("b2"), answer("A2")]


def test_two_rounds_that_become_complete_at_once_are_two_updates_with_reads_between() -> None:
    shard = Shard(2)
    shard(push("b2"), push("a1"), push("a2"), pull("A1"))
    assert shard(push("b1")) == [
        CombineRound(1, (0, 1), ("a1", "b1"), 1.0),
        ack("a1"),
        ack("b1"),
        answer("A1"),
        CombineRound(2, (0, 1), ("a2", "b2"), 1.0),
        ack("a2"),
        ack("b2"),
    ]


def test_a_resent_push_counts_once() -> None:
    shard = Shard(2)
    shard(push("a1"))
    assert shard(push("a1'")) == [DropRequest("a1")]  # not worker 1's slot
    assert shard(push("b1"))[0] == CombineRound(1, (0, 1), ("a1'", "b1"), 1.0)
    assert shard(push("a1''")) == [repeat("a1''")]
    assert shard.engine.has(0, 1)
    assert not shard.engine.has(0, 2)


def test_a_worker_that_has_left_is_not_waited_for_and_may_pull() -> None:
    shard = Shard(3)
    shard(push("a1"), push("b1"))
    assert shard(WorkerLeft(2)) == [CombineRound(1, (0, 1), ("a1", "b1"), 1.0), ack("a1"), ack("b1")]
    assert shard(WorkerLeft(2), pull("C0")) == [answer("C0")]
    (failed,) = shard(push("c2"))
    assert isinstance(failed, FailRequest)
    assert failed.reason == "worker 2 has left after round 1; it must return to push again"


def test_a_worker_that_returns_goes_on_where_the_others_are() -> None:
    shard = Shard(2)
    shard(WorkerLeft(1), push("a1"), push("a2"))
    assert shard(WorkerReturned(1)) == [RoundRecovered(1, 2)]
    assert shard(push("a3")) == []
    assert shard(push("b3"))[0] == CombineRound(3, (0, 1), ("a3", "b3"), 1.0)


def test_rounds_end_when_the_last_expected_worker_leaves() -> None:
    shard = Shard(2)
    shard(push("a1"), push("b1"), push("a2"))
    assert shard(WorkerLeft(1)) == [CombineRound(2, (0,), ("a2",), 1.0), ack("a2")]
    assert shard(WorkerLeft(0)) == []


# -- asynchronous and stale -------------------------------------------------------------------------------------------


def test_asynchronous_every_push_is_applied_at_once() -> None:
    shard = Shard(3, ASYNC)
    assert shard(push("b1")) == [apply("b1"), ack("b1")]
    assert shard(push("b2")) == [apply("b2"), ack("b2")]
    assert shard(push("b2'")) == [repeat("b2'")]
    assert shard(pull("B2")) == [answer("B2")]
    assert shard(pull("A0")) == [answer("A0")]


def test_a_workers_pushes_are_applied_in_their_order() -> None:
    shard = Shard(2, ASYNC)
    assert shard(push("a2"), pull("A2")) == []
    assert shard.engine.waits()[0].reason == "later rounds wait for round 1 of worker(s) 0"
    assert shard(push("a1")) == [apply("a1"), ack("a1"), apply("a2"), ack("a2"), answer("A2")]


def test_staleness_bounds_how_far_a_reader_is_ahead() -> None:
    shard = Shard(3, 2)
    shard(push("a1"), push("a2"), push("b1"))
    assert shard(pull("A2")) == [answer("A2")]
    assert shard(push("a3"), pull("A3")) == []
    (wait,) = shard.engine.waits()
    assert (wait.workers, wait.reason) == (
        (2,),
        "after round 3, with a staleness of 2, reading waits for worker(s) 2",
    )
    assert shard(push("c1")) == [apply("c1"), ack("c1"), answer("A3")]
    assert shard(push("a4"), pull("A4")) == []
    assert {worker for wait in shard.engine.waits() for worker in wait.workers} == {1, 2}
    assert shard(WorkerLeft(1)) == []
    assert shard(WorkerLeft(2)) == [answer("A4")]


# -- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, ASYNC])
def test_abort_fails_whatever_waits_and_whatever_comes(staleness: float) -> None:
    shard = Shard(3, staleness)
    shard(push("a1"), push("a2"), pull("A2"), push("b1"), pull("C1"))
    round = shard.engine.done(2) + 1
    failed = shard(WorkerLost(2, ABORT))
    reason = f"worker 2 was lost in round {round}"
    assert failed[0] == DropRequest("C1")
    assert {f.token for f in failed if isinstance(f, FailRequest)} == {
        0: {"a1", "a2", "A2", "b1"},
        1: {"A2"},
        ASYNC: set(),
    }[staleness]
    assert all(f == FailRequest(f.token, reason, (2,)) for f in failed[1:] if isinstance(f, FailRequest))
    assert shard(push("a9")) == [FailRequest("a9", reason, (2,))]
    assert shard(pull("B0")) == [FailRequest("B0", reason, (2,))]
    assert shard(WorkerLost(1, ABORT)) == []


def test_continue_goes_on_with_the_rest_rescaled() -> None:
    shard = Shard(4)
    shard(push("a1"), push("b1"), push("d1"), push("d2"))
    assert shard(WorkerLost(2, CONTINUE))[0] == CombineRound(1, (0, 1, 3), ("a1", "b1", "d1"), 4 / 3)
    shard(WorkerLost(3, CONTINUE))
    shard(push("a2"))
    assert shard(push("b2")) == [
        CombineRound(2, (0, 1, 3), ("a2", "b2", "d2"), 4 / 3),  # what the lost one has pushed counts
        ack("a2"),
        ack("b2"),
        DropRequest("d2"),
    ]
    shard(push("a3"))
    assert shard(push("b3"))[0] == CombineRound(3, (0, 1), ("a3", "b3"), 2.0)
    assert shard(WorkerReturned(2)) == [RoundRecovered(2, 3)]
    assert shard(push("a4"), push("b4"), push("c4"))[0] == CombineRound(4, (0, 1, 2), ("a4", "b4", "c4"), 4 / 3)


def test_a_worker_that_left_is_not_made_up_for() -> None:
    shard = Shard(3)
    shard(WorkerLeft(1), WorkerLost(1, ABORT), push("a1"))  # its process may end
    assert shard(WorkerLost(2, CONTINUE))[0] == CombineRound(1, (0,), ("a1",), 2.0)


def test_a_lost_worker_that_was_only_silent_goes_on() -> None:
    shard = Shard(2)
    shard(WorkerLost(1, WAIT), WorkerLeft(0), push("b1"))
    assert shard(WorkerReappeared(1)) == shard(WorkerReappeared(0)) == []
    assert shard.engine.state().presence == (WorkerPresence.LEFT, WorkerPresence.HERE)
    assert shard(push("b1"))[0] == CombineRound(1, (1,), ("b1",), 1.0)


def test_wait_keeps_what_the_lost_worker_pushed_for_its_replacement() -> None:
    shard = Shard(2)
    shard(push("b1"), pull("B1"))
    assert shard(WorkerLost(1, WAIT)) == [DropRequest("B1")]
    assert shard(push("a1")) == [CombineRound(1, (0, 1), ("a1", "b1"), 1.0), ack("a1"), DropRequest("b1")]
    assert shard(push("a2")) == []
    assert shard.engine.waits()[0].reason == (
        "round 2 waits for worker(s) 1; worker(s) 1 were lost, and none has come in their place"
    )
    (failed,) = shard(push("b2"))  # alive after all: it must return first
    assert isinstance(failed, FailRequest)
    assert failed.workers == (1,)
    assert shard(WorkerReturned(1)) == [RoundRecovered(1, 1)]
    assert shard(push("b2"))[0] == CombineRound(2, (0, 1), ("a2", "b2"), 1.0)


def test_a_replacement_pushes_again_what_its_predecessor_pushed_and_is_not_over() -> None:
    shard = Shard(2)
    shard(push("b1"), WorkerLost(1, WAIT))
    assert shard(WorkerReturned(1)) == [RoundRecovered(1, 0)]
    assert shard(push("b1'")) == [DropRequest("b1")]  # which counts if the others come first
    assert shard(push("a1")) == [CombineRound(1, (0, 1), ("a1", "b1'"), 1.0), ack("a1"), ack("b1'")]


def test_stale_a_replacement_does_not_hold_up_those_who_went_on_without_it() -> None:
    shard = Shard(3, 1)
    shard(push("c1"), push("c3"), WorkerLost(2, CONTINUE))
    shard(*(push(f"{w}{r}") for r in range(1, 6) for w in "ab"), push("a6"))
    assert shard(WorkerReturned(2)) == [apply("c3"), DropRequest("c3"), RoundRecovered(2, 5)]
    assert shard(pull("A6")) == [answer("A6")]
    assert shard(push("c4")) == [repeat("c4")]


def test_a_connection_that_ends_takes_its_requests_with_it_and_leaves_its_contributions() -> None:
    shard = Shard(2)
    shard(push("b1"), pull("B1"))
    assert shard(WorkerDisconnected(1)) == [DropRequest("B1")]
    assert shard(push("b1'"), pull("B1'")) == []  # it has connected again, and asks again
    assert shard(push("a1"))[1:] == [ack("a1"), ack("b1'"), answer("B1'")]


# -- restart ----------------------------------------------------------------------------------------------------------


def test_after_a_restart_unacknowledged_pushes_come_again() -> None:
    shard = Shard(2)
    shard(push("a1"), push("b1"), push("a2"))
    shard.restart()
    assert shard(WorkerResumed(0, 1), push("a2"), pull("A2")) == []
    assert shard.engine.waits()[0].reason == "the server was restarted; it waits to hear from worker(s) 1"
    assert shard(push("b2")) == []  # nobody can know yet whether round 2 was over
    assert shard(WorkerResumed(1, 1))[:2] == [RoundRecovered(1, 1), CombineRound(2, (0, 1), ("a2", "b2"), 1.0)]


def test_a_round_in_the_snapshot_that_was_not_acknowledged_is_not_applied_again() -> None:
    shard = Shard(2)
    shard(push("a1"), push("b1"))
    shard.restart()
    assert shard(WorkerResumed(0, 0), WorkerResumed(1, 1), push("a1'")) == [repeat("a1'")]


def test_acknowledged_rounds_that_no_snapshot_holds_are_over_for_all() -> None:
    shard = Shard(2)
    shard.restart()
    assert shard(WorkerResumed(1, 2), push("b3"), pull("B3"), push("a3")) == []  # not acknowledged to worker 1: 3
    assert shard(WorkerResumed(0, 3)) == [
        RoundsForgotten(3, 3, None),
        repeat("a3"),
        repeat("b3"),
        RoundRecovered(0, 3),
        answer("B3"),
    ]


def test_acknowledged_pushes_that_no_snapshot_holds_are_over_for_their_worker() -> None:
    shard = Shard(2, 1)
    shard(push("a1"), push("b1"))
    shard.restart()
    assert shard(push("b2"), pull("B1")) == []
    assert shard(WorkerResumed(1, 1)) == [RoundRecovered(1, 1), apply("b2"), ack("b2"), answer("B1")]
    assert shard(WorkerResumed(0, 4)) == [RoundsForgotten(2, 4, 0), RoundRecovered(0, 4)]
    assert shard(WorkerResumed(0, 9)) == [RoundRecovered(0, 4)]  # it is not away any more


def test_a_restarted_server_knows_who_has_left_or_was_lost() -> None:
    shard = Shard(4)
    shard(WorkerLeft(1), WorkerLost(2, CONTINUE), WorkerLost(3, WAIT))
    shard.restart()
    assert shard.engine.state().presence == (
        WorkerPresence.HERE,
        WorkerPresence.LEFT,
        WorkerPresence.MISSED,
        WorkerPresence.AWAITED,
    )
    assert shard(WorkerReturned(3)) == [RoundRecovered(3, 0)]
    assert shard(WorkerResumed(0, 0), push("a1"), push("d1"))[0] == CombineRound(1, (0, 3), ("a1", "d1"), 1.5)


def test_what_is_said_after_a_restart_wins_over_the_snapshot() -> None:
    shard = Shard(2)
    shard.restart()
    shard(WorkerLost(1, CONTINUE))
    assert shard(WorkerResumed(1, 3)) == [RoundsForgotten(1, 3, None), RoundRecovered(1, 3)]  # sent before it died
    assert shard(WorkerResumed(0, 3)) == [RoundRecovered(0, 3)]
    assert shard(push("a4"))[0] == CombineRound(4, (0,), ("a4",), 2.0)


def test_a_worker_that_was_lost_and_found_after_a_restart_still_has_to_say_how_far_it_was() -> None:
    shard = Shard(2, 1)
    shard.restart()
    assert shard(WorkerResumed(0, 0), WorkerLost(1, WAIT), WorkerReappeared(1), push("b3")) == []
    assert shard(WorkerResumed(1, 2)) == [RoundsForgotten(1, 2, 1), RoundRecovered(1, 2), apply("b3"), ack("b3")]


def test_a_snapshot_may_be_older_than_a_workers_return() -> None:
    shard = Shard(3)
    shard(WorkerLeft(1), WorkerLost(2, CONTINUE))
    shard.restart()
    assert shard(WorkerResumed(1, 1)) == [RoundsForgotten(1, 1, None), RoundRecovered(1, 1)]
    assert shard(WorkerResumed(2, 1)) == [RoundRecovered(2, 1)]
    assert shard(WorkerResumed(0, 1), push("a2"), push("b2"), push("c2"))[0] == CombineRound(
        2, (0, 1, 2), ("a2", "b2", "c2"), 1.0
    )


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_an_expired_request_says_whom_it_waited_for() -> None:
    shard = Shard(3)
    shard(push("a1"), pull("A1"))
    assert shard(RequestExpired("A1")) == [FailRequest("A1", "round 1 waits for worker(s) 1, 2", (1, 2), late=True)]
    assert shard(RequestExpired("a1")) == [FailRequest("a1", "round 1 waits for worker(s) 1, 2", (1, 2), late=True)]
    assert shard(RequestExpired("a1")) == []
    assert shard(push("b1"), push("c1")) == []  # the expired push is withdrawn
    assert shard(push("a1'"))[0] == CombineRound(1, (0, 1, 2), ("a1'", "b1", "c1"), 1.0)


def test_who_has_given_up_at_its_own_deadline_is_not_the_one_that_is_missing() -> None:
    shard = Shard(3)
    shard(push("a1"), push("a2"), push("b1"))
    shard(RequestExpired("a2"), RequestExpired("a1"))
    assert shard(RequestExpired("b1")) == [FailRequest("b1", "round 1 waits for worker(s) 2", (2,), late=True)]
    (failed,) = shard(push("c1"), RequestExpired("c1"))  # now it is they who do not come
    assert isinstance(failed, FailRequest)
    assert failed.workers == (0, 1)
    assert failed.reason == "round 1 waits for worker(s) 0, 1, whose pushes were withdrawn at their deadlines"


def test_who_has_given_up_and_pushes_again_is_missing_where_it_has_not_pushed() -> None:
    shard = Shard(2)
    shard(push("a1"), push("a2"), RequestExpired("a2"), RequestExpired("a1"))
    shard(push("b1"), push("a1'"), push("b2"))
    assert shard(RequestExpired("b2")) == [FailRequest("b2", "round 2 waits for worker(s) 0", (0,), late=True)]


@pytest.mark.parametrize("round", [0, -1, MAX_ROUNDS_AHEAD + 1])
def test_a_round_out_of_bounds_fails(round: int) -> None:
    (failed,) = Shard(2)(PushReceived(1, round, "x"))
    assert failed == FailRequest("x", f"worker 1 pushed round {round}, but is in round 1")


def test_there_is_no_such_worker() -> None:
    with pytest.raises(ValueError, match="no worker 2 among 2"):
        Shard(2)(PushReceived(2, 1, "x"))


@pytest.mark.parametrize("policy", [CONTINUE, WAIT])
def test_a_worker_that_leaves_while_it_is_thought_to_be_lost_is_not_waited_for_once_it_is_found(
    policy: LossPolicy,
) -> None:
    shard = Shard(2)
    shard(WorkerLost(1, policy), WorkerLeft(1), WorkerReappeared(1))
    assert shard(push("a1")) == [CombineRound(1, (0,), ("a1",), 1.0), AcknowledgePush(0, 1, "a1")]
