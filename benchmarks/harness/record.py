"""Tables of figures as data: what benchmarks write, other than times of alternating modes, and pages show."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.harness.machine import Machine
from reigen import __version__
from reigen.files import write_atomically


class Quantity(msgspec.Struct, frozen=True, omit_defaults=True):
    """A figure, in its column's unit.

    Attributes:
        value: what was measured, or computed of that.
        digits: how many decimals are shown.
        low: the smallest of several, shown after the value; None: not shown.
        high: the largest.
        note: words after it.
        unit: its own, where the column has none; shown after it.
    """

    value: float
    digits: int = 2
    low: float | None = None
    high: float | None = None
    note: str = ""
    unit: str = ""

    def __str__(self) -> str:
        """Return the cell of a table.

        Example:
            >>> print(Quantity(1.0725, 2, 1.06, 1.08, note="at most"))
            1.07 (1.06 to 1.08) at most
            >>> print(Quantity(898, 0, unit="ms"))
            898 ms
        """
        text = f"{self.value:,.{self.digits}f}"
        if self.low is not None and self.high is not None:
            text += f" ({self.low:.{self.digits}f} to {self.high:.{self.digits}f})"
        return " ".join(part for part in (text, self.unit, self.note) if part)


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column: its name, and the unit of its figures; empty: none, or each figure has its own."""

    name: str
    unit: str = ""

    @property
    def heading(self) -> str:
        """The name and the unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


class Line(msgspec.Struct, frozen=True):
    """What one line shows: a title, and its cells by the names of columns; one that is missing is empty."""

    title: str
    cells: dict[str, Quantity | str]


class Record(msgspec.Struct, frozen=True):
    """A table.

    Attributes:
        command: what was run; empty if there were several, which the conditions name, or none.
        created: when, in ISO 8601; empty where that is not known.
        conditions: the machine, its load, how often.
        is_manual: the figures were not printed by a command.
        title: heading of the lines' titles.
        columns: the others.
        lines: in the order of the table.
    """

    command: str
    created: str
    conditions: str
    is_manual: bool
    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    def cells(self) -> list[list[str]]:
        """Return headings and lines, as text."""
        names = [column.name for column in self.columns]
        lines = [[line.title, *(str(line.cells.get(name, "")) for name in names)] for line in self.lines]
        return [[self.title, *(column.heading for column in self.columns)], *lines]

    def origin(self) -> str:
        """Return where the figures are from, as a line of the page."""
        parts = [f"`{self.command}`" if self.command else "", self.created[:10]]
        start = ", ".join(part for part in parts if part)
        if self.is_manual:
            start = f"{start}, measured manually" if start else "Measured manually"
        return f"{start}: {self.conditions}." if start else f"{self.conditions}."

    def save(self, path: Path) -> None:
        """Write it as JSON; see `reigen.files.write_atomically`."""
        write_atomically(path, [msgspec.json.format(msgspec.json.encode(self), indent=2), b"\n"])


def make_record(
    command: str,
    conditions: str,
    title: str,
    columns: Sequence[Column],
    lines: Mapping[str, Mapping[str, Quantity | str]] | Sequence[Line],
    machine: Machine,
    versions: Mapping[str, str] | None = None,
) -> Record:
    """Return what a benchmark has measured now.

    Args:
        command: what was run.
        conditions: number of ranks, rounds, and the like.
        title: heading of the first column.
        columns: the others.
        lines: their cells by title and by name of the column; or the lines, where titles repeat.
        machine: as it was before.
        versions: of what is measured, other than Reigen and Python.
    """
    known = {"reigen": __version__, "python": sys.version.split()[0], **(versions or {})}
    text = f"{conditions}; {machine.cpu}, {machine.num_cores} cores, load before the run {machine.load:.1f}; "
    text += ", ".join(f"{name} {version}" for name, version in known.items())
    if isinstance(lines, Mapping):
        lines = [Line(name, dict(cells)) for name, cells in lines.items()]
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(command, created, text, False, title, tuple(columns), tuple(lines))
