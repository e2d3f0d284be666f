"""Versioned JSON files that the planner reads: one table each, of a kind that one entry tells."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reigen.errors import ArgumentError

_KINDS: dict[type, str] = {list: "list", dict: "table"}


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """Kind of file.

    Attributes:
        name: in errors.
        version: that this program reads.
        entry, kind: what each such file has, and of which type that is.
        remedy: how to come by another one.
    """

    name: str
    version: int
    entry: str
    kind: type[list[Any] | dict[str, Any]]
    remedy: str

    def read(self, path: str | Path) -> Any:
        """Return the content of a file, which `check` has still to look at.

        Raises:
            ArgumentError: it is no JSON.
            OSError: it cannot be read.
        """
        try:
            return json.loads(Path(path).read_text())
        except ValueError as error:
            raise ArgumentError(f"{path} is no {self.name}: it is no JSON ({error}); {self.remedy}") from None

    def check(self, content: Any, path: str) -> dict[str, Any]:
        """Return the table that a file of this kind and version consists of.

        Raises:
            ArgumentError: it is of another kind or version.
        """
        if not isinstance(content, dict) or not isinstance(content.get(self.entry), self.kind):
            raise ArgumentError(f"{path} is no {self.name}: there is no {_KINDS[self.kind]} {self.entry!r} in it")
        if content.get("version") != self.version:
            raise ArgumentError(
                f"{path} is of version {content.get('version')!r}, this program reads version {self.version}: "
                f"{self.remedy}"
            )
        return content
