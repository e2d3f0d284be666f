"""What all example scripts have in common."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.examples.running import ROOT, assert_help

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
    arguments = [argument for each in functions for argument in ast.walk(each.args) if isinstance(argument, ast.arg)]
    assert {each.arg for each in arguments if each.annotation is None} <= {"self"}


@pytest.mark.parametrize("path", sorted(SCRIPTS), ids=short)
def test_scripts_say_how_long_they_take(path: Path) -> None:
    """Those that run in tests have to print it, too (`tests.examples.running`)."""
    assert any(each in path.read_text() for each in ("Progress(", "ETA"))


@pytest.mark.parametrize("path", sorted(SCRIPTS), ids=short)
def test_the_table_says_what_scripts_take_and_give(path: Path) -> None:
    """Task, command, time, memory, result, and with what it was seen."""
    sections = (ROOT / "examples" / "README.md").read_text().split("\n## ")
    [section] = [each for each in sections if f"`examples/{path.parent.name}`" in each.splitlines()[0]]
    rows = [line for line in section.splitlines() if line.startswith("|") and f"python {path.name}" in line]
    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6
        assert all(cells), row


@pytest.mark.parametrize("path", sorted(each for each in SCRIPTS if each.parent.name == "jax"), ids=short)
def test_scripts_for_jax_compute_on_processors(path: Path) -> None:
    """Within ``jax.jit``, collectives are for these only."""
    assert '\n    jax.config.update("jax_platforms", "cpu")' in path.read_text()


@pytest.mark.parametrize("path", sorted(each for each in SCRIPTS if '"cuda"' in each.read_text()), ids=short)
def test_each_rank_has_a_gpu_of_its_own(path: Path) -> None:
    """Also where a rank sees one alone: --gpus-per-rank 1."""
    assert "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())" in path.read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", sorted({*FRAMEWORKS} - {"mxnet"}))
def test_help_says_what_each_option_is(framework: str) -> None:
    """Of all scripts whose libraries are here; MXNet's are in tests/mxnet."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    assert_help([path for path in sorted(SCRIPTS) if path.parent.name == framework])
