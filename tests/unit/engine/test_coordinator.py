"""The protocol of negotiation, step by step: an event goes in, instructions come out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import (
    JOIN_NAME,
    UNNAMED,
    Announcement,
    CacheEviction,
    ErrorCause,
    ErrorResponse,
    Operation,
    OperationKind,
    RankShutdown,
    Report,
    Response,
    ResponseList,
    ShutdownRequest,
    SubmitRequest,
    TunedParameters,
    encode,
)
from reigen.engine.rank_controller import ExecuteBatch, FailOperation, RankController
from reigen.errors import DeadlineError, DuplicateNameError, MismatchError, PeerLostError


def op(name: str = "t", **changes: Any) -> Operation:
    values: dict[str, Any] = {"kind": OperationKind.ALLREDUCE, "name": name, "dtype": "float32", "shape": (4,)}
    return Operation(**values | changes)


def coordinator(size: int = 2, *, capacity: int = 1024, threshold: int = 0, deadline: float = 60.0) -> Coordinator:
    return Coordinator(size, capacity, threshold, deadline)


def told(c: Coordinator, *reports: tuple[int, Report], now: float = 0.0) -> list[Announcement]:
    """What the coordinator announces after these reports."""
    for rank, report in reports:
        c.receive(rank, [report], now)
        c.validate_state()
    said = c.announce(now)
    c.validate_state()
    return said


def participant_with(response: Response, operation: Operation, rank: int = 0) -> RankController:
    """A rank that has run an operation and keeps it in its cache."""
    p = RankController(rank)
    p.submit(operation)
    p.receive(ResponseList(((response,),)))
    p.outgoing.clear()
    return p


# A


def test_a_what_is_new_is_told_in_full() -> None:
    p = RankController(1)
    p.submit(op())
    assert p.outgoing == [SubmitRequest(op())]


def test_a_what_is_cached_is_told_by_its_number() -> None:
    p = participant_with(Response("t", 7), op())
    p.submit(op())
    assert p.outgoing == [7]


def test_a_another_operation_under_a_cached_name_is_told_in_full() -> None:
    p = participant_with(Response("t", 7), op())
    p.submit(op(shape=(5,)))
    assert p.outgoing == [SubmitRequest(op(shape=(5,)))]


def test_a_a_name_that_is_not_answered_is_refused_on_the_spot() -> None:
    p = RankController(0)
    p.submit(op())
    with pytest.raises(DuplicateNameError, match="'t'"):
        p.submit(op(shape=(9,)))
    assert p.outgoing == [SubmitRequest(op())]


def test_a_a_name_is_free_again_once_it_runs() -> None:
    p = RankController(0)
    p.submit(op())
    p.receive(ResponseList(((Response("t"),),)))
    p.submit(op())
    assert p.outgoing == [SubmitRequest(op())] * 2


# B


def test_b_a_name_waits_for_every_rank() -> None:
    c = coordinator(3)
    assert told(c, (0, SubmitRequest(op())), (2, SubmitRequest(op()))) == []
    assert told(c, (1, SubmitRequest(op()))) == [ResponseList(((Response("t", 0),),))]


def test_b_a_mismatch_is_refused_for_all_and_later_work_goes_on() -> None:
    c = coordinator(3)
    said = told(c, (0, SubmitRequest(op())), (1, SubmitRequest(op(dtype="int32"))), (2, SubmitRequest(op())))
    details = ((0, "float32"), (1, "int32"), (2, "float32"))
    assert said == [
        ErrorResponse("t", ErrorCause.MISMATCH, "the data types differ between ranks", (0, 1, 2), (0, 1, 2), details)
    ]
    assert told(c, *((rank, SubmitRequest(op())) for rank in range(3))) == [ResponseList(((Response("t", 0),),))]


def test_b_a_refusal_fails_the_submission_with_a_line_for_each_rank() -> None:
    p = RankController(1)
    p.submit(op())
    p.submit(op("other"))
    refuse = ErrorResponse(
        "t", ErrorCause.MISMATCH, "the shapes differ between ranks", (0, 1), (0, 1), ((0, "[4]"), (1, "[5]"))
    )
    [instruction] = p.receive(refuse)
    assert isinstance(instruction, FailOperation)
    assert isinstance(instruction.error, MismatchError)
    assert str(instruction.error) == "t: the shapes differ between ranks\n  rank 0: [4]\n  rank 1: [5]"
    assert list(p.pending) == ["other"]


# C


def test_c_what_became_ready_together_is_one_run_in_the_order_of_completion() -> None:
    c = coordinator()
    said = told(c, *((0, SubmitRequest(op(n))) for n in "abc"), *((1, SubmitRequest(op(n))) for n in "cab"))
    assert said == [ResponseList(((Response("c", 0),), (Response("a", 1),), (Response("b", 2),)))]


def test_c_small_tensors_are_fused() -> None:
    c = coordinator(threshold=32)
    said = told(c, *((rank, SubmitRequest(op(n))) for rank in (0, 1) for n in "abc"))
    assert said == [ResponseList(((Response("a", 0), Response("b", 1)), (Response("c", 2),)))]


def test_c_a_run_is_executed_batch_after_batch() -> None:
    p = RankController(0)
    for name in "abc":
        p.submit(op(name))
    a, b, c = (Response(name, i) for i, name in enumerate("abc"))
    assert p.receive(ResponseList(((c, a), (b,)))) == [
        ExecuteBatch(((op("c"), c), (op("a"), a))),
        ExecuteBatch(((op("b"), b),)),
    ]
    assert not p.pending


def test_c_announcements_are_bounded() -> None:
    """Thousands of long answers at once still fit messages of the transport."""
    size = 6
    c = coordinator(size, capacity=1, threshold=1 << 30)
    splits = (1 << 40,) * size
    long = [op(f"{i:x<500}", kind=OperationKind.ALLTOALL, shape=(sum(splits),), splits=splits) for i in range(100)]
    many = [op(f"g{i}") for i in range(10_000)]
    for operation in (*long, *many):
        for rank in range(size):
            c.receive(rank, [SubmitRequest(operation)], 0.0)
    answered: list[str] = []
    forgotten: list[int] = []
    for announcement in c.announce(0.0):
        assert len(encode([announcement])) <= 1 << 16
        match announcement:
            case ResponseList(batches):
                answered += [item.name for batch in batches for item in batch if isinstance(item, Response)]
            case CacheEviction(slots):
                forgotten += slots
    assert sorted(answered) == sorted(o.name for o in (*long, *many))
    assert forgotten == list(range(10_099))


# D


def test_d_all_ready_is_announced_by_number_alone() -> None:
    c = coordinator()
    told(c, (0, SubmitRequest(op())), (1, SubmitRequest(op())))
    assert told(c, (1, 0), (0, 0)) == [ResponseList(((0,),))]


def test_d_each_rank_executes_its_own_cached_operation() -> None:
    mine = op(kind=OperationKind.ALLGATHER, shape=(2,))
    response = Response("t", 3, ((1, 2),))
    p = participant_with(response, mine, rank=1)
    p.submit(mine)
    assert p.receive(ResponseList(((3,),))) == [ExecuteBatch(((mine, response),))]


def test_d_a_new_shape_on_one_rank_takes_a_new_slot_with_the_others_cached_word() -> None:
    def gather(rows: int) -> Operation:
        return op(kind=OperationKind.ALLGATHER, shape=(rows, 2))

    c = coordinator(3)
    assert told(c, *((r, SubmitRequest(gather(r))) for r in range(3))) == [
        ResponseList(((Response("t", 0, ((0, 1, 2),)),),))
    ]
    assert told(c, (0, 0), (1, SubmitRequest(gather(9))), (2, 0)) == [
        ResponseList(((Response("t", 1, ((0, 9, 2),)),),))
    ]
    assert told(c, (0, 0), (1, 0), (2, 0)) == []  # the old number means nothing any more
    assert told(c, *((r, 1) for r in range(3))) == [ResponseList(((1,),))]


def test_d_a_mismatch_with_cached_words_leaves_the_cache_as_it_was() -> None:
    c = coordinator()
    told(c, (0, SubmitRequest(op())), (1, SubmitRequest(op())))
    [refuse] = told(c, (0, 0), (1, SubmitRequest(op(shape=(5,)))))
    assert isinstance(refuse, ErrorResponse)
    assert refuse.details == ((0, "[4]"), (1, "[5]"))
    assert told(c, (0, 0), (1, 0)) == [ResponseList(((0,),))]


def test_d_names_that_were_made_up_and_memory_are_not_cached() -> None:
    c = coordinator(1)
    for operation in (
        op(f"x{UNNAMED}3"),
        op("m", kind=OperationKind.ALLOCATE, dtype=""),
        op("f", kind=OperationKind.FREE, dtype=""),
    ):
        assert told(c, (0, SubmitRequest(operation))) == [ResponseList(((Response(operation.name, -1),),))]


def test_d_capacity_zero_turns_the_cache_off() -> None:
    assert told(coordinator(1, capacity=0), (0, SubmitRequest(op()))) == [ResponseList(((Response("t", -1),),))]
    p = participant_with(Response("t", -1), op())
    p.submit(op())
    assert p.outgoing == [SubmitRequest(op())]


# E


def test_e_the_least_recently_used_leaves() -> None:
    c = coordinator(1, capacity=2)
    told(c, (0, SubmitRequest(op("a"))), (0, SubmitRequest(op("b"))))
    told(c, (0, 0))  # a is used again
    assert told(c, (0, SubmitRequest(op("c")))) == [ResponseList(((Response("c", 2),),)), CacheEviction((1,))]


def test_e_a_slot_that_some_rank_has_said_ready_for_stays() -> None:
    c = coordinator(capacity=1)
    told(c, (0, SubmitRequest(op("a"))), (1, SubmitRequest(op("a"))))
    said = told(c, (0, 0), (0, SubmitRequest(op("b"))), (1, SubmitRequest(op("b"))))
    assert said == [ResponseList(((Response("b", 1),),)), CacheEviction((1,))]
    assert told(c, (1, 0)) == [ResponseList(((0,),))]


def test_e_ready_that_crosses_forget_is_ignored_and_said_again_in_full() -> None:
    c = coordinator(capacity=1)
    told(c, *((r, SubmitRequest(op("a"))) for r in (0, 1)))
    assert CacheEviction((0,)) in told(c, *((r, SubmitRequest(op("b"))) for r in (0, 1)))
    assert told(c, (0, 0)) == []
    p = participant_with(Response("a", 0), op("a"))
    p.submit(op("a"))
    p.outgoing.clear()
    assert p.receive(CacheEviction((0,))) == []
    assert p.outgoing == [SubmitRequest(op("a"), instead_of=0)]
    p.validate_state()


def test_e_what_was_forgotten_before_it_was_needed_is_told_in_full() -> None:
    p = participant_with(Response("a", 0), op("a"))
    p.receive(CacheEviction((0, 99)))
    assert p.outgoing == []
    p.submit(op("a"))
    assert p.outgoing == [SubmitRequest(op("a"))]


# F


def test_what_is_ready_and_not_yet_announced_lets_nobody_sleep() -> None:
    c = coordinator(2)
    for rank in (0, 1):
        c.receive(rank, [SubmitRequest(op())], 5.0)
    assert c.next_expiry() == 0.0
    assert c.announce(5.0)
    assert c.next_expiry() is None


def test_f_who_is_missing_at_the_deadline_is_named() -> None:
    c = coordinator(4, deadline=10.0)
    assert told(c, (2, SubmitRequest(op())), now=5.0) == []
    assert c.next_expiry() == 15.0
    assert told(c, (0, SubmitRequest(op())), now=14.9) == []
    assert told(c, (3, SubmitRequest(op("other"))), now=14.9) == []
    reason = "rank(s) 1, 3 did not submit it within 10 s (ranks [0, 2] did); REIGEN_DEADLINE sets how long to wait"
    instead = ((3, "waits for allreduce other"),)
    assert told(c, now=15.0) == [ErrorResponse("t", ErrorCause.LATE, reason, (0, 2), (1, 3), instead)]
    assert c.next_expiry() == 24.9


def test_f_who_comes_after_the_refusal_waits_anew() -> None:
    c = coordinator(deadline=10.0)
    told(c, (0, SubmitRequest(op())), now=0.0)
    assert len(told(c, now=10.0)) == 1
    assert told(c, (1, SubmitRequest(op())), now=11.0) == []
    assert told(c, (0, SubmitRequest(op())), now=20.9) == [ResponseList(((Response("t", 0),),))]


def test_f_a_refusal_is_for_the_ranks_that_it_lists() -> None:
    refuse = ErrorResponse("t", ErrorCause.LATE, "rank(s) 1 did not submit it", (0,), (1,))
    [first, second] = RankController(0), RankController(1)
    for p in (first, second):
        p.submit(op())
    [fail] = first.receive(refuse)
    assert isinstance(fail, FailOperation)
    assert isinstance(fail.error, DeadlineError)
    assert (fail.error.tensor, fail.error.ranks) == ("t", (1,))
    assert second.receive(refuse) == []
    assert list(second.pending) == ["t"]


def test_f_a_late_name_does_not_hold_up_others() -> None:
    c = coordinator(deadline=10.0)
    told(c, (0, SubmitRequest(op("a"))), now=0.0)
    told(c, (1, SubmitRequest(op("b"))), now=4.0)
    assert [r.name for r in told(c, now=10.0) if isinstance(r, ErrorResponse)] == ["a"]
    assert c.next_expiry() == 14.0
    assert told(c, (0, SubmitRequest(op("b"))), now=13.0) == [ResponseList(((Response("b", 0),),))]


# G


def test_g_leaving_is_the_last_word() -> None:
    p = RankController(1)
    p.submit(op())
    p.leave()
    assert p.outgoing == [SubmitRequest(op()), ShutdownRequest()]


def test_g_left_is_announced_after_what_was_ready_and_nothing_ever_after() -> None:
    c = coordinator(deadline=1.0)
    said = told(
        c, (0, SubmitRequest(op("a"))), (1, SubmitRequest(op("a"))), (0, SubmitRequest(op("b"))), (1, ShutdownRequest())
    )
    assert said == [ResponseList(((Response("a", 0),),)), RankShutdown(1)]
    assert told(c, (0, SubmitRequest(op("b"))), (1, SubmitRequest(op("b"))), (0, ShutdownRequest()), now=99.0) == []
    assert c.next_expiry() is None


def test_g_on_left_everything_outstanding_and_to_come_fails() -> None:
    p = RankController(0)
    p.submit(op("a"))
    p.submit(op("b"))
    fails = p.receive(RankShutdown(2))
    assert [f.name for f in fails if isinstance(f, FailOperation)] == ["a", "b"]
    assert all(
        isinstance(f, FailOperation) and isinstance(f.error, PeerLostError) and f.error.ranks == (2,) for f in fails
    )
    with pytest.raises(PeerLostError, match=r"^c: rank 2 has left the job"):
        p.submit(op("c"))
    assert p.receive(ResponseList(((Response("a"),),))) == []
    p.validate_state()


def test_g_who_leaves_does_not_fail_on_its_own_leaving() -> None:
    p = RankController(2)
    p.submit(op())
    assert p.receive(RankShutdown(2)) == []
    assert p.broken is None


# H


def test_h_a_loss_has_the_effect_of_left_once() -> None:
    p = RankController(0)
    p.submit(op())
    error = PeerLostError("rank 1 died", ranks=(1,))
    [fail] = p.lose(error)
    assert isinstance(fail, FailOperation)
    assert (fail.name, fail.error.ranks) == ("t", (1,))
    assert p.outgoing == []
    assert p.lose(PeerLostError("again", ranks=(0,))) == []
    assert p.broken is error


# I


def setting(c: Coordinator, size: int, *sets: tuple[int, ...]) -> list[int]:
    """Make process sets; their numbers."""
    numbers = []
    for number, ranks in enumerate(sets):
        add = Operation(OperationKind.ADD_SET, f"add{number}", shape=ranks)
        [run] = told(c, *((rank, SubmitRequest(add)) for rank in range(size)))
        assert isinstance(run, ResponseList)
        [[response]] = run.batches
        assert isinstance(response, Response)
        numbers.append(response.value)
    return numbers


def test_i_only_the_ranks_of_a_set_are_waited_for_and_take_part() -> None:
    c = coordinator(3)
    assert setting(c, 3, (0, 2)) == [1]
    operation = op("t", process_set=1)
    assert told(c, (2, SubmitRequest(operation))) == []
    run = ResponseList(((Response("t", 0, process_set=1),),))
    assert told(c, (0, SubmitRequest(operation))) == [run]
    stranger = RankController(1)
    assert stranger.receive(run) == []
    assert stranger.receive(ResponseList(((0,),))) == []


def test_i_what_waits_in_a_set_that_is_removed_is_refused_and_what_is_cached_is_forgotten() -> None:
    c = coordinator(2)
    setting(c, 2, (0,), (1,))
    told(c, (1, SubmitRequest(op("t", process_set=2))))
    told(c, (0, SubmitRequest(op("both"))), (1, SubmitRequest(op("both"))))
    both = Operation(OperationKind.ADD_SET, "b", shape=(0, 1))
    [refuse] = told(c, (0, SubmitRequest(both)), (1, SubmitRequest(both)))
    assert isinstance(refuse, ErrorResponse)
    assert refuse.reason == "there is a process set of the ranks [0, 1] already"
    remove = Operation(OperationKind.REMOVE_SET, "r", shape=(2,))
    said = told(c, (0, SubmitRequest(remove)), (1, SubmitRequest(remove)))
    assert said == [CacheEviction((0,)), ResponseList(((Response("r"),),))]
    assert told(c, (1, 0)) == []
    [refuse] = told(c, (1, SubmitRequest(op("t", process_set=2), instead_of=0)))
    assert refuse == ErrorResponse("t", ErrorCause.MISMATCH, "process set 2 has been removed", (1,))
    [refuse] = told(c, (0, SubmitRequest(remove)), (1, SubmitRequest(remove)))  # two threads wanted it
    assert refuse == ErrorResponse("r", ErrorCause.MISMATCH, "process set 2 has been removed", (0, 1))
    assert setting(c, 2, (1,)) == [2]


def test_i_a_set_that_could_not_be_made_is_no_set() -> None:
    """Its number means another set later, which is not this rank's."""
    p = RankController(0)
    p.submit(Operation(OperationKind.ADD_SET, "a", shape=(0, 1)))
    p.receive(ResponseList(((Response("a", value=1),),)))
    p.abandon_set(1)
    assert p.receive(ResponseList(((Response("t", process_set=1),),))) == []


# J


def test_j_groups_with_stand_ins_are_bounded_and_staged() -> None:
    """A long group with a template is one announcement of its own; what lies in registered memory is staged."""
    c = coordinator(2, threshold=1 << 30)
    group = op("g", dtype="", shape=(), members=tuple(op("", offset=64 * i) for i in range(2000)))
    told(c, (1, join()))
    [first, run, last] = told(c, (0, SubmitRequest(op("a"))), (0, SubmitRequest(group)), (0, SubmitRequest(op("b"))))
    assert isinstance(run, ResponseList)
    [[response]] = run.batches
    assert isinstance(response, Response)
    assert response.template is not None
    assert all(member.offset == -1 for member in response.template.members)
    assert not any(member.in_place for member in response.members)
    assert len(encode([first])) < 1 << 10
    assert len(encode([last])) < 1 << 10


# K


def join() -> SubmitRequest:
    return SubmitRequest(Operation(OperationKind.JOIN, JOIN_NAME))


def test_k_the_last_join_ends_what_is_outstanding_first() -> None:
    """Each rank has something that the other has not: both are done, then everybody has joined."""
    c = coordinator()
    x, y = op("x"), op("y", kind=OperationKind.BARRIER, dtype="", shape=())
    assert told(c, (0, SubmitRequest(x)), (1, SubmitRequest(y)), (0, join())) == [
        ErrorResponse(
            "y", ErrorCause.JOINED, "rank(s) 0 have joined, so they have no data for this barrier", (1,), (0,)
        )
    ]
    assert told(c, (1, join())) == [
        ResponseList(((Response("x", num_active=1, template=x),), (Response(JOIN_NAME, value=1),)))
    ]
    assert c.next_expiry() is None


def test_k_a_rank_is_not_stood_in_for_in_what_it_has_submitted() -> None:
    """Its cache hit crossed the eviction: that it has joined counts when it has said so in full."""
    c = coordinator(3, capacity=1)
    everybody = range(3)
    told(c, *((r, SubmitRequest(op("a"))) for r in everybody))
    assert CacheEviction((0,)) in told(c, *((r, SubmitRequest(op("b"))) for r in everybody))
    assert told(c, (0, 0), (0, join()), (1, SubmitRequest(op("a"))), (2, join())) == []
    [run] = told(c, (0, SubmitRequest(op("a"), instead_of=0)))
    assert run == ResponseList(((Response("a", num_active=2, template=op("a")),),))
    assert told(c, (1, join())) == [ResponseList(((Response(JOIN_NAME, value=1),),))]


def test_k_memory_is_given_back_by_those_who_have_joined_too() -> None:
    c = coordinator()
    free = op("f", kind=OperationKind.FREE, dtype="", shape=(), offset=64)
    assert told(c, (0, SubmitRequest(free)), (1, join())) == []
    assert told(c, (1, SubmitRequest(free))) == [ResponseList(((Response("f", in_place=True),),))]


# L


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (op(process_set=1), r"rank 2 is not in process set 1, whose ranks are \[0, 1\]"),
        (op(process_set=9), "process set 9 has been removed"),
        (op(dtype="complex64"), "no data type 'complex64'"),
        (op(kind=OperationKind.ALLGATHER, shape=()), r"allgather of shape \[\]"),
        (op(shape=(-1,)), r"allreduce of shape \[-1\]"),
        (op(kind=OperationKind.BROADCAST, root=3), "root rank 3 is not one of the ranks"),
        (op(kind=OperationKind.ALLTOALL, splits=(1, 1)), r"splits \[1, 1\] of 4 rows among 3 ranks"),
        (op(kind=OperationKind.ALLTOALL, splits=(2, 2, 2)), r"splits \[2, 2, 2\] of 4 rows"),
        (op(JOIN_NAME), "only a join can be called"),
        (op(kind=OperationKind.JOIN), "only a join can be called"),
        (Operation(OperationKind.JOIN, JOIN_NAME, members=(op(""),)), "no groups of join"),
        (op(members=(op("", kind=OperationKind.JOIN),)), "members of a group must be of its kind"),
        (op(members=(op("", process_set=1),)), "members of a group must be of its kind and process set"),
        (op(members=(op("", members=(op(""),)),)), "no groups themselves"),
        (op(members=(op(""), op("", dtype="?"))), "no data type"),
        (op(kind=OperationKind.ADD_SET, shape=(1, 0)), r"a process set of the ranks \[1, 0\] out of 3"),
        (op(kind=OperationKind.ADD_SET, shape=(1, 3)), r"a process set of the ranks \[1, 3\] out of 3"),
        (op(kind=OperationKind.ADD_SET, shape=()), r"a process set of the ranks \[\]"),
        (op(kind=OperationKind.REMOVE_SET, shape=(0,)), r"the process set \[0\] cannot be removed"),
        (op(kind=OperationKind.ADD_SET, shape=(0,), process_set=2), "add_set is for all ranks"),
    ],
)
def test_l_what_makes_no_sense_is_refused_on_who_says_it_and_all_else_goes_on(operation: Operation, text: str) -> None:
    c = coordinator(3)
    setting(c, 3, (0, 1), (1, 2))
    [refuse] = told(c, (2, SubmitRequest(operation)))
    assert isinstance(refuse, ErrorResponse)
    assert re.search(text, refuse.reason), refuse.reason
    assert refuse.submitted == (2,)
    assert told(c, *((rank, SubmitRequest(op("good"))) for rank in range(3))) == [
        ResponseList(((Response("good", 0),),))
    ]


def test_l_one_name_in_two_sets_is_a_mismatch() -> None:
    c = coordinator(3)
    setting(c, 3, (0, 1))
    [refuse] = told(c, (0, SubmitRequest(op())), (1, SubmitRequest(op(process_set=1))), (2, SubmitRequest(op())))
    assert isinstance(refuse, ErrorResponse)
    assert refuse.reason == "the process sets differ between ranks"


# P


def test_p_what_is_tuned_counts_from_the_next_batch_on() -> None:
    c = coordinator(threshold=0)
    tuned = TunedParameters(1, 1 << 20, 1 << 22, "direct", 2)
    both = [(rank, SubmitRequest(op(name))) for name in "ab" for rank in (0, 1)]
    assert [type(one) for one in told(c, *both)] == [ResponseList]
    c.tune(tuned)
    assert c.next_expiry() is None, "nothing is to be done for it alone"
    assert told(c) == []
    first, second = told(c, *[(rank, slot) for slot in (0, 1) for rank in (0, 1)])
    assert first == tuned
    assert second == ResponseList(((0, 1),)), "and fusion is on"


def test_p_several_choices_are_announced_in_their_order() -> None:
    c = coordinator()
    choices = [TunedParameters(version, 1 << 20) for version in (1, 2)]
    for choice in choices:
        c.tune(choice)
    assert told(c, *[(rank, SubmitRequest(op())) for rank in (0, 1)])[:2] == choices


def test_p_a_job_that_has_ended_announces_none() -> None:
    c = coordinator()
    told(c, (1, ShutdownRequest()))
    c.tune(TunedParameters(1, 1 << 20))
    assert told(c, (0, SubmitRequest(op()))) == []


def test_p_every_rank_takes_it_where_it_stands() -> None:
    p = participant_with(Response("t", 7), op())
    assert p.receive(TunedParameters(1, 5)) == [TunedParameters(1, 5)]
