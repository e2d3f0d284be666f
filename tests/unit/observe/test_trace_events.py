"""From what an engine does to slices in rows: events in, slices out."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from reigen.engine.messages import MAX_NOTE_BYTES, Operation, OperationKind, Response
from reigen.observe import recorder as r
from reigen.observe.messages import BEGUN, COMPLETE, INSTANT, OVER, TraceChunk, encode
from reigen.observe.recorder import Event, EventRecorder
from reigen.observe.trace_events import (
    FIRST_SHARED,
    LONG_NANOSECONDS,
    MAX_NAMED,
    ChunkContent,
    TraceEventBuilder,
    describe_operation,
    make_title,
    parse_title,
)
from reigen.resources.cpu import ProcessorTime
from reigen.types import ReduceOp

US = 1000
A = Operation(OperationKind.ALLREDUCE, "a", "float32", (2, 3), ReduceOp.AVERAGE)
B = Operation(OperationKind.ALLREDUCE, "b", "float32", (), ReduceOp.AVERAGE)


def batch(*operations: Operation) -> list[tuple[Operation, Response]]:
    return [(operation, Response(operation.name)) for operation in operations]


def slices(contents: list[ChunkContent]) -> list[tuple[int, str, int, int, int, dict[str, Any]]]:
    """(form, name, row, begin, nanoseconds, arguments)"""
    return [
        (form, c.labels[label][0], row, begin, ns, json.loads(c.arguments[detail]) if detail >= 0 else {})
        for c in contents
        for form, label, row, begin, ns, detail in c.slices
    ]


def show(*events: Event, mark_cycles: bool = False) -> list[tuple[int, str, int, int, int, dict[str, Any]]]:
    layout = TraceEventBuilder(mark_cycles)
    layout.follow(events)
    return slices(layout.take())


def test_a_collective_is_negotiated_queued_and_carried_out_in_one_row() -> None:
    phases = {"MEMCPY_IN_FUSION_BUFFER": [4 * US, 2], "SHM_ALLREDUCE": [5 * US, 1], "WAIT_FOR_OTHER_RANKS": [10, 1]}
    shown = show(
        (r.SUBMITTED, 10 * US, A, None),
        (r.ANNOUNCED, 50 * US, None, None),
        (r.BEGAN, 60 * US, batch(A), None),
        (r.ENDED, 70 * US, batch(A), phases),
    )
    facts = {"tensor": "allreduce.a", "dtype": "float32", "shape": "[2, 3]", "bytes": 24, "op": "AVERAGE", "batch": 1}
    assert shown == [
        (COMPLETE, "NEGOTIATE_ALLREDUCE", 1300, 10 * US, 40 * US, {"tensor": "allreduce.a"}),
        (COMPLETE, "QUEUE", 1300, 50 * US, 10 * US, {}),
        (COMPLETE, "ALLREDUCE", 1300, 60 * US, 10 * US, facts),
        (COMPLETE, "MEMCPY_IN_FUSION_BUFFER", 1300, 60 * US, 4 * US, {"count": 2}),
        (COMPLETE, "SHM_ALLREDUCE", 1300, 64 * US, 5 * US, {}),
    ]


def test_a_batch_shows_every_tensor_and_the_phases_once() -> None:
    both = batch(A, B)
    shown = show(
        (r.SUBMITTED, 0, A, None),
        (r.SUBMITTED, 1, B, None),
        (r.BEGAN, 9000, both, None),
        (r.ENDED, 19000, both, {"SHM_ALLREDUCE": [10000, 1]}),
    )
    assert [(name, row, begin) for _, name, row, begin, _, _ in shown] == [
        ("NEGOTIATE_ALLREDUCE", 1300, 0),
        ("NEGOTIATE_ALLREDUCE", 1301, 1),
        ("ALLREDUCE", 1300, 9000),
        ("ALLREDUCE", 1301, 9000),
        ("SHM_ALLREDUCE", 1300, 9000),
    ]
    assert shown[2][5]["batch"] == 2


def test_failures_cycles_steps_waits_and_requests() -> None:
    shown = show(
        (r.MARK, 0, 77, ("STEP", ProcessorTime(10 * US, 5 * US, 40 * US))),
        (r.SUBMITTED, 10, A, None),
        (r.WAITING, 20, 77, "a"),
        (r.ANNOUNCED, 30, None, None),
        (r.FAILED, 40, "a", None),
        (r.FAILED, 41, "a", None),
        (r.WAITED, 50, 77, "a"),
        (r.ANSWERED, 55, r.ServerRequest("PUSH", 2, 800, 40), None),
        (r.ANSWERED, 57, r.ServerRequest("PULL", 2, 800, 10), None),
        (r.ANSWERED, 58, r.ServerRequest("PULL", 0, 8, 2), None),
        (r.MARK, 60, 77, ("STEP", ProcessorTime(13 * US, 6 * US, 47 * US))),
        (r.WAITING, 70, 78, "b"),
        (r.WAITED, 80, 78, "b"),
        mark_cycles=True,
    )
    assert shown == [
        (INSTANT, "CYCLE_START", 1000, 30, 0, {}),
        (COMPLETE, "NEGOTIATE_ALLREDUCE", 1300, 10, 30, {"tensor": "allreduce.a"}),
        (INSTANT, "FAILED", 1300, 40, 0, {"tensor": "allreduce.a"}),
        (COMPLETE, "WAIT", 1001, 20, 30, {"tensor": "allreduce.a"}),
        (COMPLETE, "PUSH", 1050, 15, 40, {"server": 2, "bytes": 800}),
        (COMPLETE, "PULL", 1051, 47, 10, {"server": 2, "bytes": 800}),
        (COMPLETE, "PULL", 1050, 56, 2, {"server": 0, "bytes": 8}),
        (COMPLETE, "STEP", 1001, 0, 60, {"number": 1, "cpu_us": 3, "cpu_delay_us": 1, "process_cpu_us": 7}),
        (COMPLETE, "WAIT", 1002, 70, 10, {"tensor": "b"}),
    ]


def test_a_gradient_is_a_moment_of_the_thread_that_made_it() -> None:
    shown = show((r.GRADIENT, 30, 77, r.GradientArrival(4, "fc.weight", 400, "float32")))
    facts = {"tensor": "fc.weight", "number": 4, "bytes": 400, "dtype": "float32"}
    assert shown == [(INSTANT, "GRADIENT", 1001, 30, 0, facts)]


def test_gradients_are_recorded_up_to_a_limit() -> None:
    recorder = EventRecorder(clock=lambda: 7, max_events=3 * r.MAX_GRADIENTS)
    for _ in range(r.MAX_GRADIENTS):
        assert recorder.wants_gradients
        recorder.gradient_arrived(r.GradientArrival(0, "w", 4, "float32"))
    assert not recorder.wants_gradients
    recorder.gradient_arrived(r.GradientArrival(0, "w", 4, "float32"))
    assert len(recorder.take(2 * r.MAX_GRADIENTS)) == r.MAX_GRADIENTS
    assert recorder.num_dropped == 0


def test_what_takes_long_is_shown_before_it_ends() -> None:
    layout = TraceEventBuilder(mark_cycles=False)
    late = LONG_NANOSECONDS + 100
    layout.follow([(r.SUBMITTED, 10, A, None), (r.WAITING, 20, 7, "a")])
    layout.emit_long(LONG_NANOSECONDS)
    assert layout.take()[0].slices == []  # rows only
    layout.emit_long(late)
    layout.emit_long(late + 1)
    layout.follow([(r.BEGAN, late + 500, batch(A), None)])
    layout.emit_long(late + 2 * LONG_NANOSECONDS)
    layout.follow([(r.ENDED, 2 * late + LONG_NANOSECONDS, batch(A), {})])
    assert [(form, name) for form, name, *_ in slices(layout.take())] == [
        (BEGUN, "NEGOTIATE_ALLREDUCE"),
        (BEGUN, "WAIT"),
        (OVER, "NEGOTIATE_ALLREDUCE"),
        (BEGUN, "ALLREDUCE"),
        (OVER, "ALLREDUCE"),
    ]


def test_events_that_were_dropped_disturb_nothing_else() -> None:
    shown = show(
        (r.ENDED, 5, batch(A), {}),  # its beginning is unknown
        (r.WAITED, 6, 7, "a"),
        (r.BEGAN, 10, batch(A), None),  # its submission and its end are unknown
        (r.BEGAN, 20, batch(B), None),
        (r.ENDED, 30, batch(B), {}),
        (r.SUBMITTED, 40, A, None),
        (r.SUBMITTED, 50, A, None),  # the first one's end is unknown
        (r.BEGAN, 60, batch(A), None),
        (r.ENDED, 70, batch(A), {}),
    )
    assert [(name, row, begin, ns) for _, name, row, begin, ns, _ in shown] == [
        ("ALLREDUCE", 1300, 20, 10),
        ("NEGOTIATE_ALLREDUCE", 1100, 50, 10),
        ("ALLREDUCE", 1100, 60, 10),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_nothing_overlaps_in_a_row(seed: int) -> None:
    """In each row slices follow each other or lie in each other; however many tensors are under way."""
    rng = random.Random(seed)
    layout, events, now = TraceEventBuilder(mark_cycles=False), [], 0
    outstanding: list[Operation] = []
    names = [f"t{i}" for i in range(230)] + [f"allreduce.noname.{i}" for i in range(500)]
    for _ in range(3000):
        now += rng.randint(1, 5000)
        name = rng.choice(names)
        if outstanding and rng.random() < 0.3:
            chosen = [outstanding.pop(rng.randrange(len(outstanding))) for _ in range(min(len(outstanding), 3))]
            events += [(r.ANNOUNCED, now, None, None), (r.BEGAN, now + 2000, batch(*chosen), None)]
            now += 4000
            events.append((r.ENDED, now, batch(*chosen), {"SHM_ALLREDUCE": [1500, 1]}))
        elif len(outstanding) < 300 and all(o.name != name for o in outstanding):
            outstanding.append(Operation(OperationKind.ALLREDUCE, name, "float32", (1,)))
            events.append((r.SUBMITTED, now, outstanding[-1], None))
    layout.follow(events)
    rows: dict[int, list[tuple[int, int]]] = {}
    for _, _, row, begin, ns, _ in slices(layout.take()):
        rows.setdefault(row, []).append((begin, begin + ns))
    for spans in rows.values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    assert len(rows) > 205
    assert sum(row < FIRST_SHARED for row in rows) == MAX_NAMED, "what comes again has rows of its own"


def test_pages_fit_into_notes_and_stand_for_themselves() -> None:
    layout = TraceEventBuilder(mark_cycles=False)
    expected = []
    for i in range(400):
        operation = Operation(OperationKind.ALLREDUCE, f"{'y' * 500}{i}", "float32", (i,))
        expected += [f"allreduce.{operation.name}"] * 2
        layout.follow([(r.SUBMITTED, i, operation, None), (r.BEGAN, i, batch(operation), None)])
        layout.follow([(r.ENDED, i + 1, batch(operation), {})])
    contents = layout.take()
    pages = [TraceChunk(1, "h" * 60, 1, 2, 3, c.rows, c.labels, c.arguments, c.slices) for c in contents]
    assert max(len(encode(page)) for page in pages) <= MAX_NOTE_BYTES
    assert len(pages) > 10
    assert [arguments["tensor"] for *_, arguments in slices(contents)] == expected


def test_descriptions() -> None:
    group = Operation(OperationKind.ALLREDUCE, "g", members=(A, B), process_set=3)
    assert describe_operation(group, 1) == {
        "tensor": "allreduce.g",
        "tensors": 2,
        "bytes": 28,
        "op": "SUM",
        "process_set": 3,
        "batch": 1,
    }
    assert describe_operation(Operation(OperationKind.BROADCAST, "x", "int64", (4,), root=2), 1)["root"] == 2
    assert describe_operation(Operation(OperationKind.ALLOCATE, "x", shape=(4096,)), 1)["bytes"] == 4096


@pytest.mark.parametrize(
    ("kind", "name", "title"),
    [
        (OperationKind.ALLREDUCE, "loss", "allreduce.loss"),
        (OperationKind.BROADCAST, "layer.weight", "broadcast.layer.weight"),
        (OperationKind.ALLGATHER, "allgather.noname.0.7", "allgather.noname.0.7"),
        (OperationKind.ALLREDUCE, "grouped_allreduce.noname.0.7", "grouped_allreduce.noname.0.7"),
    ],
)
def test_a_timeline_calls_tensors_as_horovod_does(kind: OperationKind, name: str, title: str) -> None:
    assert make_title(Operation(kind, name)) == title
    assert parse_title(title) == name


def test_the_recorder_adds_phases_up_and_drops_what_is_too_much() -> None:
    times = iter(range(0, 10_000, 100))
    recorder = EventRecorder(lambda: next(times), max_events=4)
    recorder.began(batch(A))
    for name in ("x", "y", "x"):
        recorder.phase_ended(name)
    recorder.ended(batch(A))
    (_, _, _, _), (what, _, _, phases) = recorder.take(10)
    assert what == r.ENDED
    # began() looks at the clock twice
    assert phases == {"x": [300, 2], "y": [100, 1]}
    for _ in range(7):
        recorder.announced()
    assert recorder.num_dropped == 3
    assert len(recorder.take(3)) == 3
    assert len(recorder.take(3)) == 1
    assert msgspec.json.decode(b"[]") == recorder.take(3)
