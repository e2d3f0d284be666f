"""Findings about lines of a project: it works as it is, is to be changed, or cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reigen.migrate.text_files import Edit

Status = Literal["works", "change", "cannot"]


@dataclass(frozen=True, slots=True)
class LineFinding:
    """Finding about one line.

    Attributes:
        line: of the file, from 1; in a notebook, of all its cells' lines until `NotebookText.place` names the cell.
        status: ``change``: by ``edits``, or by hand where there are none.
        subject: the name, option or line that it is about.
        message: what happens, and what to do.
        edits: of the file's text. Those of one file are made all or none.
        blocks: the file cannot be changed automatically because of it: edits of torch.distributed would be too few.
        of_conversion: it is about the changed file alone: a line that comes, or what will differ.
    """

    line: int
    status: Status
    subject: str
    message: str
    edits: tuple[Edit, ...] = ()
    blocks: bool = False
    of_conversion: bool = False
