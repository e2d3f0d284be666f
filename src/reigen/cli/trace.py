"""`reigen trace FILE`: summary of a timeline, with a verdict."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reigen.errors import ArgumentError
from reigen.files import write_atomically
from reigen.observe.analysis import select_worst
from reigen.observe.summary import TraceSummary, summarize
from reigen.observe.trace_reader import Trace, TraceError, read_trace
from reigen.observe.units import format_bytes, format_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Columns of the tables where there is no terminal.
_WIDTH = 120
_EPILOG = """\
Columns: "in all" is the time that execution takes on a rank; tensors that travel together share it by bytes, "alone"
leaves that out. median and p95 are of one execution, with what travels with it. "waited" is from a rank's submission
until all ranks had submitted. "hidden" is the part of the communication in which the training thread did other work.
"missing alone": only this rank had not submitted; "others waited": and the others had nothing else to do.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the summary; returns 0, or 1 for a file that is no timeline."""
    parser = argparse.ArgumentParser(
        prog="reigen trace",
        description="Summarize a timeline: what took how long, what was hidden, which ranks the others waited for, and "
        "what bounded the job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="file written by HOROVOD_TIMELINE or start_timeline()")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="most lines of a table (default: 10)")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="OUT",
        help="instead of a summary, write a profile of a rank's steps for `reigen plan`",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="for --profile: samples of one rank per step (default: 1)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.top < 1:
        parser.error("--top must be at least 1")
    try:
        trace = read_trace(chosen.file)
        if chosen.profile is not None:
            return _write_profile(trace, chosen)
        summary = summarize(trace)
    except (TraceError, ArgumentError) as error:
        print(f"reigen trace: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"reigen trace: {error.filename or chosen.file}: {error.strerror}", file=sys.stderr)
        return 1
    from rich.console import Console

    print_summary(summary, Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False), chosen.top)
    return 0


def _write_profile(trace: Trace, chosen: argparse.Namespace) -> int:
    from reigen.planner.trace_profile import profile_from_trace

    profile = profile_from_trace(trace, chosen.batch, chosen.file.stem)
    write_atomically(chosen.profile, [json.dumps(profile.to_json(), indent=1).encode() + b"\n"])
    print(
        f"{chosen.profile}: {len(profile.tensors)} gradients, {format_bytes(profile.nbytes)}; a step of one rank, "
        f"without waiting: {format_time(profile.step_seconds * 1e6)}, the median of {profile.steps}"
    )
    return 0


def print_summary(summary: TraceSummary, console: Console, top: int) -> None:
    """Print everything, ``top`` lines of tables that can be long."""
    trace = summary.trace
    failures = f", {len(trace.failures)} failed" if trace.failures else ""
    for _, change in trace.views:
        console.print(change, markup=False)
    if trace.views:
        console.print(f"What follows is of view {trace.view}.")
    console.print(
        f"{trace.size} ranks, {format_time(trace.end)}, {len(trace.executions)} collectives on all ranks{failures}; "
        f"times of different ranks are exact to {format_time(max(trace.clock_errors.values(), default=0.0))}"
    )
    console.print(_collectives_table(summary, top))
    if summary.steps:
        console.print(_steps_table(summary))
    if summary.occurrences:
        console.print(_late_table(summary))
        console.print(_worst_table(summary, top))
    for sentence in summary.sentences:
        console.print(f"* {sentence}", markup=False)


def _table(title: str, *headings: str, numbers: str) -> Table:
    """Make a table; ``numbers`` are the headings of further columns, aligned to the right."""
    from rich.table import Table

    # Ten columns, on 80 characters.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for heading in numbers.split(","):
        table.add_column(heading.strip(), justify="right", no_wrap=True)
    return table


def _collectives_table(summary: TraceSummary, top: int) -> Table:
    columns = "count, size, in all, median, p95, waited, p95, GB/s"
    table = _table("collectives, on one rank", "what", "tensor", numbers=columns)
    for row in summary.collectives[:top]:
        speed = f"{row.bytes_per_second / 1e9:.2f}" if row.bytes_per_second else ""
        times = (row.total, row.median, row.p95, row.negotiation, row.negotiation_p95)
        table.add_row(row.kind, row.name, str(row.count), format_bytes(row.nbytes), *map(format_time, times), speed)
    rest = summary.collectives[top:]
    if rest:
        count, busy = sum(row.count for row in rest), sum(row.total for row in rest)
        table.add_row(f"{len(rest)} more", "", str(count), "", format_time(busy), "", "", "", "", "")
    return table


def _steps_table(summary: TraceSummary) -> Table:
    table = _table("a step, median", numbers="rank, steps, step, waits, computes, communication, hidden")
    for row in summary.steps:
        times = (row.step, row.waiting, max(0.0, row.step - row.waiting), row.communication)
        hidden = "" if row.hidden is None else f"{row.hidden:.0%}"
        table.add_row(str(row.rank), str(row.count), *map(format_time, times), hidden)
    return table


def _late_table(summary: TraceSummary) -> Table:
    columns = "last, share, missing alone: median, p95, in all, others waited"
    where = ", in the steps" if summary.steps else ""
    table = _table(f"who came last{where}", "rank", numbers=columns)
    for row in summary.late:
        times = map(format_time, (row.median, row.p95, row.total, row.cost))
        name = summary.trace.names[row.rank].removeprefix("rank ")
        table.add_row(name, str(row.times_last), f"{row.part_last:.0%}", *times)
    return table


def _worst_table(summary: TraceSummary, top: int) -> Table:
    table = _table("the longest waits for one rank", "what", "tensor", numbers="at, missing alone, rank")
    for one in select_worst(summary.occurrences, top):
        table.add_row(one.kind, one.tensor, format_time(one.alone[0]), format_time(one.lateness), str(one.last))
    return table
