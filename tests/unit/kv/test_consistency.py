"""The rounds of a cell: event in, instructions out. Tokens say whose they are: "b3" is worker 1's push of round 3."""

from __future__ import annotations

import math

import msgspec
import pytest

from reigen.kv.consistency import MAX_AHEAD, Consistency, ConsistencyState, Presence
from reigen.kv.events import (
    Acknowledge,
    Answer,
    Apply,
    Combine,
    Disconnected,
    Drop,
    Event,
    Expired,
    Fail,
    Forgotten,
    Found,
    Instruction,
    Left,
    LossPolicy,
    Lost,
    PullWanted,
    Pushed,
    Recovered,
    Repeat,
    Resumed,
    Returned,
)

ASYNC = math.inf
ABORT, CONTINUE, WAIT = LossPolicy


class Cell:
    """An engine that is validated after every step."""

    def __init__(self, num_workers: int, staleness: float = 0) -> None:
        self.engine = Consistency(num_workers, staleness)

    def __call__(self, *events: Event) -> list[Instruction]:
        """Take events in; what the last one leads to."""
        instructions: list[Instruction] = []
        for event in events:
            instructions = self.engine.handle(event)
            self.engine.validate()
        return instructions

    def restart(self) -> None:
        """The server dies, and another begins with a snapshot of now, as bytes."""
        data = msgspec.msgpack.encode(self.engine.state())
        self.engine = Consistency.from_state(msgspec.msgpack.decode(data, type=ConsistencyState))
        self.engine.validate()


def push(token: str) -> Pushed:
    return Pushed("abcd".index(token[0]), int(token[1:].rstrip("'")), token)


def pull(token: str) -> PullWanted:
    return PullWanted("ABCD".index(token[0]), int(token[1:].rstrip("'")), token)


def ack(token: str) -> Acknowledge:
    p = push(token)
    return Acknowledge(p.worker, p.round, token)


def repeat(token: str) -> Repeat:
    p = push(token)
    return Repeat(p.worker, p.round, token)


def apply(token: str) -> Apply:
    p = push(token)
    return Apply(p.worker, p.round, token)


def answer(token: str) -> Answer:
    return Answer(pull(token).worker, token)


# -- synchronous ------------------------------------------------------------------------------------------------------


def test_a_round_is_combined_in_rank_order_when_all_have_contributed() -> None:
    cell = Cell(3)
    assert cell(push("c1")) == cell(push("a1")) == []
    assert cell.engine.blocked_by() == (1,)
    assert cell(push("b1")) == [Combine(1, (0, 1, 2), ("a1", "b1", "c1"), 1.0), ack("a1"), ack("b1"), ack("c1")]
    assert [cell.engine.done(worker) for worker in range(3)] == [1, 1, 1]


def test_a_pull_sees_the_round_that_its_worker_has_pushed() -> None:
    cell = Cell(2)
    assert cell(pull("A0")) == [answer("A0")]
    assert cell(push("a1"), pull("A1")) == []
    assert cell(pull("B0")) == [answer("B0")]  # the slow worker still reads the old round
    assert cell(push("b1"))[1:] == [ack("a1"), ack("b1"), answer("A1")]
    assert cell(pull("B1")) == [answer("B1")]


def test_a_contribution_that_comes_early_waits_for_its_round() -> None:
    cell = Cell(2)
    assert cell(push("a2"), push("a1"), pull("A2"), push("b1")) == [
        Combine(1, (0, 1), ("a1", "b1"), 1.0),
        ack("a1"),
        ack("b1"),
    ]
    assert cell(push("b2")) == [Combine(2, (0, 1), ("a2", "b2"), 1.0), ack("a2"), ack("b2"), answer("A2")]


def test_two_rounds_that_become_complete_at_once_are_two_updates_with_reads_between() -> None:
    cell = Cell(2)
    cell(push("b2"), push("a1"), push("a2"), pull("A1"))
    assert cell(push("b1")) == [
        Combine(1, (0, 1), ("a1", "b1"), 1.0),
        ack("a1"),
        ack("b1"),
        answer("A1"),
        Combine(2, (0, 1), ("a2", "b2"), 1.0),
        ack("a2"),
        ack("b2"),
    ]


def test_a_resent_push_counts_once() -> None:
    cell = Cell(2)
    cell(push("a1"))
    assert cell(push("a1'")) == [Drop("a1")]  # not worker 1's slot
    assert cell(push("b1"))[0] == Combine(1, (0, 1), ("a1'", "b1"), 1.0)
    assert cell(push("a1''")) == [repeat("a1''")]
    assert cell.engine.has(0, 1)
    assert not cell.engine.has(0, 2)


def test_a_worker_that_has_left_is_not_waited_for_and_may_pull() -> None:
    cell = Cell(3)
    cell(push("a1"), push("b1"))
    assert cell(Left(2)) == [Combine(1, (0, 1), ("a1", "b1"), 1.0), ack("a1"), ack("b1")]
    assert cell(Left(2), pull("C0")) == [answer("C0")]
    (failed,) = cell(push("c2"))
    assert isinstance(failed, Fail)
    assert failed.reason == "worker 2 has left after round 1; it must return to push again"


def test_a_worker_that_returns_goes_on_where_the_others_are() -> None:
    cell = Cell(2)
    cell(Left(1), push("a1"), push("a2"))
    assert cell(Returned(1)) == [Recovered(1, 2)]
    assert cell(push("a3")) == []
    assert cell(push("b3"))[0] == Combine(3, (0, 1), ("a3", "b3"), 1.0)


def test_rounds_end_when_the_last_expected_worker_leaves() -> None:
    cell = Cell(2)
    cell(push("a1"), push("b1"), push("a2"))
    assert cell(Left(1)) == [Combine(2, (0,), ("a2",), 1.0), ack("a2")]
    assert cell(Left(0)) == []


# -- asynchronous and stale -------------------------------------------------------------------------------------------


def test_asynchronous_every_push_is_applied_at_once() -> None:
    cell = Cell(3, ASYNC)
    assert cell(push("b1")) == [apply("b1"), ack("b1")]
    assert cell(push("b2")) == [apply("b2"), ack("b2")]
    assert cell(push("b2'")) == [repeat("b2'")]
    assert cell(pull("B2")) == [answer("B2")]
    assert cell(pull("A0")) == [answer("A0")]


def test_a_workers_pushes_are_applied_in_their_order() -> None:
    cell = Cell(2, ASYNC)
    assert cell(push("a2"), pull("A2")) == []
    assert cell.engine.waits()[0].reason == "later rounds wait for round 1 of worker(s) 0"
    assert cell(push("a1")) == [apply("a1"), ack("a1"), apply("a2"), ack("a2"), answer("A2")]


def test_staleness_bounds_how_far_a_reader_is_ahead() -> None:
    cell = Cell(3, 2)
    cell(push("a1"), push("a2"), push("b1"))
    assert cell(pull("A2")) == [answer("A2")]
    assert cell(push("a3"), pull("A3")) == []
    (wait,) = cell.engine.waits()
    assert (wait.workers, wait.reason) == (
        (2,),
        "after round 3, with a staleness of 2, reading waits for worker(s) 2",
    )
    assert cell(push("c1")) == [apply("c1"), ack("c1"), answer("A3")]
    assert cell(push("a4"), pull("A4")) == []
    assert cell.engine.blocked_by() == (1, 2)
    assert cell(Left(1)) == []
    assert cell(Left(2)) == [answer("A4")]


# -- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, ASYNC])
def test_abort_fails_whatever_waits_and_whatever_comes(staleness: float) -> None:
    cell = Cell(3, staleness)
    cell(push("a1"), push("a2"), pull("A2"), push("b1"), pull("C1"))
    round = cell.engine.done(2) + 1
    failed = cell(Lost(2, ABORT))
    reason = f"worker 2 was lost in round {round}"
    assert failed[0] == Drop("C1")
    assert {f.token for f in failed if isinstance(f, Fail)} == {
        0: {"a1", "a2", "A2", "b1"},
        1: {"A2"},
        ASYNC: set(),
    }[staleness]
    assert all(f == Fail(f.token, reason, (2,)) for f in failed[1:] if isinstance(f, Fail))
    assert cell(push("a9")) == [Fail("a9", reason, (2,))]
    assert cell(pull("B0")) == [Fail("B0", reason, (2,))]
    assert cell(Lost(1, ABORT)) == []


def test_continue_goes_on_with_the_rest_rescaled() -> None:
    cell = Cell(4)
    cell(push("a1"), push("b1"), push("d1"), push("d2"))
    assert cell(Lost(2, CONTINUE))[0] == Combine(1, (0, 1, 3), ("a1", "b1", "d1"), 4 / 3)
    cell(Lost(3, CONTINUE))
    cell(push("a2"))
    assert cell(push("b2")) == [
        Combine(2, (0, 1, 3), ("a2", "b2", "d2"), 4 / 3),  # what the lost one has pushed counts
        ack("a2"),
        ack("b2"),
        Drop("d2"),
    ]
    cell(push("a3"))
    assert cell(push("b3"))[0] == Combine(3, (0, 1), ("a3", "b3"), 2.0)
    assert cell(Returned(2)) == [Recovered(2, 3)]
    assert cell(push("a4"), push("b4"), push("c4"))[0] == Combine(4, (0, 1, 2), ("a4", "b4", "c4"), 4 / 3)


def test_a_worker_that_left_is_not_made_up_for() -> None:
    cell = Cell(3)
    cell(Left(1), Lost(1, ABORT), push("a1"))  # its process may end
    assert cell(Lost(2, CONTINUE))[0] == Combine(1, (0,), ("a1",), 2.0)


def test_a_lost_worker_that_was_only_silent_goes_on() -> None:
    cell = Cell(2)
    cell(Lost(1, WAIT), Left(0), push("b1"))
    assert cell(Found(1)) == cell(Found(0)) == []
    assert cell.engine.state().presence == (Presence.LEFT, Presence.HERE)
    assert cell(push("b1"))[0] == Combine(1, (1,), ("b1",), 1.0)


def test_wait_keeps_what_the_lost_worker_pushed_for_its_replacement() -> None:
    cell = Cell(2)
    cell(push("b1"), pull("B1"))
    assert cell(Lost(1, WAIT)) == [Drop("B1")]
    assert cell(push("a1")) == [Combine(1, (0, 1), ("a1", "b1"), 1.0), ack("a1"), Drop("b1")]
    assert cell(push("a2")) == []
    assert cell.engine.waits()[0].reason == (
        "round 2 waits for worker(s) 1; worker(s) 1 were lost, and nobody has come in their place"
    )
    (failed,) = cell(push("b2"))  # alive after all: it must return first
    assert isinstance(failed, Fail)
    assert failed.workers == (1,)
    assert cell(Returned(1)) == [Recovered(1, 1)]
    assert cell(push("b2"))[0] == Combine(2, (0, 1), ("a2", "b2"), 1.0)


def test_a_replacement_pushes_again_what_its_predecessor_pushed_and_is_not_over() -> None:
    cell = Cell(2)
    cell(push("b1"), Lost(1, WAIT))
    assert cell(Returned(1)) == [Recovered(1, 0)]
    assert cell(push("b1'")) == [Drop("b1")]  # which counts if the others come first
    assert cell(push("a1")) == [Combine(1, (0, 1), ("a1", "b1'"), 1.0), ack("a1"), ack("b1'")]


def test_stale_a_replacement_does_not_hold_up_those_who_went_on_without_it() -> None:
    cell = Cell(3, 1)
    cell(push("c1"), push("c3"), Lost(2, CONTINUE))
    cell(*(push(f"{w}{r}") for r in range(1, 6) for w in "ab"), push("a6"))
    assert cell(Returned(2)) == [apply("c3"), Drop("c3"), Recovered(2, 5)]
    assert cell(pull("A6")) == [answer("A6")]
    assert cell(push("c4")) == [repeat("c4")]


def test_a_connection_that_ends_takes_its_requests_with_it_and_leaves_its_contributions() -> None:
    cell = Cell(2)
    cell(push("b1"), pull("B1"))
    assert cell(Disconnected(1)) == [Drop("B1")]
    assert cell(push("b1'"), pull("B1'")) == []  # it has connected again, and asks again
    assert cell(push("a1"))[1:] == [ack("a1"), ack("b1'"), answer("B1'")]


# -- restart ----------------------------------------------------------------------------------------------------------


def test_after_a_restart_unacknowledged_pushes_come_again() -> None:
    cell = Cell(2)
    cell(push("a1"), push("b1"), push("a2"))
    cell.restart()
    assert cell(Resumed(0, 1), push("a2"), pull("A2")) == []
    assert cell.engine.waits()[0].reason == "the server was restarted; it waits to hear from worker(s) 1"
    assert cell(push("b2")) == []  # nobody can know yet whether round 2 was over
    assert cell(Resumed(1, 1))[:2] == [Recovered(1, 1), Combine(2, (0, 1), ("a2", "b2"), 1.0)]


def test_a_round_in_the_snapshot_that_was_not_acknowledged_is_not_applied_again() -> None:
    cell = Cell(2)
    cell(push("a1"), push("b1"))
    cell.restart()
    assert cell(Resumed(0, 0), Resumed(1, 1), push("a1'")) == [repeat("a1'")]


def test_acknowledged_rounds_that_no_snapshot_holds_are_over_for_all() -> None:
    cell = Cell(2)
    cell.restart()
    assert cell(Resumed(1, 2), push("b3"), pull("B3"), push("a3")) == []  # not acknowledged to worker 1: 3
    assert cell(Resumed(0, 3)) == [
        Forgotten(3, 3, None),
        repeat("a3"),
        repeat("b3"),
        Recovered(0, 3),
        answer("B3"),
    ]


def test_acknowledged_pushes_that_no_snapshot_holds_are_over_for_their_worker() -> None:
    cell = Cell(2, 1)
    cell(push("a1"), push("b1"))
    cell.restart()
    assert cell(push("b2"), pull("B1")) == []
    assert cell(Resumed(1, 1)) == [Recovered(1, 1), apply("b2"), ack("b2"), answer("B1")]
    assert cell(Resumed(0, 4)) == [Forgotten(2, 4, 0), Recovered(0, 4)]
    assert cell(Resumed(0, 9)) == [Recovered(0, 4)]  # it is not away any more


def test_a_restarted_server_knows_who_has_left_or_was_lost() -> None:
    cell = Cell(4)
    cell(Left(1), Lost(2, CONTINUE), Lost(3, WAIT))
    cell.restart()
    assert cell.engine.state().presence == (Presence.HERE, Presence.LEFT, Presence.MISSED, Presence.AWAITED)
    assert cell(Returned(3)) == [Recovered(3, 0)]
    assert cell(Resumed(0, 0), push("a1"), push("d1"))[0] == Combine(1, (0, 3), ("a1", "d1"), 1.5)


def test_what_is_said_after_a_restart_wins_over_the_snapshot() -> None:
    cell = Cell(2)
    cell.restart()
    cell(Lost(1, CONTINUE))
    assert cell(Resumed(1, 3)) == [Forgotten(1, 3, None), Recovered(1, 3)]  # sent before it died
    assert cell(Resumed(0, 3)) == [Recovered(0, 3)]
    assert cell(push("a4"))[0] == Combine(4, (0,), ("a4",), 2.0)


def test_a_worker_that_was_lost_and_found_after_a_restart_still_has_to_say_how_far_it_was() -> None:
    cell = Cell(2, 1)
    cell.restart()
    assert cell(Resumed(0, 0), Lost(1, WAIT), Found(1), push("b3")) == []
    assert cell(Resumed(1, 2)) == [Forgotten(1, 2, 1), Recovered(1, 2), apply("b3"), ack("b3")]


def test_a_snapshot_may_be_older_than_a_workers_return() -> None:
    cell = Cell(3)
    cell(Left(1), Lost(2, CONTINUE))
    cell.restart()
    assert cell(Resumed(1, 1)) == [Forgotten(1, 1, None), Recovered(1, 1)]
    assert cell(Resumed(2, 1)) == [Recovered(2, 1)]
    assert cell(Resumed(0, 1), push("a2"), push("b2"), push("c2"))[0] == Combine(2, (0, 1, 2), ("a2", "b2", "c2"), 1.0)


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_an_expired_request_says_whom_it_waited_for() -> None:
    cell = Cell(3)
    cell(push("a1"), pull("A1"))
    assert cell(Expired("A1")) == [Fail("A1", "round 1 waits for worker(s) 1, 2", (1, 2), late=True)]
    assert cell(Expired("a1")) == [Fail("a1", "round 1 waits for worker(s) 1, 2", (1, 2), late=True)]
    assert cell(Expired("a1")) == []
    assert cell(push("b1"), push("c1")) == []  # the expired push is withdrawn
    assert cell(push("a1'"))[0] == Combine(1, (0, 1, 2), ("a1'", "b1", "c1"), 1.0)


@pytest.mark.parametrize("round", [0, -1, MAX_AHEAD + 1])
def test_a_round_out_of_bounds_fails(round: int) -> None:
    (failed,) = Cell(2)(Pushed(1, round, "x"))
    assert failed == Fail("x", f"worker 1 pushed round {round}, but is in round 1")


def test_there_is_no_such_worker() -> None:
    with pytest.raises(ValueError, match="no worker 2 among 2"):
        Cell(2)(Pushed(2, 1, "x"))


@pytest.mark.parametrize("policy", [CONTINUE, WAIT])
def test_a_worker_that_leaves_while_it_is_thought_to_be_lost_is_not_waited_for_once_it_is_found(
    policy: LossPolicy,
) -> None:
    cell = Cell(2)
    cell(Lost(1, policy), Left(1), Found(1))
    assert cell(push("a1")) == [Combine(1, (0,), ("a1",), 1.0), Acknowledge(0, 1, "a1")]
