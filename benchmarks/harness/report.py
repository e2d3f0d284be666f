"""What a benchmark found: as JSON, as tables, and beside the project's budgets."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness.figures import Footprint, Overhead, Ratio, Summary, ratio
from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.memory import Staging
from benchmarks.harness.sizes import format_size
from reigen import __version__
from reigen.files import write_atomically


class Row(msgspec.Struct, frozen=True):
    """One thing that several modes did in the same rounds.

    Attributes:
        title: what.
        nbytes: of data on each rank; 0 where that says nothing.
        modes: what each took.
        baseline: the mode that the others are compared with.
        failures: modes that failed, and why.
    """

    title: str
    nbytes: int
    modes: dict[str, Summary]
    baseline: str
    failures: dict[str, str] = {}

    @property
    def ratios(self) -> dict[str, Ratio]:
        """How many times as long as the baseline each other mode took; empty if the baseline failed."""
        base = self.modes.get(self.baseline)
        if base is None:
            return {}
        return {name: ratio(mode, base) for name, mode in self.modes.items() if name != self.baseline}


class Verdict(msgspec.Struct, frozen=True):
    """A figure beside its budget.

    Attributes:
        claim: what is compared, and the budget, in words.
        value: what was measured; None: it was not, or would mean nothing.
        budget: the limit.
        at_least: whether the value must be at least, or at most, the budget.
        note: unit, or why there is no value.
    """

    claim: str
    value: float | None
    budget: float
    at_least: bool
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the budget is kept; None without a value."""
        if self.value is None:
            return None
        return self.value >= self.budget if self.at_least else self.value <= self.budget


class Document(msgspec.Struct):
    """Everything a run found.

    Attributes:
        command: what was run.
        num_ranks: how many processes each mode had.
        rounds: how many turns each mode had.
        skipped: modes that were left out, and why.
        notes: lines for the reader.
        memory: what the staging of fused tensors costs.
        footprints: what training needs in memory.
    """

    command: str
    num_ranks: int
    rounds: int
    created: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: Machine = msgspec.field(default_factory=this_machine)
    versions: dict[str, str] = msgspec.field(
        default_factory=lambda: {"reigen": __version__, "python": sys.version.split()[0]}
    )
    skipped: list[str] = []
    rows: list[Row] = []
    overheads: dict[str, dict[str, Overhead]] = {}
    verdicts: list[Verdict] = []
    notes: list[str] = []
    memory: list[Staging] = []
    footprints: list[Footprint] = []

    def has_failed(self, prefix: str) -> bool:
        """Whether a mode, or all modes of a crew, whose name begins so, did not come to an end."""
        names = [name for row in self.rows for name in row.failures]
        return any(name.startswith(prefix) for name in [*names, *self.skipped])

    def save(self, path: Path) -> None:
        """Write everything as JSON, the ratios too; see `reigen.files.write_atomically`."""
        content = msgspec.to_builtins(self)
        for row, written in zip(self.rows, content["rows"], strict=True):
            written["ratios"] = msgspec.to_builtins(row.ratios)
        for verdict, written in zip(self.verdicts, content["verdicts"], strict=True):
            written["is_met"] = verdict.is_met
        write_atomically(path, [msgspec.json.format(msgspec.json.encode(content), indent=2), b"\n"])


def format_seconds(seconds: float) -> str:
    """Three digits and a unit.

    Example:
        >>> format_seconds(0.0123), format_seconds(4.56e-6)
        ('12.3 ms', '4.56 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 1 or unit == "us":
            value = seconds * scale
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit takes everything")


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """One line a mode: median, spread, and how many times as long as the baseline."""
    table = Table(title=title, title_justify="left")
    for heading in ("what", "mode"):
        table.add_column(heading)
    for heading in ("median", "p10 - p90", "to baseline", "by round"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratios = row.ratios
        what = row.title
        for name, summary in row.modes.items():
            quotient = ratios.get(name)
            shown = ("baseline" if name == row.baseline else "", "")
            if quotient is not None:
                shown = (f"{quotient.value:.3g} x", f"{quotient.low:.3g} - {quotient.high:.3g}")
            spread = f"{format_seconds(summary.p10)} - {format_seconds(summary.p90)}"
            table.add_row(what, name, format_seconds(summary.median), spread, *shown)
            what = ""
        for name, reason in row.failures.items():
            table.add_row(what, name, f"failed: {reason.partition(chr(10))[0]}", "", "", "")
            what = ""
        table.add_section()
    return table


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table for the documentation.

    Example:
        >>> print(markdown(["mode", "time"], [["reigen", "5 ms"]]))
        | mode | time |
        |---|---|
        | reigen | 5 ms |
    """
    shown = [f"| {' | '.join(line)} |" for line in (headings, *lines)]
    return "\n".join([shown[0], "|" + "---|" * len(headings), *shown[1:]])


def rows_markdown(rows: Sequence[Row]) -> str:
    """Medians for the documentation: a line for each mode, a column for each row."""
    lines = [
        [name, *(format_seconds(row.modes[name].median) if name in row.modes else "" for row in rows)]
        for name in dict.fromkeys(name for row in rows for name in row.modes)
    ]
    return markdown(["mode", *(row.title for row in rows)], lines)


def overheads_table(overheads: Mapping[str, Mapping[str, Overhead]]) -> Table:
    """What each mode's step took longer than one rank alone."""
    table = Table(title="step minus the step of one rank alone", title_justify="left")
    for heading in ("model", "mode"):
        table.add_column(heading)
    for heading in ("overhead", "rounds", "noise"):
        table.add_column(heading, justify="right")
    for model, modes in overheads.items():
        for name, found in modes.items():
            rounds = f"{format_seconds(min(found.rounds))} - {format_seconds(max(found.rounds))}"
            table.add_row(model, name, format_seconds(found.median), rounds, format_seconds(found.noise))
        table.add_section()
    return table


def memory_table(found: Sequence[Staging]) -> Table:
    """What a rank needs beyond its tensors while they are fused and reduced."""
    table = Table(title="memory beyond the tensors, of the rank that needs most", title_justify="left")
    for heading in ("fusion threshold", "dtypes", "tensors", "peak", "stays, its share", "segment"):
        table.add_column(heading, justify="right")
    for staging in found:
        sizes = (staging.tensors_bytes, staging.peak, staging.share, staging.segment)
        megabytes = [f"{nbytes / (1 << 20):.1f} MiB" for nbytes in sizes]
        table.add_row(format_size(staging.threshold_bytes), str(staging.num_dtypes), *megabytes)
    return table


def footprints_table(found: Sequence[Footprint]) -> Table:
    """What training needs in memory, of all ranks together."""
    table = Table(title="memory of all ranks together (PSS), beyond processes without a model", title_justify="left")
    for heading in ("what", "mode"):
        table.add_column(heading)
    for heading in ("ranks", "model", "all", "in sizes of the model"):
        table.add_column(heading, justify="right")
    for footprint in found:
        sizes = (footprint.parameter_bytes, footprint.all_bytes)
        megabytes = [f"{nbytes / (1 << 20):.0f} MiB" for nbytes in sizes]
        table.add_row(footprint.title, footprint.mode, str(footprint.num_ranks), *megabytes, f"{footprint.copies:.2f}")
    return table


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """Budgets, and whether they were kept in this run."""
    table = Table(title="budgets", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("budget", justify="right")
    table.add_column("kept")
    for verdict in verdicts:
        sign = ">=" if verdict.at_least else "<="
        measured = "-" if verdict.value is None else f"{verdict.value:.3g}"
        kept = {True: "yes", False: "[red]no[/red]", None: verdict.note or "not measured"}[verdict.is_met]
        unit = "" if verdict.value is None or not verdict.note else f" {verdict.note}"
        table.add_row(verdict.claim, f"{measured}{unit}", f"{sign} {verdict.budget:g}", kept)
    return table


def show(document: Document, title: str, console: Console) -> None:
    """Print everything."""
    versions = ", ".join(f"{name} {version}" for name, version in document.versions.items())
    console.print(str(document.machine), soft_wrap=True, highlight=False)
    console.print(f"{versions}; {document.num_ranks} ranks, {document.rounds} rounds", soft_wrap=True, highlight=False)
    for line in document.skipped:
        console.print(line, style="yellow", soft_wrap=True, highlight=False)
    if document.rows:
        console.print(rows_table(title, document.rows))
    if document.overheads:
        console.print(overheads_table(document.overheads))
    if document.memory:
        console.print(memory_table(document.memory))
    if document.footprints:
        console.print(footprints_table(document.footprints))
    for line in document.notes:
        console.print(line, soft_wrap=True, highlight=False)
    if document.verdicts:
        console.print(verdicts_table(document.verdicts))
