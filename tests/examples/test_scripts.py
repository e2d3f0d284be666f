"""What all example scripts have in common."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import faults
from tests.examples.running import ROOT, assert_help

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "mxnet")
FILES = [path for name in FRAMEWORKS for path in (ROOT / "examples" / name).glob("*.py")]
SCRIPTS = [path for path in FILES if "__main__" in path.read_text()]


README = (ROOT / "examples" / "README.md").read_text()
#: Keras's backends, and what *seen on* calls them.
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}


def short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def sections() -> dict[str, str]:
    """The sections of examples/README.md about a framework."""
    found = re.split(r"(?m)^## ", README)
    return {name: text for text in found for name in FRAMEWORKS if f"`examples/{name}`" in text.partition("\n")[0]}


def rows(section: str) -> list[list[str]]:
    """The cells of each row of a table: task, command, time, memory, result, and with what it was seen."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """A framework, a command of its table as a user types it, and the row."""
    for name, section in sections().items():
        for row in rows(section):
            [command] = re.findall(r"`([^`]+)`", row[1].removesuffix(" without `reigen run`"))
            yield name, f"reigen run {command}" if command.startswith("-") else command, row


def options_of(script: Path) -> set[str]:
    """Those that the script adds to its parser, or a module beside it that it imports."""
    texts = [script.read_text()]
    beside = [script.with_name(f"{name}.py") for name in re.findall(r"(?m)^(?:from|import) (\w+)", texts[0])]
    texts += [path.read_text() for path in beside if path.is_file()]
    return {"--help", *(name for text in texts for name in re.findall(r"add(?:_argument)?\(\s*\"(--[\w-]+)\"", text))}


def unknown_options(directory: str, command: str) -> list[str]:
    """Options in a command that its script does not have; all words, if there is no such script."""
    words = shlex.split(command)
    [place] = [place for place, word in enumerate(words) if word.endswith((".py", ".ipynb"))]
    script = ROOT / "examples" / directory / words[place]
    if not script.is_file():
        return words
    return [word for word in words[place + 1 :] if word.startswith("-") and word not in options_of(script)]


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
    found = [row for row in rows(sections()[path.parent.name]) if f"python {path.name}" in row[1]]
    assert found
    for row in found:
        assert len(row) == 6
        assert all(row), row


def test_commands_of_the_tables_have_scripts_and_options_that_exist() -> None:
    assert unknown_options("torch", "-np 2 python digits.py --no-such --help") == ["--no-such"]
    assert unknown_options("torch", "python no.py") == ["python", "no.py"]
    found = list(commands())
    assert len(found) >= len(SCRIPTS)
    for name, command, _ in found:
        assert unknown_options(name, command) == [], command
        if "jupyter execute" not in command:
            assert list(faults(command)) == [], command


def test_options_of_scripts_in_the_text_exist() -> None:
    found = re.findall(r"`(\w+\.py --[^`]+)`", README)
    assert found
    for command in found:
        assert any(unknown_options(name, command) == [] for name in FRAMEWORKS), command


def test_commands_for_keras_choose_the_backend_on_which_they_were_seen() -> None:
    """And none stands in the table twice."""
    found = [(command, row) for name, command, row in commands() if name == "keras"]
    assert len({command for command, _ in found}) == len(found)
    for command, row in found:
        chosen = re.match(r"KERAS_BACKEND=(\w+) ", command)
        backend = chosen[1] if chosen else "tensorflow"
        assert [each for each, title in BACKENDS.items() if title in row[5]] == [backend], row


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
