"""What is read out of timelines that were made by hand."""

from __future__ import annotations

import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reigen.cli.main import main
from reigen.cli.trace import print_summary
from reigen.observe.analysis import (
    collective_rows,
    intersect_intervals,
    match_collectives,
    measure_coverage,
    merge_intervals,
    select_worst,
    step_rows,
    straggler_rows,
    total_length,
)
from reigen.observe.summary import summarize
from reigen.observe.trace_reader import (
    CollectiveExecution,
    RequestExecution,
    StepProcessorTime,
    Trace,
    TraceError,
    UnfinishedCollective,
    read_trace,
)
from reigen.resources.cpu import AllowedCpus

MS = 1000.0


def trace(executions: list[CollectiveExecution], size: int = 2, **fields: Any) -> Trace:
    return Trace(size, {r: f"rank {r} (h)" for r in range(size)}, executions, end=1000 * MS, **fields)


def one(
    rank: int, submitted: float | None, begun: float, ended: float, tensor: str = "t", **f: Any
) -> CollectiveExecution:
    known = {"kind": "ALLREDUCE", "process_set": 0, "nbytes": 1000, "batch": 1, **f}
    return CollectiveExecution(rank=rank, tensor=tensor, submitted=submitted, begun=begun, ended=ended, **known)


def test_intervals_agree_with_sets_of_points() -> None:
    rng = random.Random(0)
    for _ in range(200):
        pair = [[(a := rng.randrange(40), a + rng.randrange(8)) for _ in range(rng.randrange(6))] for _ in range(2)]
        points = [{p for begin, end in some for p in range(begin, end)} for some in pair]
        first, second = map(merge_intervals, pair)
        assert total_length(first) == len(points[0])
        assert total_length(intersect_intervals(first, second)) == len(points[0] & points[1])
        spans = [(0, 10), (10, 13), (20, 40)]
        assert measure_coverage(first, spans) == [
            len([p for p in points[0] if begin <= p < end]) for begin, end in spans
        ]


def test_time_and_bandwidth_of_what_travels_together_are_shared_by_bytes() -> None:
    together = [
        one(r, 0.0, 10.0, 50.0, tensor, nbytes=nbytes, batch=2)
        for r in range(2)
        for tensor, nbytes in (("a", 3000), ("b", 1000))
    ]
    first, second = collective_rows(trace([*together, one(0, 60.0, 70.0, 90.0, "b"), one(1, 60.0, 75.0, 85.0, "b")]))
    assert (first.name, first.count, first.total, first.median, first.negotiation) == ("a", 1, 30.0, 40.0, 10.0)
    assert (second.name, second.count, second.total, second.median) == ("b", 2, 10.0 + 15.0, 30.0)
    assert first.bytes_per_second == pytest.approx(3000 / 30e-6)


def test_names_that_were_made_up_are_one_and_many_names_lose_their_numbers() -> None:
    unnamed = [one(0, 0.0, 1.0, 2.0, f"allreduce.noname.{i}") for i in range(5)]
    assert [(r.name, r.count) for r in collective_rows(trace(unnamed))] == [("allreduce.noname.*", 5)]
    many = [one(0, 0.0, 1.0, 2.0, f"layer{i}.weight") for i in range(30)]
    assert [(r.name, r.count) for r in collective_rows(trace(many))] == [("layer*.weight", 30)]


def test_what_is_hidden_is_what_the_caller_does_not_wait_for() -> None:
    found = step_rows(
        trace(
            [one(0, 0.0, 10.0, 40.0), one(0, 0.0, 60.0, 80.0), one(0, 0.0, 110.0, 150.0)],
            steps={0: [(0.0, 100.0), (100.0, 200.0)]},
            waits={0: [(30.0, 50.0), (70.0, 80.0), (140.0, 160.0)]},
        )
    )
    (row,) = found
    assert (row.rank, row.count, row.step) == (0, 2, 100.0)
    assert row.waiting == 25.0  # 30 and 20
    assert row.communication == 45.0  # 50 and 40
    assert row.hidden == pytest.approx(1 - 30 / 90)
    assert step_rows(trace([one(0, 0.0, 10.0, 40.0)])) == []


def test_executions_of_a_name_are_put_together_though_some_are_missing() -> None:
    """A schedule with known answers: three ranks, 200 collectives under two names, tenth parts not recorded."""
    rng, now, executions, truth = random.Random(4), 0.0, [], []
    for i in range(200):
        submitted = {r: now + rng.uniform(0, 50) for r in range(3)}
        ready = max(submitted.values())
        begun = {r: ready + rng.uniform(1, 5) for r in range(3)}
        ended = {r: max(begun.values()) + rng.uniform(1, 5) for r in range(3)}
        kept = [r for r in range(3) if rng.random() > 0.1]
        executions += [one(r, submitted[r], begun[r], ended[r], f"t{i % 2}") for r in kept]
        if len(kept) > 1:
            truth.append({r: submitted[r] for r in kept})
        now = max(ended.values())
    rng.shuffle(executions)
    found = match_collectives(trace(executions, size=3))
    assert sorted(o.submitted.items() for o in found) == sorted(t.items() for t in truth)
    for occurrence in found:
        times = sorted(occurrence.submitted.values())
        assert occurrence.submitted[occurrence.last if occurrence.last is not None else -1] == times[-1]
        assert occurrence.lateness == pytest.approx(times[-1] - times[-2])


def test_who_was_late_and_what_it_cost() -> None:
    """Rank 2 is last three times: 10, 20 and, at the same time as the second, 5 more; rank 0 once; once nobody."""
    rows: list[CollectiveExecution] = []
    for tensor, times in {
        "a": (0.0, 5.0, 15.0),
        "b": (100.0, 90.0, 120.0),
        "c": (101.0, 95.0, 125.0),
        "d": (230.0, 200.0, 210.0),
        "e": (300.0, 300.0, 300.2),
    }.items():
        rows += [one(r, at, max(times) + 1, max(times) + 2, tensor) for r, at in enumerate(times)]
    whole = trace(rows, size=3, clock_errors={0: 0.0, 1: 0.15, 2: 0.15})
    found = match_collectives(whole)
    late = {row.rank: row for row in straggler_rows(whole, found)}
    assert (late[2].times_last, late[2].part_last, late[2].median, late[2].total) == (3, 0.6, 20.0, 35.0)
    assert (late[0].times_last, late[0].total) == (1, 20.0)
    assert (late[1].times_last, late[1].total) == (0, 0.0)
    assert [row.rank for row in straggler_rows(whole, found)] == [2, 0, 1]
    # rank 1 could have done something else until 112, and rank 0 always
    whole.waits = {1: [(112.0, 130.0), (210.0, 215.0)]}
    assert {row.rank: row.cost for row in straggler_rows(whole, found)} == {2: 13.0 / 2, 0: 5.0 / 2, 1: 0.0}
    # c waited for the same rank at the same time as b
    assert [(o.tensor, o.lateness) for o in select_worst(found, 10)] == [("c", 24.0), ("d", 20.0), ("a", 10.0)]


def steady(lag: float, nbytes: int = 1 << 20, per_step: int = 4) -> Trace:
    """Ten steps of 100 ms on two ranks; rank 1 submits ``lag`` later; nobody waits but for that."""
    executions, marked, waits = [], {0: [], 1: []}, {0: [], 1: []}
    for step in range(10):
        base = step * 100 * MS
        for rank in range(2):
            marked[rank].append((base, base + 100 * MS))
            for i in range(per_step):
                at = base + 60 * MS + i * 5 * MS / per_step
                executions.append(
                    one(rank, at + lag * rank, at + lag + 10, at + lag + 110, f"t{i}", nbytes=nbytes)  # 100 us each
                )
        if lag:
            waits[0].append((base + 60 * MS, base + 60 * MS + lag + 200))
    return trace(executions, steps=marked, waits=waits, waited_for={(0, begin): "t0" for begin, _ in waits[0]})


def test_advice_names_the_rank_that_is_late() -> None:
    first, second = summarize(steady(12 * MS)).sentences
    assert first == "probably: 12% of a step was waiting for rank 1: it came last"
    assert second.startswith("what to do: look at its data loading")
    (sentence,) = summarize(steady(0.0)).sentences
    assert sentence.startswith("100% of a step is the program's own computing, evenly on all ranks")


def test_what_precedes_the_steps_blames_nobody() -> None:
    whole = steady(12 * MS)
    whole.executions += [one(r, -5000 * MS * r, 0.0, 1.0, f"start{i}") for r in range(2) for i in range(500)]
    whole.steps = {r: [(b, e) for b, e in spans if b > 0] for r, spans in whole.steps.items()}
    summary = summarize(whole)
    assert {row.rank: row.times_last for row in summary.late} == {0: 0, 1: 36}
    assert summary.verdict.finding == "12% of a step was waiting for rank 1: it came last"


def test_advice_on_what_a_job_hung_in_and_on_doubts() -> None:
    hung = trace(
        [one(0, 0.0, 1.0, 2.0)],
        size=3,
        pending=[UnfinishedCollective(0, "x", 400 * MS), UnfinishedCollective(1, "x", 500 * MS)],
    )
    hung.num_dropped, hung.is_cut = 7, True
    del hung.names[2]
    said = summarize(hung).sentences
    assert said[0] == (
        "at the end rank(s) 0, 1 had been waiting in 'x' for 600 ms; rank(s) 2 had not submitted it: look there"
    )
    assert [s.partition(" ")[0] for s in said[1:]] == ["nothing", "no", "7", "nothing", "the"]


# -- files ------------------------------------------------------------------------------------------------------------

FIRST = {"name": "start_time_since_epoch_in_micros", "ph": "M", "pid": 0, "args": {"size": 2}}


def line(name: str, ph: str, pid: int, ts: float, cat: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": ph, "pid": pid, "tid": 100, "ts": ts, "cat": cat, **more}


RECORDS = [
    FIRST,
    {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0 (h)"}},
    {"name": "clock_offset", "ph": "M", "pid": 1, "args": {"offset_us": 3.0, "error_us": 2.5}},
    {"name": "clock_offset", "ph": "M", "pid": 1, "args": {"offset_us": 3.0, "error_us": None}},
    {"name": "dropped_events", "ph": "M", "pid": 1, "args": {"count": 2}},
    {"name": "dropped_events", "ph": "M", "pid": 1, "args": {"count": 5}},
    line("NEGOTIATE_ALLREDUCE", "X", 0, 10.0, "negotiation", dur=5.0, args={"tensor": "é"}),
    line("ALLREDUCE", "X", 0, 15.0, "collective", dur=4.0, args={"tensor": "é", "bytes": 8, "batch": 2}),
    line("SHM_ALLREDUCE", "X", 0, 15.0, "phase", dur=4.0),
    line("NEGOTIATE_ALLREDUCE", "B", 1, 10.0, "negotiation", args={"tensor": "é"}),
    line("WAIT", "B", 1, 11.0, "thread", args={"tensor": "é"}),
    line("NEGOTIATE_ALLREDUCE", "E", 1, 12.0, "negotiation"),
    line("ALLREDUCE", "X", 1, 15.0, "collective", dur=4.0, args={"tensor": "é", "bytes": 8, "batch": 2}),
    line("FAILED", "i", 0, 20.0, "error", args={"tensor": "bad"}, s="t"),
    line("NEGOTIATE_BARRIER", "B", 0, 25.0, "negotiation", args={"tensor": "bar"}),
    line(
        "STEP",
        "X",
        0,
        0.0,
        "thread",
        dur=30.0,
        args={"number": 1, "cpu_us": 9, "cpu_delay_us": 2, "process_cpu_us": 11},
    ),
    line("PUSHPULL", "X", 1, 21.0, "server", dur=4.0, args={"server": 1, "bytes": 16}),
    {"name": "allowed_cpus", "ph": "M", "pid": 1, "args": {"mask": "1f", "quota": 1.5}},
    {"name": "allowed_cpus", "ph": "M", "pid": 0, "args": {"mask": "no number", "quota": 0.0}},
    {"name": "recorded_until", "ph": "M", "pid": 0, "args": {"ts_us": 45.0}},
]


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n]\n")
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path / "t.json", RECORDS))
    assert (found.size, found.names, found.clock_errors, found.num_dropped) == (2, {0: "rank 0 (h)"}, {1: 2.5}, 5)
    assert found.executions == [
        CollectiveExecution(0, "ALLREDUCE", "é", 0, 8, 2, 10.0, 15.0, 19.0, announced=15.0),
        CollectiveExecution(1, "ALLREDUCE", "é", 0, 8, 2, 10.0, 15.0, 19.0, announced=12.0),
    ]
    assert (found.failures, found.pending) == ([(0, "bad")], [UnfinishedCollective(0, "bar", 25.0)])
    assert (found.steps, found.waits) == ({0: [(0.0, 30.0)]}, {1: [(11.0, 45.0)]})
    assert found.waited_for == {(1, 11.0): "é"}
    assert found.phases == {(0, 15.0): {"SHM_ALLREDUCE": 4.0}}
    assert found.processor_times == {0: [StepProcessorTime(9.0, 2.0, 11.0)]}
    assert found.requests == [RequestExecution(1, "PUSHPULL", 1, 16, 21.0, 25.0)]
    assert found.cpus == {0: AllowedCpus(0), 1: AllowedCpus(0x1F, 1.5)}
    assert (found.end, found.is_cut) == (45.0, False)


def test_a_file_that_is_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    whole = written(tmp_path / "t.json", RECORDS).read_bytes()
    first = len("[\n" + json.dumps(FIRST))
    for length in range(first, len(whole) - 2, 7):
        (tmp_path / "cut.json").write_bytes(whole[:length])
        found = read_trace(tmp_path / "cut.json")
        assert found.is_cut
        num_lines = whole[:length].count(b"\n") - 1
        assert len(found.executions) <= 2
        assert len(found.executions) >= sum(num_lines > n for n in (7, 12))


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "[1, 2]", "nonsense", '{"traceEvents": []}', '[{"name": "x", "ph": "X"}]', "\x00\xff"]
)
def test_what_is_no_timeline_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(TraceError, match="is no timeline of Reigen"):
        read_trace(path)
    assert main(["trace", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"reigen trace: {path} is no timeline")


def test_the_command_prints_everything_and_no_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(written(tmp_path / "t.json", RECORDS)), "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for expected in ("2 ranks, 45.0 us, 2 collectives on all ranks, 1 failed", "é", "a step, median", "who came last"):
        assert expected in out
    assert "* at the end rank(s) 0 had been waiting in 'bar' for 20.0 us; rank(s) 1 had not submitted it" in out
    assert main(["trace", str(tmp_path / "missing.json")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_eighty_columns_are_wide_enough() -> None:
    """The longest name of a kind, a long tensor, long figures: texts fold, no heading and no figure is cut."""
    executions = [
        one(rank, at, at + 123.4 * MS, at + 223.4 * MS, "layer.12.weight/1.2.3", kind="REDUCESCATTER", nbytes=999 << 20)
        for at in (0.0, 300.0 * MS)
        for rank in (0, 1)
    ]
    screen = io.StringIO()
    print_summary(summarize(trace(executions)), Console(file=screen, width=80, highlight=False), 10)
    shown = screen.getvalue()
    lines = [line.split() for line in shown.splitlines()]
    headings, figures = next((a, b) for a, b in itertools.pairwise(lines) if a[:1] == ["what"])
    assert headings == ["what", "tensor", "count", "size", "in", "all", "median", "p95", "waited", "p95", "GB/s"], shown
    assert " ".join(figures[2:]) == "2 999.0 MiB 200 ms 100 ms 100 ms 123 ms 123 ms 10.48", shown
    assert "…" not in shown
