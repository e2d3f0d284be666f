"""What all example scripts have in common."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.examples.running import ROOT

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "mxnet")
FILES = [path for name in FRAMEWORKS for path in (ROOT / "examples" / name).glob("*.py")]
SCRIPTS = [path for path in FILES if "__main__" in path.read_text()]


def short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", sorted(FILES), ids=short)
def test_files_are_short_and_typed(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150
    functions = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.FunctionDef)]
    assert [each.name for each in functions if each.returns is None] == []


@pytest.mark.parametrize("path", sorted(SCRIPTS), ids=short)
def test_scripts_have_help_and_say_how_long_they_take(path: Path) -> None:
    """Keras shows it where a script lets it."""
    text = path.read_text()
    assert "argparse.ArgumentParser(" in text or "make_parser(" in text
    assert any(each in text for each in ("Progress(", "ETA", "verbose=2 if"))
