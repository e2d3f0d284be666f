"""Live table of a job's processes: its rows, and lines for where there is no terminal. Pure, but for rich's drawing."""

from __future__ import annotations

import io
from collections.abc import Sequence

from reigen.launch.metrics.job_metrics import ProcessStatus
from reigen.launch.units import format_bytes, format_seconds

HEADINGS = ("rank", "host", "step", "steps/s", "samples/s", "compute", "transfer", "wait", "memory", "seen", "left", "")
#: Seconds between two lines about the whole job, where there is no terminal.
LINE_SECONDS = 10.0


def format_row(row: ProcessStatus) -> tuple[str, ...]:
    """Return the cells of a process, below `HEADINGS`."""
    process = row.process
    is_rank = process.report.kind == "rank"
    shares = [f"{share:.0%}" for share in process.shares()] if is_rank else [""] * 3
    samples = process.rate("reigen_samples_total")
    return (
        str(process.report.number) if is_rank else process.name,
        process.report.host,
        f"{process.steps:.0f}" if is_rank else "",
        f"{process.rate('reigen_steps_total'):.1f}" if is_rank else "",
        f"{samples:.0f}" if samples else "",
        *shares,
        format_bytes(process.latest.get("reigen_memory_bytes", "resident")),
        "ended" if process.report.is_last else f"{row.age_seconds:.0f} s ago",
        "" if row.eta_seconds is None else format_seconds(row.eta_seconds),
        describe_problem(row) or ("spare" if process.latest.get("reigen_warm_spare") else ""),
    )


def describe_problem(row: ProcessStatus) -> str:
    """Return the problem of a process in two or three words; empty: it has none."""
    if row.is_silent:
        return "silent" if not row.is_waited_for else "silent: the others wait"
    return "the others wait" if row.is_waited_for else ""


def choose_rows(rows: Sequence[ProcessStatus], most: int) -> tuple[list[ProcessStatus], int]:
    """Return the rows for which there is room, in order, and how many are left out; those with a problem come first."""
    if len(rows) <= most:
        return list(rows), 0
    by_problem = sorted(rows, key=lambda row: (not row.is_silent, not row.is_waited_for))
    chosen = {id(row) for row in by_problem[:most]}
    return [row for row in rows if id(row) in chosen], len(rows) - most


def draw_table(rows: Sequence[ProcessStatus], num_columns: int, num_lines: int) -> list[bytes]:
    """Return the table as lines for a terminal of that size, with colours; the rank that is waited for is marked."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown, num_left_out = choose_rows(rows, max(1, num_lines - 2))
    table = Table(*HEADINGS, box=None, header_style="bold", pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for row in shown:
        style = "bold red" if row.is_silent else "bold yellow" if row.is_waited_for else ""
        table.add_row(*(Text(cell) for cell in format_row(row)), style=style)
    out = io.StringIO()
    console = Console(file=out, width=max(20, num_columns - 1), force_terminal=True, color_system="standard")
    console.print(table)
    if num_left_out:
        console.print(f"{num_left_out} more, like the others")
    return [line.encode() for line in out.getvalue().splitlines()]


class SilenceTracker:
    """Tracker of the processes that fall silent, and are heard again."""

    def __init__(self) -> None:
        self._silent: set[str] = set()

    def take(self, rows: Sequence[ProcessStatus]) -> list[tuple[bool, str]]:
        """Return for each process that has changed whether it is silent now, and a line about it."""
        found = []
        silent = {row.process.name for row in rows if row.is_silent}
        for row in rows:
            name, host = row.process.name, row.process.report.host
            if name in silent and name not in self._silent:
                found.append((True, f"{name} (host {host}) has said nothing for {row.age_seconds:.0f} s"))
            elif name in self._silent and name not in silent and not row.process.report.is_last:
                found.append((False, f"{name} (host {host}) is heard again"))
        self._silent = silent
        return found


class TopLines:
    """Lines about a job for a log: one every now and then, and one at once when a process falls silent."""

    def __init__(self) -> None:
        self._due = 0.0
        self._silence = SilenceTracker()

    def take(self, rows: Sequence[ProcessStatus], now: float) -> list[str]:
        """Return the lines that are due; ``now`` is on any clock."""
        lines = [text for _, text in self._silence.take(rows)]
        if now >= self._due and any(row.process.history for row in rows):  # before that there are no rates
            self._due = now + LINE_SECONDS
            lines.append(summarize(rows))
        return lines


def summarize(rows: Sequence[ProcessStatus]) -> str:
    """Return the state of a job in a line."""
    ranks = [row for row in rows if row.process.report.kind == "rank"]
    if not ranks:
        return f"{len(rows)} servers"
    ahead = max(ranks, key=lambda row: row.process.steps)
    rate, s = ahead.process.rate("reigen_steps_total"), "s" * (len(ranks) != 1)
    parts = [f"step {ahead.process.steps:.0f} ({rate:.1f}/s)", f"{len(ranks)} rank{s}"]
    if samples := sum(row.process.rate("reigen_samples_total") for row in ranks):
        parts.append(f"{samples:.0f} samples/s")
    shares = [sum(row.process.shares()[place] for row in ranks) / len(ranks) for place in range(3)]
    parts.append("compute {:.0%}, transfer {:.0%}, wait {:.0%}".format(*shares))
    parts += [f"the others wait for {r.process.name} (host {r.process.report.host})" for r in ranks if r.is_waited_for]
    if ahead.eta_seconds is not None:
        parts.append(f"{format_seconds(ahead.eta_seconds)} left")
    return "; ".join(parts)
