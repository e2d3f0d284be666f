"""Stalls in virtual time: when ranks are asked, when is warned and of what, when the job ends; and the words."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence

import pytest

from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import JOIN_NAME, JobAbort, Operation, OperationKind, SubmitRequest
from reigen.engine.stall.inspector import (
    ANSWER_TIMEOUT_SECONDS,
    AbortStalled,
    CoordinatorAction,
    CoordinatorMonitor,
    PendingCollective,
    QueryRanks,
    Stall,
    StallInspector,
    StallResolved,
    WarnStall,
    name_ranks,
)
from reigen.engine.stall.report import format_resolved, format_stall, stall_error
from reigen.engine.stall.stack_sampler import StackFrame, StackSample, process_state, sample_stack
from reigen.errors import DeadlineError


def wait(name: str, ready: Sequence[int], missing: Sequence[int], since: float = 0.0) -> PendingCollective:
    return PendingCollective(name, "allreduce", 0, since, tuple(ready), tuple(missing))


def at(function: str = "work", blocked_in: str = "", pid: int = 7) -> StackSample:
    place = StackFrame("/home/u/train.py", 12, function, f"{function}()", False)
    return StackSample(pid, "node1", (place,), (), blocked_in, (), 0, "")


def answer_all(inspector: StallInspector, said: Sequence[object], blocked: dict[int, str] | None = None) -> None:
    [ask] = said
    assert isinstance(ask, QueryRanks)
    for rank in ask.ranks:
        inspector.answered(rank, ask.number, at(blocked_in=(blocked or {}).get(rank, "")))


def names(stall: Stall) -> list[str]:
    return [wait.name for wait in stall.waits]


DEADLOCKED = [wait("a", [0, 2], [1]), wait("b", [1], [0, 2])]
BLOCKED = {0: "a", 1: "b", 2: "a"}


def test_a_deadlock_is_told_within_seconds_and_once() -> None:
    inspector = StallInspector(60.0, 0.0, ranks=(0, 1, 2))
    assert inspector.look(DEADLOCKED, 1.9) == []
    assert inspector.due(0.0) == 2.9
    for now in (2.9, 3.9):
        said = inspector.look(DEADLOCKED, now)
        assert said == [QueryRanks(1 if now < 3 else 2, (0, 1, 2))]
        answer_all(inspector, said, BLOCKED)
        said = inspector.look(DEADLOCKED, now + 0.1)
    [warning] = said
    assert isinstance(warning, WarnStall)
    assert warning.stall.is_deadlock
    assert names(warning.stall) == ["a", "b"]
    text = format_stall(warning.stall, {0: (0, 1, 2)}, {})
    assert "none can submit what the others lack" in text
    assert "in a circle: a lacks rank 1, which waits in b; b lacks rank 0, which waits in a" in text
    assert all(inspector.look(DEADLOCKED, now) == [] for now in range(4, 60))
    answer_all(inspector, inspector.look(DEADLOCKED, 64.1), BLOCKED)  # from now on as any stall
    [warning] = inspector.look(DEADLOCKED, 64.2)
    assert isinstance(warning, WarnStall)


@pytest.mark.parametrize(
    "free",
    [
        at(),  # computes
        at(blocked_in="c"),  # in something that has been completed
        at(blocked_in="b"),  # of which the coordinator does not know that it has submitted it
        StackSample(7, "h", (), (("loader", StackFrame("f.py", 1, "f", "", False)),), "a", (), 0, ""),
        StackSample(7, "h", (), (), "a", (), 0, "moving data"),
        None,  # does not answer
    ],
)
def test_a_rank_that_may_still_submit_is_no_deadlock(free: StackSample | None) -> None:
    inspector = StallInspector(600.0, 0.0, ranks=(0, 1, 2))
    asked = []
    for tenth in range(1200):
        now = tenth / 10
        for said in inspector.look(DEADLOCKED, now):
            assert isinstance(said, QueryRanks)
            asked.append(now)
            for rank, name in BLOCKED.items():
                sample = free if rank == 2 else at(blocked_in=name)
                if sample is not None:
                    inspector.answered(rank, said.number, sample)
    assert 4 <= len(asked) <= 6  # after twice the time each
    assert asked[0] == 2.0


def test_what_comes_while_ranks_are_asked_is_no_deadlock() -> None:
    inspector = StallInspector(600.0, 0.0, ranks=(0, 1, 2))
    for number in range(50):
        waits = [*DEADLOCKED, wait(f"c{number}", [0], [1, 2], since=10.0 + number)]
        said = inspector.look(waits, 10.0 * (number + 1))
        if said:
            answer_all(inspector, said, BLOCKED)
        assert inspector.look([*waits, wait("d", [1], [0, 2])], 10.0 * number + 11) == []


def test_ranks_that_have_submitted_nothing_are_not_asked() -> None:
    inspector = StallInspector(600.0, 0.0, ranks=(0, 1, 2, 3))
    assert not any(inspector.look(DEADLOCKED, float(now)) for now in range(500))


def test_a_stall_is_asked_about_and_then_told_once_an_interval() -> None:
    inspector = StallInspector(60.0, 0.0)
    waits = [wait("a", [0, 2], [1])]
    assert inspector.look(waits, 59.9) == []
    assert inspector.due(0.0) == 60.9
    said = inspector.look(waits, 61.0)
    assert said == [QueryRanks(1, (1,))]
    assert inspector.look(waits, 61.5) == []
    inspector.answered(1, 1, at())
    assert inspector.due(0.0) == 0.0  # nothing else is waited for
    [warn] = inspector.look(waits, 61.6)
    assert isinstance(warn, WarnStall)
    assert (names(warn.stall), warn.stall.answers, warn.stall.silent) == (["a"], {1: at()}, ())
    moments = []
    for tenth in range(620, 10000):
        for instruction in inspector.look(waits, tenth / 10):
            if isinstance(instruction, QueryRanks):
                answer_all(inspector, [instruction])
            elif isinstance(instruction, WarnStall):
                moments.append(round(tenth / 10))
    assert moments == [122, 242, 482, 962]  # 60, 120, 240, 480 s after the one before, and a look


def test_who_does_not_answer_is_told_of_as_silent() -> None:
    inspector = StallInspector(1.0, 0.0)
    waits = [wait("a", [0], [1, 2])]
    [ask] = inspector.look(waits, 1.0)
    assert isinstance(ask, QueryRanks)
    inspector.answered(2, ask.number, at())
    inspector.answered(0, ask.number, at())  # was not asked
    inspector.answered(1, ask.number - 1, at())  # to another question
    assert inspector.look(waits, 1.0 + ANSWER_TIMEOUT_SECONDS - 0.01) == []
    [warn] = inspector.look(waits, 1.0 + ANSWER_TIMEOUT_SECONDS)
    assert isinstance(warn, WarnStall)
    assert (list(warn.stall.answers), warn.stall.silent) == ([2], (1,))


def test_what_waits_for_the_same_ranks_is_told_together() -> None:
    inspector = StallInspector(10.0, 0.0)
    waits = [
        wait("a", [0], [1], 0.0),
        wait("b", [0], [1], 4.9),
        wait("young", [0], [1], 5.1),
        wait("else", [1], [0], 4.0),
    ]
    answer_all(inspector, inspector.look(waits, 10.0))
    [warn] = inspector.look(waits, 10.0)
    assert isinstance(warn, WarnStall)
    assert names(warn.stall) == ["a", "b"]
    assert [wait.name for wait in warn.stall.others] == ["young", "else"]
    answer_all(inspector, inspector.look(waits, 14.0))
    [warn] = inspector.look(waits, 14.0)
    assert isinstance(warn, WarnStall)
    assert names(warn.stall) == ["else"]


def test_a_stall_that_ends_before_the_answers_is_not_told() -> None:
    inspector = StallInspector(1.0, 0.0)
    answer_all(inspector, inspector.look([wait("a", [0], [1])], 1.0))
    assert inspector.look([], 1.1) == []
    assert inspector.due(None) == math.inf


def test_the_end_of_a_stall_is_told_once_also_if_the_name_is_there_again() -> None:
    inspector = StallInspector(1.0, 0.0)
    answer_all(inspector, inspector.look([wait("a", [0], [1])], 1.0))
    inspector.look([wait("a", [0], [1])], 1.0)
    assert inspector.next_look == 0.0
    again = [wait("a", [0], [1], 5.0)]
    [told] = inspector.look(again, 5.0)
    assert told == StallResolved((wait("a", [0], [1]),), 5.0)
    assert format_resolved(told.waits, told.now) == "Stall over: allreduce a: no rank is missing any more, after 5 s."
    assert inspector.look(again, 5.5) == []


def test_a_deadline_is_not_told_of_as_the_end_of_a_stall() -> None:
    inspector = StallInspector(1.0, 0.0, 8.0)
    waits = [wait("a", [0], [1])]
    answer_all(inspector, inspector.look(waits, 1.0))
    inspector.look(waits, 1.0)
    assert inspector.look([], 8.0) == []


@pytest.mark.parametrize(("check", "asked_at"), [(1.0, [1.0, 2.1, 3.0]), (60.0, [3.0])])
def test_the_job_ends_at_the_shutdown_time_with_fresh_answers(check: float, asked_at: list[float]) -> None:
    inspector = StallInspector(check, 3.0)
    waits = [wait("b", [0], [1], 0.5), wait("a", [0, 2], [1], 0.0)]
    asked: list[float] = []
    for tenth in range(100):
        now = tenth / 10
        for instruction in inspector.look(waits, now):
            if isinstance(instruction, QueryRanks):
                asked.append(now)
                answer_all(inspector, [instruction])
            if isinstance(instruction, AbortStalled):
                error = stall_error(instruction.stall, {})
                assert (asked, round(now, 1)) == (asked_at, 3.1)
                assert (error.tensor, error.ranks) == ("a", (1,))
                assert "within 3.1 s" in str(error)
                assert "/home/u/train.py:12 in work" in error.details[1]
                return
    raise AssertionError("the job went on")


def test_ranks_for_which_the_missing_ones_wait_are_asked_too_and_a_circle_is_seen() -> None:
    inspector = StallInspector(1.0, 0.0)
    waits = [wait("a", [0], [1]), wait("b", [1], [2], 0.9), wait("c", [2], [0], 0.9), wait("d", [3], [4], 0.9)]
    said = inspector.look(waits, 1.0)
    assert said == [QueryRanks(1, (0, 1, 2))]
    answer_all(inspector, said, {0: "a", 1: "b", 2: "c"})
    [warn] = inspector.look(waits, 1.0)
    assert isinstance(warn, WarnStall)
    assert [(wait.name, rank) for wait, rank in warn.stall.cycle()] == [("a", 1), ("b", 2), ("c", 0)]
    text = format_stall(warn.stall, {0: (0, 1, 2, 3, 4)}, {})
    circle = "a lacks rank 1, which waits in b; b lacks rank 2, which waits in c; c lacks rank 0, which waits in a."
    assert circle in text
    assert "it waits in allreduce b, for which rank 2 is missing" in text


def test_a_chain_that_ends_in_a_rank_that_works_is_no_circle() -> None:
    waits = (wait("a", [0], [1, 2]), wait("b", [1], [2]))
    assert Stall(waits, (), {1: at(blocked_in="b"), 2: at()}, (), 9.0).cycle() == ()
    tail = (wait("a", [0], [1]), wait("b", [1], [2]), wait("c", [2], [1]))  # a waits for the circle of b and c
    stall = Stall(tail, (), {1: at(blocked_in="b"), 2: at(blocked_in="c")}, (), 9.0)
    assert [(wait.name, rank) for wait, rank in stall.cycle()] == [("b", 2), ("c", 1)]


def test_the_words_of_a_warning() -> None:
    many = [wait(f"grad.{i}", [0, 2, 3], [1], i / 100) for i in range(42)]
    subset = PendingCollective("s (process set 2)", "allgather", 2, 1.0, (1,), (3,), is_running=True)
    stall = Stall((*many, subset), (), {1: at("evaluate", pid=4711)}, (3,), 75.0)
    lines = format_stall(stall, {0: (0, 1, 2, 3), 2: (1, 3)}, {3: "99 is stopped"}).splitlines()
    assert lines[1:-1] == [
        "  allreduce grad.0, grad.1, grad.2, grad.3, grad.4 and 37 more for 75 s",
        "    waiting: ranks 0, 2, 3; missing: rank 1",
        "  allgather s of process set 2 (ranks 1, 3) for 74 s",
        "    in the middle of it: rank 1; missing: rank 3",
        "  rank 1 (process 4711 on node1) is at /home/u/train.py:12 in evaluate: evaluate()",
        "  rank 3 does not answer within 2 s: its process 99 is stopped",
    ]


def test_the_line_of_the_program_comes_before_those_of_libraries() -> None:
    stack = (
        StackFrame("/lib/nn.py", 1, "forward", "inner", True),
        StackFrame("/home/u/model.py", 2, "call", "own", False),
        StackFrame("/home/u/train.py", 3, "main", "outer", False),
    )
    answer = StackSample(1, "h", stack, (("loader", stack[2]),), "", ("x", "y"), 7, "")
    text = format_stall(Stall((wait("a", [0], [1]),), (), {1: answer}, (), 2.0), {0: (0, 1)}, {})
    assert [line.strip() for line in text.splitlines()[3:-1]] == [
        "rank 1 (process 1 on h) is at /home/u/model.py:2 in call: own",
        "inside /lib/nn.py:1 in forward: inner",
        "called from /home/u/train.py:3 in main: outer",
        "its thread loader is at /home/u/train.py:3 in main: outer",
        "it has submitted, and not waited for, x, y and 5 more",
    ]


def test_rank_one_asks_whether_rank_zero_is_there() -> None:
    check = CoordinatorMonitor(1.0, 0.0)
    said = []
    for tenth in range(200):
        now = tenth / 10
        if now == 9.0:
            assert check.answered(now)
        what = check.look(0.0, now)
        if what is not None:
            said.append((now, what.name))
        if what is CoordinatorAction.ASK and now > 9.0:
            assert not check.answered(now)
    assert said[:5] == [(1.0, "ASK"), (3.0, "WARN"), (4.0, "ASK"), (6.0, "WARN"), (8.0, "ASK")]
    assert said[5:] == [(float(second), "ASK") for second in range(10, 20)]


def test_rank_one_gives_up_in_place_of_rank_zero() -> None:
    check = CoordinatorMonitor(1.0, 4.0)
    said = [(tenth / 10, what.name) for tenth in range(80) if (what := check.look(0.0, tenth / 10)) is not None]
    assert said[:4] == [(1.0, "ASK"), (3.0, "WARN"), (4.0, "ASK"), (6.0, "GIVE_UP")]


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([4, 2], "ranks 2, 4"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7, 8")]
)
def test_listed(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


# -- where a thread is ------------------------------------------------------------------------------------------------


class Engine:
    """Has the method in which threads wait."""

    def wait_for(self, handle: object, held: threading.Event, reached: threading.Event) -> None:
        reached.set()
        held.wait(30.0)


class Named:
    name = "grad.3"


def dig(depth: int, end: object) -> None:
    if depth:
        dig(depth - 1, end)
    else:
        end()  # type: ignore[operator]  # the bottom of the pit


def test_where_a_thread_is_that_waits_in_a_collective_below_a_deep_stack() -> None:
    held, reached = threading.Event(), threading.Event()
    thread = threading.Thread(target=dig, args=(100, lambda: Engine().wait_for(Named(), held, reached)), name="deep")
    thread.start()
    try:
        assert reached.wait(10.0)
        assert thread.ident is not None
        found = sample_stack(thread.ident, Engine.wait_for.__code__, (f"t{i}" for i in range(50)), "")
        other = sample_stack(threading.get_ident(), Engine.wait_for.__code__, (), "")
    finally:
        held.set()
        thread.join()
    assert (found.pid, found.blocked_in, found.num_outstanding) == (os.getpid(), "grad.3", 50)
    assert found.outstanding == tuple(f"t{i}" for i in range(5))
    assert found.stack[0].function.endswith("wait_for")  # the frames of the event's own waiting are left out
    assert found.stack[2].source == "end()  # type: ignore[operator]  # the bottom of the pit"
    assert len(found.stack) <= 15
    assert other.blocked_in == ""
    [place] = [place for name, place in other.threads if name == "deep"]
    assert place.function.endswith("wait_for")


def test_a_thread_without_code_of_the_program_gives_way_to_the_main_thread() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)  # as one of Reigen's that has made a view: frames of threading alone
    thread.start()
    try:
        assert thread.ident is not None
        found = sample_stack(thread.ident, Engine.wait_for.__code__, (), "")
    finally:
        done.set()
        thread.join()
    own = [place for place in found.stack if not place.is_library]
    assert own[0].file.endswith("test_stall.py")
    assert own[0].source.startswith("found = sample_stack(")
    assert "MainThread" not in dict(found.threads), "it is told first, and once"


def test_the_beginning_of_a_thread_is_left_out() -> None:
    held, reached = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: Engine().wait_for(Named(), held, reached))
    thread.start()
    try:
        assert reached.wait(10.0)
        assert thread.ident is not None
        found = sample_stack(thread.ident, Engine.wait_for.__code__, (), "")
    finally:
        held.set()
        thread.join()
    assert found.blocked_in == "grad.3"
    assert [place.file for place in found.stack if place.file == threading.__file__] == []


def test_the_kernel_knows_of_a_process() -> None:
    assert process_state(os.getpid()).startswith(f"{os.getpid()} runs")
    assert process_state(1 << 30) == ""


# -- what the coordinator tells ---------------------------------------------------------------------------------------


def submit(
    coordinator: Coordinator, rank: int, name: str, kind: OperationKind = OperationKind.BARRIER, process_set: int = 0
) -> None:
    coordinator.receive(rank, [SubmitRequest(Operation(kind, name, process_set=process_set))], float(rank))


def test_the_coordinator_tells_what_waits() -> None:
    coordinator = Coordinator(3, 8, 0, 600.0)
    for rank in range(3):
        coordinator.receive(rank, [SubmitRequest(Operation(OperationKind.ADD_SET, "add", shape=(0, 2)))], 0.0)
    submit(coordinator, 0, "free", OperationKind.FREE)
    assert coordinator.waits() == []  # nobody waits for memory to be given back
    assert coordinator.oldest_wait() is None
    submit(coordinator, 2, "s", process_set=1)
    submit(coordinator, 1, "all")
    assert coordinator.waits() == [
        PendingCollective("s", "barrier", 1, 2.0, (2,), (0,)),
        PendingCollective("all", "barrier", 0, 1.0, (1,), (0, 2)),
    ]
    assert coordinator.oldest_wait() == 2.0
    submit(
        coordinator, 2, JOIN_NAME, OperationKind.JOIN
    )  # no rank that has joined is missing, and a join waits as long as it takes
    assert coordinator.waits()[1:] == [PendingCollective("all", "barrier", 0, 1.0, (1,), (0,))]
    assert coordinator.process_sets == {0: (0, 1, 2), 1: (0, 2)}


def test_after_a_stop_nothing_is_announced() -> None:
    coordinator = Coordinator(1, 8, 0, 600.0)
    submit(coordinator, 0, "ready")
    coordinator.stop(DeadlineError("too late", tensor="t", ranks=(1,), details={1: "there"}))
    assert coordinator.announce(0.0) == [JobAbort("too late", "t", (1,), ((1, "there"),))]
    submit(coordinator, 0, "later")
    assert coordinator.announce(0.0) == []
