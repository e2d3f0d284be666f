"""Writes all pages of the documentation site: ``python -m tools.docs [DIRECTORY]``, by default build/pages.

They are those of docs/ with links that lead out of it changed, those that are made of the code, and those that show
files of the repository. What is written is plain Markdown, so that any generator can make the site of it. Pictures of
benchmarks are drawn from docs/data.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tools.docs import charts, code_pages, links

ROOT = Path(__file__).parents[2]
#: The repository's pages, and what is written beside them.
DOCS = ROOT / "docs"


def read_pages() -> dict[str, str]:
    """Return the text of every page by its path in the site, links as they are written in the repository."""
    written = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    pages = written | code_pages.make_pages()
    return pages | links.make_source_pages(ROOT, pages)


def let_names_break(markdown: str) -> str:
    """Return a page whose long names in the first column of a table may be broken behind their underscores."""
    return re.sub(r"(?m)^\| ([a-z_]{12,}) \|", lambda name: f"| {name[1].replace('_', '_<wbr>')} |", markdown)


def write_pages(directory: Path) -> None:
    """Write the pages, and the pictures and style sheets of docs/."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(DOCS, directory, ignore=shutil.ignore_patterns("*.md"))
    charts.draw_all(charts.DATA, directory / charts.PICTURES.relative_to(DOCS))
    for name, text in read_pages().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shown = links.inline_drawings(directory, name, links.lead_to_source_pages(ROOT, name, let_names_break(text)))
        (directory / name).write_text(shown, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "pages")
