"""Tables on a terminal, and as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[int] = ()) -> None:
    """Print a table with a heading for each column, or none; ``bad`` are the indices of rows with a problem."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        print("\n".join(format_columns([headings, *rows] if headings else rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, header_style="bold", show_header=bool(headings))
    for number, row in enumerate(rows):
        table.add_row(*(Text(text) for text in row), style="bold red" if number in bad else "")
    Console().print(table)


def format_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the columns below each other."""
    widths = [max(len(text) for text in column) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
