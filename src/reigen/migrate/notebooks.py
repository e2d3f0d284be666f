"""Notebooks: the code of all cells as one text, and edits of that text in the cells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from reigen.errors import ConfigError
from reigen.migrate.text_files import Edit, Lines, apply_edits

_SHELL_CELLS = re.compile(r"%%(bash|sh|script)\b")
_PYTHON_CELLS = re.compile(r"%%(time|timeit|capture|prun|writefile\s+\S+\.py\b)")
_MAGIC = re.compile(r"\s*[%!?]|\s*[\w, .]+=\s*[!%]|.*\?\s*$")


@dataclass(frozen=True, slots=True)
class _Cell:
    """Code cell: its number in the notebook, from 1, its source, and its offset in the text of all."""

    number: int
    source: str
    start: int


class NotebookText:
    """Notebook of Jupyter's.

    Args:
        text: of the file.

    Attributes:
        python: code of all cells, with a blank in the place of magics.
        commands: the same text with nothing but the lines that a shell gets.

    Raises:
        ConfigError: it is no notebook.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._cells: list[_Cell] = []
        parts = []
        position = 0
        for number, cell in enumerate(_load_cells(text), 1):
            if cell.get("cell_type") == "code":
                source = "".join(cell.get("source", ""))
                self._cells.append(_Cell(number, source, position))
                parts.append(_split_magics(source))
                position += len(source) + 1
        self.python = "\n".join(python for python, _ in parts)
        self.commands = "\n".join(commands for _, commands in parts)

    def place(self, line: int) -> tuple[int, int]:
        """Return the number of a cell, and the line in it, of a line of the text of all."""
        start = Lines(self.python).starts[line - 1]
        cell = next(each for each in reversed(self._cells) if each.start <= start)
        return cell.number, cell.source[: start - cell.start].count("\n") + 1

    def edit(self, edits: Iterable[Edit]) -> str:
        """Return the file's text with edits of the text of all cells.

        Raises:
            ConfigError: the file is not formatted as Jupyter does it, and would be changed all over.
        """
        document = json.loads(self._text)
        formatting = _formatting(self._text, document)
        if formatting is None:
            raise ConfigError("not formatted as Jupyter saves notebooks: open and save it there first")
        edits = list(edits)
        for cell in self._cells:
            end = cell.start + len(cell.source)
            mine = [each for each in edits if cell.start <= each.start and each.end <= end]
            if mine:
                shifted = (Edit(each.start - cell.start, each.end - cell.start, each.new) for each in mine)
                source = apply_edits(cell.source, shifted)
                in_lines = isinstance(document["cells"][cell.number - 1]["source"], list)
                document["cells"][cell.number - 1]["source"] = _split_lines(source) if in_lines else source
        return _dump(document, *formatting)


def _load_cells(text: str) -> list[dict[str, Any]]:
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no notebook: {error}") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ConfigError("no notebook of version 4: it has no list of cells")
    for cell in cells:
        source = cell.get("source", "")
        lines = source if isinstance(source, list) else [source]
        if not all(isinstance(line, str) for line in lines):
            raise ConfigError("no notebook: the source of a cell is no text")
    return cells


def _split_lines(source: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", source)


def _split_magics(source: str) -> tuple[str, str]:
    """Split a cell into Python and lines for a shell: texts of the same length, with blanks for each other."""
    lines = _split_lines(source)
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%"):
        if _SHELL_CELLS.match(first):
            return _blank(source), source.replace(first, _blank(first), 1)
        if not _PYTHON_CELLS.match(first):
            return _blank(source), _blank(source)
    python, commands = "", ""
    goes_on = False
    for line in lines:
        is_magic = goes_on or (_MAGIC.match(line) is not None and not line.lstrip().startswith("#"))
        goes_on = is_magic and line.rstrip().endswith("\\")
        indentation = line[: len(line) - len(line.lstrip())]
        body = line.rstrip("\n")[len(indentation) :]
        statement = indentation + "0".ljust(len(body)) + line[len(indentation) + len(body) :] if body else line
        python += statement if is_magic else line
        commands += re.sub(r"[!%]", " ", line, count=1) if is_magic else _blank(line)
    return python, commands


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _formatting(text: str, document: object) -> tuple[int, bool, str] | None:
    """Return how a notebook was written: indentation, whether in ASCII alone, and its end; None: in another way."""
    end = text[len(text.rstrip()) :]
    for indent in (1, 2, 4):
        for is_ascii in (False, True):
            if _dump(document, indent, is_ascii, end) == text:
                return indent, is_ascii, end
    return None


def _dump(document: object, indent: int, is_ascii: bool, end: str) -> str:
    return json.dumps(document, indent=indent, ensure_ascii=is_ascii) + end
