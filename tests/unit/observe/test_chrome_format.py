"""From pages to records of a Chrome trace."""

from __future__ import annotations

import json
from typing import Any

from reigen.observe.chrome_format import TraceMerger
from reigen.observe.messages import BEGUN, COMPLETE, INSTANT, OVER, TraceChunk, decode_at_rank_zero, encode

START = 5_000_000


def page(*slices: tuple[int, int, int, int, int, int], **fields: Any) -> TraceChunk:
    known: dict[str, Any] = {"host": "h", "offset": 0, "error": 0, "num_dropped": 0, "rows": []}
    labels, arguments = [("ALLREDUCE", "collective"), ("FAILED", "error")], [b'{"tensor":"t"}']
    made = TraceChunk(session=1, labels=labels, arguments=arguments, slices=list(slices), **{**known, **fields})
    travelled = decode_at_rank_zero(encode(made))
    assert travelled == made
    return made


def records(merger: TraceMerger, rank: int, *pages: TraceChunk) -> list[dict[str, Any]]:
    return [json.loads(record) for one in pages for record in merger.records(rank, one)]


def test_slices_become_records_in_rank_zeros_microseconds() -> None:
    merger = TraceMerger(START, 1_700_000_000_000_000, 4)
    assert json.loads(merger.first)["args"]["start_time_since_epoch_in_micros"] == 1_700_000_000_000_000
    slices = (
        (COMPLETE, 0, 1100, 3_001_500, 2_000, 0),
        (BEGUN, 0, 1100, 4_000_000, 0, -1),
        (OVER, 0, 1100, 4_500_000, 0, -1),
        (INSTANT, 1, 1100, 4_600_000, 0, 0),
        (COMPLETE, 0, 1100, 1_000_000, 1_000, -1),  # before the start
    )
    shown = [r for r in records(merger, 3, page(*slices, offset=2_500_000)) if r["ph"] != "M"]
    common = {"name": "ALLREDUCE", "pid": 3, "tid": 1100, "cat": "collective"}
    assert shown == [
        {**common, "ph": "X", "ts": 501.5, "dur": 2.0, "args": {"tensor": "t"}},
        {**common, "ph": "B", "ts": 1500.0},
        {**common, "ph": "E", "ts": 2000.0},
        {**common, "name": "FAILED", "cat": "error", "ph": "i", "ts": 2100.0, "s": "t", "args": {"tensor": "t"}},
        {**common, "ph": "X", "ts": 0.0, "dur": 1.0},
    ]


def test_what_describes_a_rank_is_told_once_and_when_it_changes() -> None:
    merger = TraceMerger(START, 0, 2)
    told = records(
        merger,
        1,
        page(rows=[(1100, "é")], error=-1),
        page(offset=7_000, error=2_000),
        page(offset=7_000, error=2_100),  # grows with age; not worth a record
        page(offset=7_000, error=5_000, num_dropped=3),
        page(offset=7_000, error=5_000, num_dropped=3),
    )
    assert {r["ph"] for r in told} == {"M"}
    assert [(r["name"], r["args"]) for r in told] == [
        ("process_name", {"name": "rank 1 (h)"}),
        ("process_sort_index", {"sort_index": 1}),
        ("clock_offset", {"offset_us": 0.0, "error_us": None}),
        ("thread_name", {"name": "é"}),
        ("thread_sort_index", {"sort_index": 1100}),
        ("clock_offset", {"offset_us": 7.0, "error_us": 2.0}),
        ("clock_offset", {"offset_us": 7.0, "error_us": 5.0}),
        ("dropped_events", {"count": 3}),
    ]
    first = records(merger, 0, page(cpus="f0", cpu_quota=2.5))[2]
    assert (first["name"], first["args"]) == ("allowed_cpus", {"mask": "f0", "quota": 2.5})
    assert json.loads(merger.lost(1, 9))["args"] == {"count": 9}
    assert json.loads(merger.until(START + 1500))["args"] == {"ts_us": 1.5}
