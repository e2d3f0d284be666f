"""Griffe extension: docstrings that are in the code, but not where Griffe looks for them.

The reference is read of the source, and imports no framework. The collectives of a framework are made of a table when
its package is imported: their signatures are read of their stubs (``tools/make_stubs.py``), and their docstrings come
from the table. Values have comments that begin with ``#:``. Classes that a framework's own class and our logic make up
have the docstring of the logic.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import griffe

from reigen.api.functions import list_functions
from reigen.migrate.public_names import place_of_definition
from tools.docs.code_pages import MODULES, names_of, to_markdown
from tools.make_stubs import STUBS


@cache
def table_docstrings() -> dict[str, str]:
    """Return the docstring of each function that has a stub, by its full name."""
    found = {}
    for file, (dialect, _) in STUBS.items():
        module = "reigen." + file.removesuffix(".pyi").replace("/", ".")
        found |= {f"{module}.{spec.name}": spec.doc for spec in list_functions(dialect)}
    return found


class TableDocstrings(griffe.Extension):
    """Gives public names the docstrings that they have when they are imported, as Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Turn the marks of reStructuredText in a docstring into Markdown's."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Look for them when all of the package was read, and its stubs were merged."""
        if pkg.path != "reigen":
            return
        for path, text in table_docstrings().items():
            function = pkg[path.removeprefix("reigen.")]
            function.docstring = griffe.Docstring(to_markdown(text), parent=function, parser="google")
        for module in MODULES:
            for name in names_of(module):
                _complete(pkg, module, name)


def _complete(package: griffe.Module, module: str, name: str) -> None:
    """Give a name of a module its definition and a docstring, where they are missing."""
    owner = package if module == "reigen" else package[module.removeprefix("reigen.")]
    place = place_of_definition(module, name)
    if name not in owner.members and place is not None:
        owner.set_member(name, griffe.Alias(name, ".".join(place), parent=owner))
    try:
        member = owner.members[name]
        found = member.final_target if member.is_alias else member
    except (KeyError, griffe.AliasResolutionError):
        return  # no function, and no class: `tools.docs.code_pages` has a line for it
    if found.has_docstring:
        return
    text = ""
    if isinstance(found, griffe.Attribute):
        text = " ".join(_comment_above(found))
    elif isinstance(found, griffe.Class):
        bases = (base for base in found.resolved_bases if base.has_docstring and base.path.startswith("reigen."))
        text = next((base.docstring.value for base in bases if base.docstring), "")
    if text:
        found.docstring = griffe.Docstring(to_markdown(text), parent=found, parser="google")


def _comment_above(attribute: griffe.Attribute) -> Iterator[str]:
    """Yield the lines of the comment above a value that is meant for its readers."""
    lines = attribute.module.source.splitlines()
    number = (attribute.lineno or 1) - 1
    first = number
    while first and lines[first - 1].startswith("#:"):
        first -= 1
    yield from (line.removeprefix("#:").strip() for line in lines[first:number])
