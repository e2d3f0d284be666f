"""Links of the documentation: where they lead, and pages that show files of the repository outside docs/."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

#: The target of a link or a picture: ](target) or ](target "title").
_LINK = re.compile(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
_FENCE = re.compile(r"^( {0,3})(```+|~~~+).*?^\1?\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
#: Files that are pages of the site by names of their own.
PROJECT_PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}


def find_links(markdown: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures, those in code left out."""
    text = _CODE.sub("", _FENCE.sub("", markdown))
    yield from (match[2] for match in _LINK.finditer(text))


def page_of(path: str) -> str:
    """Return the page of the site that shows a file of the repository, or a directory."""
    return PROJECT_PAGES.get(path, f"source/{path}.md")


def repository_path(page: str, target: str) -> str | None:
    """Return the path in the repository to which a page's link leads; None: it stays in docs/, or leads to the web.

    Args:
        page: the page's path in docs/.
        target: the link's target.
    """
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    found = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    return None if found.startswith("docs/") else found


def make_source_pages(root: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the pages that show files outside docs/: those of the project, and all to which a page has a link.

    Args:
        root: the repository.
        texts: the other pages' text by their path in docs/.
    """
    pages = {page: _project_page(root, name) for name, page in PROJECT_PAGES.items()}
    waiting = [(page, text) for page, text in texts.items()] + [*pages.items()]
    while waiting:
        page, text = waiting.pop()
        for target in find_links(text):
            path = repository_path(page, target)
            if path is None or page_of(path) in pages or not (root / path).exists():
                continue  # one that leads nowhere is for the strict build, and for the tests, to say
            shown = _show(root, path)
            pages[page_of(path)] = shown
            waiting.append((page_of(path), shown))
    return pages


def inline_drawings(directory: Path, page: str, markdown: str) -> str:
    """Return a page's text with its drawings in it: only what is part of a page can have its colour.

    Drawings are the pictures in SVG whose class says so; in the repository they follow the reader's colour scheme.

    Args:
        directory: the pages, and beside them their pictures.
        page: the page's path there.
        markdown: its text.
    """

    def inlined(match: re.Match[str]) -> str:
        path = directory / posixpath.dirname(page) / match[1]
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not text.startswith('<svg class="drawing'):
            return match[0]
        return f'<figure class="drawing">\n{text.rstrip()}\n</figure>'

    return re.sub(r"(?m)^!\[[^\]]*\]\(([^)\s]+\.svg)\)$", inlined, markdown)


def lead_to_source_pages(root: Path, page: str, markdown: str) -> str:
    """Return a page's text with its links out of docs/ leading to the pages that show these files."""

    def led(match: re.Match[str]) -> str:
        path = repository_path(page, match[2])
        if path is None or not (root / path).exists():
            return match[0]
        _, mark, anchor = match[2].partition("#")
        relative = posixpath.relpath(page_of(path), posixpath.dirname(page) or ".")
        return f"{match[1]}{relative}{mark}{anchor}{match[3]}"

    return _LINK.sub(led, markdown)


def _project_page(root: Path, name: str) -> str:
    """Return a page of the repository's root as it would be written in docs/project/."""
    text = (root / name).read_text(encoding="utf-8")

    def moved(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", match[2]):
            return match[0]
        return f"{match[1]}../../{match[2]}{match[3]}"

    text = _LINK.sub(moved, text)
    return text.replace("](../../docs/", "](../")


def _show(root: Path, path: str) -> str:
    """Return a page that shows a file, or lists a directory."""
    file = root / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if not each.name.startswith(("__", ".")))
        up = "../" * (1 + path.count("/") + 1)
        return "\n".join([f"# `{path}/`", "", *(f"- [`{name}`]({up}{path}/{name})" for name in names), ""])
    text = file.read_text(encoding="utf-8")
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * max(3, longest + 1)
    return f"# `{path}`\n\n{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
