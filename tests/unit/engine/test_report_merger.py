"""A relay's reports, step by step: those of the ranks below it go in, merged ones come out."""

from __future__ import annotations

from typing import Any

from reigen.engine.messages import (
    JOIN_NAME,
    CacheEviction,
    ErrorCause,
    ErrorResponse,
    ForwardedMessage,
    MergedReports,
    MessageFragment,
    Note,
    Operation,
    OperationKind,
    RankShutdown,
    Report,
    Response,
    ResponseList,
    ShutdownRequest,
    SubmitRequest,
    Topic,
)
from reigen.engine.rank_masks import from_bytes, to_mask, to_ranks
from reigen.engine.report_merger import HOLD_SECONDS, ReportMerger

JOIN = SubmitRequest(Operation(OperationKind.JOIN, JOIN_NAME))


def op(name: str, **changes: Any) -> SubmitRequest:
    values: dict[str, Any] = {"kind": OperationKind.ALLREDUCE, "name": name, "dtype": "float32", "shape": (4,)}
    return SubmitRequest(Operation(**values | changes))


def merger(*slots: tuple[int, str]) -> ReportMerger:
    """Of ranks 4, 5 and 6 in a job of 8, which knows some slots."""
    found = ReportMerger(8, to_mask([4, 5, 6]))
    found.follow([ResponseList((tuple(Response(name, slot) for slot, name in slots),))])
    return found


def sent(m: ReportMerger, *reports: tuple[int, Report], now: float = 0.0) -> list[Any]:
    """What leaves after these: ranks with their reports, and messages that are passed on."""
    for rank, report in reports:
        m.receive(1 << rank, [report], now)
        m.validate_state()
    found = m.take(now)
    m.validate_state()
    return [(to_ranks(from_bytes(r.first, r.ranks)), r.reports) if isinstance(r, MergedReports) else r for r in found]


def test_b_what_all_report_leaves_once() -> None:
    m = merger((7, "t"))
    assert sent(m, (4, 7), (6, 7)) == []
    assert sent(m, (5, 7)) == [((4, 5, 6), (7,))]
    assert sent(m, (4, op("new")), (5, op("new"))) == []
    assert sent(m, (6, op("new"))) == [((4, 5, 6), (op("new"),))]


def test_b_names_that_are_complete_together_are_one_message() -> None:
    m = merger((7, "t"), (8, "u"))
    for rank in (4, 5, 6):
        m.receive(1 << rank, [7, 8], 0.0)
    [message] = m.take(0.0)
    assert message == MergedReports(4, b"\x07", (7, 8))


def test_b_different_reports_under_one_name_leave_together() -> None:
    m = merger((7, "t"))
    found = sent(m, (4, 7), (5, op("t", shape=(5,))), (6, 7))
    assert found == [((4, 6), (7,)), ((5,), (op("t", shape=(5,)),))]


def test_b_a_relay_below_reports_for_several() -> None:
    m = merger((7, "t"))
    assert sent(m, (5, MergedReports(5, b"\x03", (7,)))) == []
    assert sent(m, (4, 7)) == [((4, 5, 6), (7,))]


def test_b_only_ranks_of_the_process_set_are_waited_for() -> None:
    m = merger()
    add = op("add", kind=OperationKind.ADD_SET, dtype="", shape=(0, 4, 6))
    assert sent(m, (4, add), (5, add), (6, add)) == [((4, 5, 6), (add,))]
    m.follow([ResponseList(((Response("add", value=1),),))])
    inside = op("s", process_set=1)
    assert sent(m, (4, inside)) == []
    assert sent(m, (6, inside)) == [((4, 6), (inside,))]
    remove = op("remove", kind=OperationKind.REMOVE_SET, dtype="", shape=(1,))
    assert sent(m, (4, remove), (5, remove), (6, remove)) == [((4, 5, 6), (remove,))]
    m.follow([ResponseList(((Response("remove"),),))])
    assert sent(m, (4, inside)) == [((4,), (inside,))], "of a set that is not known nothing is kept"


def test_b_who_has_joined_is_not_waited_for_until_all_have() -> None:
    m = merger((7, "t"))
    assert sent(m, (4, 7), (5, JOIN)) == [((5,), (JOIN,))]
    assert sent(m, (6, 7)) == [((4, 6), (7,))]
    m.follow([ResponseList(((7,),))])
    assert sent(m, (4, 7)) == []
    assert sent(m, (6, JOIN)) == [((6,), (JOIN,)), ((4,), (7,))], "a join completes what waits for it alone"
    m.follow([ResponseList(((7,), (Response(JOIN_NAME),)))])
    assert sent(m, (4, 7), (5, 7)) == []


def test_c_what_has_waited_leaves_and_the_last_one_waits_for_nobody() -> None:
    m = merger((7, "t"))
    assert sent(m, (4, 7), now=1.0) == []
    assert m.next_release() == 1.0 + HOLD_SECONDS
    assert sent(m, now=1.0 + HOLD_SECONDS) == [((4,), (7,))]
    assert m.next_release() is None
    assert sent(m, (5, 7), now=2.0) == []
    assert sent(m, (6, 7), now=2.0) == [((5, 6), (7,))]
    m.follow([ResponseList(((7,),))])
    assert sent(m, (4, 7), (5, 7), now=3.0) == []


def test_c_a_refusal_begins_anew() -> None:
    m = merger((7, "t"))
    assert sent(m, (4, 7)) == []
    assert sent(m, now=HOLD_SECONDS) == [((4,), (7,))]
    m.follow([ErrorResponse("t", ErrorCause.LATE, "late", (4,))])
    assert sent(m, (5, 7), (6, 7)) == []
    assert sent(m, (4, 7)) == [((4, 5, 6), (7,))]


def test_d_nothing_is_overtaken_by_a_join_a_shutdown_or_a_piece() -> None:
    m = merger((7, "t"), (8, "u"), (9, "v"))
    assert sent(m, (4, 7), (4, JOIN)) == [((4,), (7, JOIN))]
    assert sent(m, (5, 8), (5, ShutdownRequest())) == [((5,), (8, ShutdownRequest()))]
    piece = MessageFragment(b"x", last=True)
    assert sent(m, (6, 9), (6, piece)) == [((6,), (9,)), ForwardedMessage(6, piece)]


def test_d_notes_are_passed_on_and_keep_their_sender() -> None:
    m, note = merger((7, "t")), Note(Topic.STACKS, b"x")
    assert sent(m, (5, 7), (5, note)) == [ForwardedMessage(5, note)]
    assert sent(m, (6, ForwardedMessage(3, note))) == [ForwardedMessage(3, note)]


def test_e_a_hit_of_a_slot_that_is_not_known_is_not_kept() -> None:
    assert sent(merger(), (5, 7)) == [((5,), (7,))]


def test_e_hits_leave_before_the_slot_is_forgotten() -> None:
    m = merger((7, "t"), (8, "u"))
    assert sent(m, (4, 7), (4, 8)) == []
    m.follow([CacheEviction((7,))])
    assert sent(m) == [((4,), (7,))]
    assert sent(m, (5, 7)) == [((5,), (7,))], "it has crossed the eviction"
    assert sent(m, (4, op("t")), (5, op("t"))) == []
    assert sent(m, (6, op("t"))) == [((4, 5, 6), (op("t"),))]
    assert sent(m, (5, 8), (6, 8)) == [((4, 5, 6), (8,))]


def test_a_new_slot_of_a_name_replaces_the_old_one() -> None:
    m = merger((7, "t"))
    m.follow([ResponseList(((Response("t", 9),),))])
    assert sent(m, (4, 7)) == [((4,), (7,))]
    assert sent(m, (4, 9), (5, 9)) == []
    assert sent(m, (6, 9)) == [((4, 5, 6), (9,))]


def test_after_the_end_nothing_leaves() -> None:
    m = merger((7, "t"))
    assert sent(m, (4, 7)) == []
    m.follow([RankShutdown(2)])
    assert sent(m, (5, 7), (6, ShutdownRequest())) == []
    assert m.next_release() is None
