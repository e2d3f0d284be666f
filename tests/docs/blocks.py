"""Code blocks of the documentation, as they stand in its pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tools.docs.__main__ import ROOT

PAGES_ELSEWHERE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
#: Stands in a page, in the line before a block that no test runs.
_NOT_RUN = re.compile(r"<!-- not run: ((?:(?!-->).)+?) -->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: str
    language: str
    text: str
    #: its number among the page's blocks of its languages, and the line of its first line
    number: int
    line: int
    #: why no test runs it, in the words of the page
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]!r}"


@cache
def written_pages() -> dict[str, str]:
    """Return the pages of docs/, the root and examples/ by their path in the repository."""
    found = {f"docs/{path.relative_to(ROOT / 'docs')}": path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    return found | {name: (ROOT / name).read_text() for name in PAGES_ELSEWHERE}


@cache
def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages, in the pages' order."""
    return [block for page in written_pages() if page != "CHANGELOG.md" for block in blocks_of(page, *languages)]


def blocks_of(page: str, *languages: str) -> Iterator[Block]:
    """Yield the blocks of a page in these languages."""
    markdown, number = written_pages()[page], 0
    for match in FENCE.finditer(markdown):
        if match[2] in languages:
            reason = _NOT_RUN.search(markdown, 0, match.start())
            text = re.sub(rf"(?m)^{match[1]}", "", match[3])
            line = markdown.count("\n", 0, match.start(3)) + 1
            yield Block(page, match[2], text, number, line, reason[1] if reason else None)
            number += 1


def parse(block: Block) -> ast.Module:
    """Return a block as a program; three dots stand for what is left out, also alone in a session's line."""
    text = block.text
    if text.lstrip().startswith(">>>"):
        lines = [line[4:] for line in text.splitlines() if line.startswith((">>> ", "... "))]
        text = "\n".join(lines)
    return ast.parse(text)
