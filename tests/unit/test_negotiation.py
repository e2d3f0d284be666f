"""The protocol of negotiation, step by step: an event goes in, instructions come out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from reigen.engine.messages import (
    JOIN_NAME,
    UNNAMED,
    Announcement,
    Cause,
    Forget,
    Kind,
    Leave,
    Left,
    Operation,
    Ready,
    Refuse,
    Report,
    Response,
    Run,
    Submit,
    encode,
)
from reigen.engine.negotiation import Coordinator
from reigen.engine.participant import Execute, Fail, Participant
from reigen.errors import DeadlineError, DuplicateNameError, MismatchError, PeerLostError


def op(name: str = "t", **changes: Any) -> Operation:
    values: dict[str, Any] = {"kind": Kind.ALLREDUCE, "name": name, "dtype": "float32", "shape": (4,)}
    return Operation(**values | changes)


def coordinator(size: int = 2, *, capacity: int = 1024, threshold: int = 0, deadline: float = 60.0) -> Coordinator:
    return Coordinator(size, capacity, threshold, deadline)


def told(c: Coordinator, *reports: tuple[int, Report], now: float = 0.0) -> list[Announcement]:
    """What the coordinator announces after these reports."""
    for rank, report in reports:
        c.hear(rank, report, now)
        c.validate_state()
    said = c.announce(now)
    c.validate_state()
    return said


def participant_with(response: Response, operation: Operation, rank: int = 0) -> Participant:
    """A rank that has run an operation and keeps it in its cache."""
    p = Participant(rank)
    p.submit(operation)
    p.hear(Run(((response,),)))
    p.outgoing.clear()
    return p


# A


def test_a_what_is_new_is_told_in_full() -> None:
    p = Participant(1)
    p.submit(op())
    assert p.outgoing == [Submit(op())]


def test_a_what_is_cached_is_told_by_its_number() -> None:
    p = participant_with(Response("t", 7), op())
    p.submit(op())
    assert p.outgoing == [Ready(7)]


def test_a_another_operation_under_a_cached_name_is_told_in_full() -> None:
    p = participant_with(Response("t", 7), op())
    p.submit(op(shape=(5,)))
    assert p.outgoing == [Submit(op(shape=(5,)))]


def test_a_a_name_that_is_not_answered_is_refused_on_the_spot() -> None:
    p = Participant(0)
    p.submit(op())
    with pytest.raises(DuplicateNameError, match="'t'"):
        p.submit(op(shape=(9,)))
    assert p.outgoing == [Submit(op())]


def test_a_a_name_is_free_again_once_it_runs() -> None:
    p = Participant(0)
    p.submit(op())
    p.hear(Run(((Response("t"),),)))
    p.submit(op())
    assert p.outgoing == [Submit(op())] * 2


# B


def test_b_a_name_waits_for_every_rank() -> None:
    c = coordinator(3)
    assert told(c, (0, Submit(op())), (2, Submit(op()))) == []
    assert told(c, (1, Submit(op()))) == [Run(((Response("t", 0),),))]


def test_b_a_mismatch_is_refused_for_all_and_later_work_goes_on() -> None:
    c = coordinator(3)
    said = told(c, (0, Submit(op())), (1, Submit(op(dtype="int32"))), (2, Submit(op())))
    details = ((0, "float32"), (1, "int32"), (2, "float32"))
    assert said == [Refuse("t", Cause.MISMATCH, "the data types differ between ranks", (0, 1, 2), (0, 1, 2), details)]
    assert told(c, *((rank, Submit(op())) for rank in range(3))) == [Run(((Response("t", 0),),))]


def test_b_a_refusal_fails_the_submission_with_a_line_for_each_rank() -> None:
    p = Participant(1)
    p.submit(op())
    p.submit(op("other"))
    refuse = Refuse("t", Cause.MISMATCH, "the shapes differ between ranks", (0, 1), (0, 1), ((0, "[4]"), (1, "[5]")))
    [instruction] = p.hear(refuse)
    assert isinstance(instruction, Fail)
    assert isinstance(instruction.error, MismatchError)
    assert str(instruction.error) == "t: the shapes differ between ranks\n  rank 0: [4]\n  rank 1: [5]"
    assert list(p.pending) == ["other"]


# C


def test_c_what_became_ready_together_is_one_run_in_the_order_of_completion() -> None:
    c = coordinator()
    said = told(c, *((0, Submit(op(n))) for n in "abc"), *((1, Submit(op(n))) for n in "cab"))
    assert said == [Run(((Response("c", 0),), (Response("a", 1),), (Response("b", 2),)))]


def test_c_small_tensors_are_fused() -> None:
    c = coordinator(threshold=32)
    said = told(c, *((rank, Submit(op(n))) for rank in (0, 1) for n in "abc"))
    assert said == [Run(((Response("a", 0), Response("b", 1)), (Response("c", 2),)))]


def test_c_a_run_is_executed_batch_after_batch() -> None:
    p = Participant(0)
    for name in "abc":
        p.submit(op(name))
    a, b, c = (Response(name, i) for i, name in enumerate("abc"))
    assert p.hear(Run(((c, a), (b,)))) == [Execute(((op("c"), c), (op("a"), a))), Execute(((op("b"), b),))]
    assert not p.pending


def test_c_announcements_are_bounded() -> None:
    """Thousands of long answers at once still fit messages of the transport."""
    size = 6
    c = coordinator(size, capacity=1, threshold=1 << 30)
    splits = (1 << 40,) * size
    long = [op(f"{i:x<500}", kind=Kind.ALLTOALL, shape=(sum(splits),), splits=splits) for i in range(100)]
    many = [op(f"g{i}") for i in range(10_000)]
    for operation in (*long, *many):
        for rank in range(size):
            c.hear(rank, Submit(operation), 0.0)
    answered: list[str] = []
    forgotten: list[int] = []
    for announcement in c.announce(0.0):
        assert len(encode([announcement])) <= 1 << 16
        match announcement:
            case Run(batches):
                answered += [item.name for batch in batches for item in batch if isinstance(item, Response)]
            case Forget(slots):
                forgotten += slots
    assert sorted(answered) == sorted(o.name for o in (*long, *many))
    assert forgotten == list(range(10_099))


# D


def test_d_all_ready_is_announced_by_number_alone() -> None:
    c = coordinator()
    told(c, (0, Submit(op())), (1, Submit(op())))
    assert told(c, (1, Ready(0)), (0, Ready(0))) == [Run(((0,),))]


def test_d_each_rank_executes_its_own_cached_operation() -> None:
    mine = op(kind=Kind.ALLGATHER, shape=(2,))
    response = Response("t", 3, ((1, 2),))
    p = participant_with(response, mine, rank=1)
    p.submit(mine)
    assert p.hear(Run(((3,),))) == [Execute(((mine, response),))]


def test_d_a_new_shape_on_one_rank_takes_a_new_slot_with_the_others_cached_word() -> None:
    def gather(rows: int) -> Operation:
        return op(kind=Kind.ALLGATHER, shape=(rows, 2))

    c = coordinator(3)
    assert told(c, *((r, Submit(gather(r))) for r in range(3))) == [Run(((Response("t", 0, ((0, 1, 2),)),),))]
    assert told(c, (0, Ready(0)), (1, Submit(gather(9))), (2, Ready(0))) == [Run(((Response("t", 1, ((0, 9, 2),)),),))]
    assert told(c, (0, Ready(0)), (1, Ready(0)), (2, Ready(0))) == []  # the old number means nothing any more
    assert told(c, *((r, Ready(1)) for r in range(3))) == [Run(((1,),))]


def test_d_a_mismatch_with_cached_words_leaves_the_cache_as_it_was() -> None:
    c = coordinator()
    told(c, (0, Submit(op())), (1, Submit(op())))
    [refuse] = told(c, (0, Ready(0)), (1, Submit(op(shape=(5,)))))
    assert isinstance(refuse, Refuse)
    assert refuse.details == ((0, "[4]"), (1, "[5]"))
    assert told(c, (0, Ready(0)), (1, Ready(0))) == [Run(((0,),))]


def test_d_names_that_were_made_up_and_memory_are_not_cached() -> None:
    c = coordinator(1)
    for operation in (op(f"x{UNNAMED}3"), op("m", kind=Kind.ALLOCATE, dtype=""), op("f", kind=Kind.FREE, dtype="")):
        assert told(c, (0, Submit(operation))) == [Run(((Response(operation.name, -1),),))]


def test_d_capacity_zero_turns_the_cache_off() -> None:
    assert told(coordinator(1, capacity=0), (0, Submit(op()))) == [Run(((Response("t", -1),),))]
    p = participant_with(Response("t", -1), op())
    p.submit(op())
    assert p.outgoing == [Submit(op())]


# E


def test_e_the_least_recently_used_leaves() -> None:
    c = coordinator(1, capacity=2)
    told(c, (0, Submit(op("a"))), (0, Submit(op("b"))))
    told(c, (0, Ready(0)))  # a is used again
    assert told(c, (0, Submit(op("c")))) == [Run(((Response("c", 2),),)), Forget((1,))]


def test_e_a_slot_that_some_rank_has_said_ready_for_stays() -> None:
    c = coordinator(capacity=1)
    told(c, (0, Submit(op("a"))), (1, Submit(op("a"))))
    said = told(c, (0, Ready(0)), (0, Submit(op("b"))), (1, Submit(op("b"))))
    assert said == [Run(((Response("b", 1),),)), Forget((1,))]
    assert told(c, (1, Ready(0))) == [Run(((0,),))]


def test_e_ready_that_crosses_forget_is_ignored_and_said_again_in_full() -> None:
    c = coordinator(capacity=1)
    told(c, *((r, Submit(op("a"))) for r in (0, 1)))
    assert Forget((0,)) in told(c, *((r, Submit(op("b"))) for r in (0, 1)))
    assert told(c, (0, Ready(0))) == []
    p = participant_with(Response("a", 0), op("a"))
    p.submit(op("a"))
    p.outgoing.clear()
    assert p.hear(Forget((0,))) == []
    assert p.outgoing == [Submit(op("a"), instead_of=0)]
    p.validate_state()


def test_e_what_was_forgotten_before_it_was_needed_is_told_in_full() -> None:
    p = participant_with(Response("a", 0), op("a"))
    p.hear(Forget((0, 99)))
    assert p.outgoing == []
    p.submit(op("a"))
    assert p.outgoing == [Submit(op("a"))]


# F


def test_f_who_is_missing_at_the_deadline_is_named() -> None:
    c = coordinator(4, deadline=10.0)
    assert told(c, (2, Submit(op())), now=5.0) == []
    assert c.next_expiry() == 15.0
    assert told(c, (0, Submit(op())), now=14.9) == []
    assert told(c, (3, Submit(op("other"))), now=14.9) == []
    reason = "rank(s) 1, 3 did not submit it within 10 s (ranks [0, 2] did); REIGEN_DEADLINE sets how long to wait"
    instead = ((3, "waits for allreduce other"),)
    assert told(c, now=15.0) == [Refuse("t", Cause.LATE, reason, (0, 2), (1, 3), instead)]
    assert c.next_expiry() == 24.9


def test_f_who_comes_after_the_refusal_waits_anew() -> None:
    c = coordinator(deadline=10.0)
    told(c, (0, Submit(op())), now=0.0)
    assert len(told(c, now=10.0)) == 1
    assert told(c, (1, Submit(op())), now=11.0) == []
    assert told(c, (0, Submit(op())), now=20.9) == [Run(((Response("t", 0),),))]


def test_f_a_refusal_is_for_the_ranks_that_it_lists() -> None:
    refuse = Refuse("t", Cause.LATE, "rank(s) 1 did not submit it", (0,), (1,))
    [first, second] = Participant(0), Participant(1)
    for p in (first, second):
        p.submit(op())
    [fail] = first.hear(refuse)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, DeadlineError)
    assert (fail.error.tensor, fail.error.ranks) == ("t", (1,))
    assert second.hear(refuse) == []
    assert list(second.pending) == ["t"]


def test_f_a_late_name_does_not_hold_up_others() -> None:
    c = coordinator(deadline=10.0)
    told(c, (0, Submit(op("a"))), now=0.0)
    told(c, (1, Submit(op("b"))), now=4.0)
    assert [r.name for r in told(c, now=10.0) if isinstance(r, Refuse)] == ["a"]
    assert c.next_expiry() == 14.0
    assert told(c, (0, Submit(op("b"))), now=13.0) == [Run(((Response("b", 0),),))]


# G


def test_g_leaving_is_the_last_word() -> None:
    p = Participant(1)
    p.submit(op())
    p.leave()
    assert p.outgoing == [Submit(op()), Leave()]


def test_g_left_is_announced_after_what_was_ready_and_nothing_ever_after() -> None:
    c = coordinator(deadline=1.0)
    said = told(c, (0, Submit(op("a"))), (1, Submit(op("a"))), (0, Submit(op("b"))), (1, Leave()))
    assert said == [Run(((Response("a", 0),),)), Left(1)]
    assert told(c, (0, Submit(op("b"))), (1, Submit(op("b"))), (0, Leave()), now=99.0) == []
    assert c.next_expiry() is None


def test_g_on_left_everything_outstanding_and_to_come_fails() -> None:
    p = Participant(0)
    p.submit(op("a"))
    p.submit(op("b"))
    fails = p.hear(Left(2))
    assert [f.name for f in fails if isinstance(f, Fail)] == ["a", "b"]
    assert all(isinstance(f, Fail) and isinstance(f.error, PeerLostError) and f.error.ranks == (2,) for f in fails)
    with pytest.raises(PeerLostError, match=r"^c: rank 2 has left the job"):
        p.submit(op("c"))
    assert p.hear(Run(((Response("a"),),))) == []
    p.validate_state()


def test_g_who_leaves_does_not_fail_on_its_own_leaving() -> None:
    p = Participant(2)
    p.submit(op())
    assert p.hear(Left(2)) == []
    assert p.broken is None


# H


def test_h_a_loss_has_the_effect_of_left_once() -> None:
    p = Participant(0)
    p.submit(op())
    error = PeerLostError("rank 1 died", ranks=(1,))
    [fail] = p.lose(error)
    assert isinstance(fail, Fail)
    assert (fail.name, fail.error.ranks) == ("t", (1,))
    assert p.outgoing == []
    assert p.lose(PeerLostError("again", ranks=(0,))) == []
    assert p.broken is error


# I


def setting(c: Coordinator, size: int, *sets: tuple[int, ...]) -> list[int]:
    """Make process sets; their numbers."""
    numbers = []
    for number, ranks in enumerate(sets):
        add = Operation(Kind.ADD_SET, f"add{number}", shape=ranks)
        [run] = told(c, *((rank, Submit(add)) for rank in range(size)))
        assert isinstance(run, Run)
        [[response]] = run.batches
        assert isinstance(response, Response)
        numbers.append(response.value)
    return numbers


def test_i_only_the_ranks_of_a_set_are_waited_for_and_take_part() -> None:
    c = coordinator(3)
    assert setting(c, 3, (0, 2)) == [1]
    operation = op("t", process_set=1)
    assert told(c, (2, Submit(operation))) == []
    run = Run(((Response("t", 0, process_set=1),),))
    assert told(c, (0, Submit(operation))) == [run]
    stranger = Participant(1)
    assert stranger.hear(run) == []
    assert stranger.hear(Run(((0,),))) == []


def test_i_what_waits_in_a_set_that_is_removed_is_refused_and_what_is_cached_is_forgotten() -> None:
    c = coordinator(2)
    setting(c, 2, (0,), (1,))
    told(c, (1, Submit(op("t", process_set=2))))
    told(c, (0, Submit(op("both"))), (1, Submit(op("both"))))
    both = Operation(Kind.ADD_SET, "b", shape=(0, 1))
    [refuse] = told(c, (0, Submit(both)), (1, Submit(both)))
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "there is a process set of the ranks [0, 1] already"
    remove = Operation(Kind.REMOVE_SET, "r", shape=(2,))
    said = told(c, (0, Submit(remove)), (1, Submit(remove)))
    assert said == [Forget((0,)), Run(((Response("r"),),))]
    assert told(c, (1, Ready(0))) == []
    [refuse] = told(c, (1, Submit(op("t", process_set=2), instead_of=0)))
    assert refuse == Refuse("t", Cause.MISMATCH, "process set 2 has been removed", (1,))
    [refuse] = told(c, (0, Submit(remove)), (1, Submit(remove)))  # two threads wanted it
    assert refuse == Refuse("r", Cause.MISMATCH, "process set 2 has been removed", (0, 1))
    assert setting(c, 2, (1,)) == [2]


def test_i_a_set_that_could_not_be_made_is_no_set() -> None:
    """Its number means another set later, which is not this rank's."""
    p = Participant(0)
    p.submit(Operation(Kind.ADD_SET, "a", shape=(0, 1)))
    p.hear(Run(((Response("a", value=1),),)))
    p.abandon_set(1)
    assert p.hear(Run(((Response("t", process_set=1),),))) == []


# J


def test_j_groups_with_stand_ins_are_bounded_and_staged() -> None:
    """A long group with a template is one announcement of its own; what lies in registered memory is staged."""
    c = coordinator(2, threshold=1 << 30)
    group = op("g", dtype="", shape=(), members=tuple(op("", offset=64 * i) for i in range(2000)))
    told(c, (1, join()))
    [first, run, last] = told(c, (0, Submit(op("a"))), (0, Submit(group)), (0, Submit(op("b"))))
    assert isinstance(run, Run)
    [[response]] = run.batches
    assert isinstance(response, Response)
    assert response.template is not None
    assert all(member.offset == -1 for member in response.template.members)
    assert not any(member.in_place for member in response.members)
    assert len(encode([first])) < 1 << 10
    assert len(encode([last])) < 1 << 10


# K


def join() -> Submit:
    return Submit(Operation(Kind.JOIN, JOIN_NAME))


def test_k_the_last_join_ends_what_is_outstanding_first() -> None:
    """Each rank has something that the other has not: both are done, then everybody has joined."""
    c = coordinator()
    x, y = op("x"), op("y", kind=Kind.BARRIER, dtype="", shape=())
    assert told(c, (0, Submit(x)), (1, Submit(y)), (0, join())) == [
        Refuse("y", Cause.JOINED, "rank(s) 0 have joined, so they have no data for this barrier", (1,), (0,))
    ]
    assert told(c, (1, join())) == [Run(((Response("x", num_active=1, template=x),), (Response(JOIN_NAME, value=1),)))]
    assert c.next_expiry() is None


def test_k_a_rank_is_not_stood_in_for_in_what_it_has_submitted() -> None:
    """Its Ready crossed the Forget: that it has joined counts when it has said so in full."""
    c = coordinator(3, capacity=1)
    everybody = range(3)
    told(c, *((r, Submit(op("a"))) for r in everybody))
    assert Forget((0,)) in told(c, *((r, Submit(op("b"))) for r in everybody))
    assert told(c, (0, Ready(0)), (0, join()), (1, Submit(op("a"))), (2, join())) == []
    [run] = told(c, (0, Submit(op("a"), instead_of=0)))
    assert run == Run(((Response("a", num_active=2, template=op("a")),),))
    assert told(c, (1, join())) == [Run(((Response(JOIN_NAME, value=1),),))]


def test_k_memory_is_given_back_by_those_who_have_joined_too() -> None:
    c = coordinator()
    free = op("f", kind=Kind.FREE, dtype="", shape=(), offset=64)
    assert told(c, (0, Submit(free)), (1, join())) == []
    assert told(c, (1, Submit(free))) == [Run(((Response("f", in_place=True),),))]


# L


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (op(process_set=1), r"rank 2 is not in process set 1, whose ranks are \[0, 1\]"),
        (op(process_set=9), "process set 9 has been removed"),
        (op(dtype="complex64"), "no data type 'complex64'"),
        (op(kind=Kind.ALLGATHER, shape=()), r"allgather of shape \[\]"),
        (op(shape=(-1,)), r"allreduce of shape \[-1\]"),
        (op(kind=Kind.BROADCAST, root=3), "root rank 3 is not one of the ranks"),
        (op(kind=Kind.ALLTOALL, splits=(1, 1)), r"splits \[1, 1\] of 4 rows among 3 ranks"),
        (op(kind=Kind.ALLTOALL, splits=(2, 2, 2)), r"splits \[2, 2, 2\] of 4 rows"),
        (op(JOIN_NAME), "only a join can be called"),
        (op(kind=Kind.JOIN), "only a join can be called"),
        (Operation(Kind.JOIN, JOIN_NAME, members=(op(""),)), "no groups of join"),
        (op(members=(op("", kind=Kind.JOIN),)), "members of a group must be of its kind"),
        (op(members=(op("", process_set=1),)), "members of a group must be of its kind and process set"),
        (op(members=(op("", members=(op(""),)),)), "no groups themselves"),
        (op(members=(op(""), op("", dtype="?"))), "no data type"),
        (op(kind=Kind.ADD_SET, shape=(1, 0)), r"a process set of the ranks \[1, 0\] out of 3"),
        (op(kind=Kind.ADD_SET, shape=(1, 3)), r"a process set of the ranks \[1, 3\] out of 3"),
        (op(kind=Kind.ADD_SET, shape=()), r"a process set of the ranks \[\]"),
        (op(kind=Kind.REMOVE_SET, shape=(0,)), r"the process set \[0\] cannot be removed"),
        (op(kind=Kind.ADD_SET, shape=(0,), process_set=2), "add_set is for all ranks"),
    ],
)
def test_l_what_makes_no_sense_is_refused_on_who_says_it_and_all_else_goes_on(operation: Operation, text: str) -> None:
    c = coordinator(3)
    setting(c, 3, (0, 1), (1, 2))
    [refuse] = told(c, (2, Submit(operation)))
    assert isinstance(refuse, Refuse)
    assert re.search(text, refuse.reason), refuse.reason
    assert refuse.submitted == (2,)
    assert told(c, *((rank, Submit(op("good"))) for rank in range(3))) == [Run(((Response("good", 0),),))]


def test_l_one_name_in_two_sets_is_a_mismatch() -> None:
    c = coordinator(3)
    setting(c, 3, (0, 1))
    [refuse] = told(c, (0, Submit(op())), (1, Submit(op(process_set=1))), (2, Submit(op())))
    assert isinstance(refuse, Refuse)
    assert refuse.reason == "the process sets differ between ranks"
