"""Shell commands of the documentation, in words, and what is wrong with one: nothing is run."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

from reigen.cli.main import COMMANDS
from reigen.config import format_unknown_variables
from tests.docs.blocks import Block
from tools.docs.__main__ import ROOT

#: Programs of others, whose arguments nobody looks at; of starters, what they start.
_OTHERS = {"cd", "kill", "kubectl", "openssl", "sh", "ssh", "spark-submit", ".", "venv-pack"}
_STARTERS = {"mpirun", "salloc", "srun", "torchrun"}
_VARIABLE = re.compile(r"\b(?:REIGEN|HOROVOD)_[A-Z0-9_]*[A-Z0-9]\b")


class _ParsedError(BaseException):
    """Ends a command when its arguments are parsed."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen


def command_lines(block: Block) -> Iterator[str]:
    """Yield the commands of a block of shell commands, or those behind a prompt, without comments."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    for line in text.splitlines():
        is_command = block.language in {"bash", "sh"} or line.startswith("$ ")
        if is_command and (found := re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip()):
            yield found


def simple_commands(line: str) -> list[list[str]]:
    """Split a line at the shell's operators; three dots stand for what is left out, and brackets for what may be.

    Raises:
        ValueError: a quotation has no end.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if re.fullmatch(r"[|;&()<>]+", word):
            found.append([])
        elif word != "...":
            found[-1].append(re.sub(r"^\[(?=-)|(?<=.)\]$", "", word) if "[-" in line else word)
    return [words for words in found if words]


def faults(line: str) -> Iterator[str]:
    """Yield what is wrong with a line: options, programs, targets, files and variables that there are not."""
    try:
        commands = simple_commands(line)
    except ValueError as error:
        yield str(error)
        return
    for words in commands:
        yield from _faults_of(words)


def unknown_variables(text: str) -> list[str]:
    """Return the variables of Reigen's and Horovod's in a text that no part of Reigen knows."""
    return format_unknown_variables(dict.fromkeys(_VARIABLE.findall(text), "1"))


def _faults_of(words: Sequence[str]) -> Iterator[str]:
    words = list(words)
    while words and (words[0] in {"exec", "export"} or re.match(r"\w+=", words[0])):
        words.pop(0)
    if not words:
        return
    program, rest = words[0].rpartition("/")[2], words[1:]
    if program in _STARTERS:
        inner = next(
            (place for place, word in enumerate(rest) if re.search(r"(^|/)(reigen|python[\d.]*)$", word)), None
        )
        yield from _faults_of(rest[inner:]) if inner is not None else ()
    elif re.fullmatch(r"python(3(\.\d+)?)?", program):
        yield from _faults_of_python(rest)
    elif program in _CHECKS:
        yield from _CHECKS[program](rest)
    elif program not in _OTHERS:
        yield f"no such program: {program}"


def _faults_of_python(words: list[str]) -> Iterator[str]:
    if words[:2] == ["-m", "reigen"]:
        yield from _faults_of_reigen(words[2:])
    elif words[:1] == ["-m"] and words[1].partition(".")[0] in {"reigen", "benchmarks", "tests", "tools"}:
        place = (ROOT / "src" if words[1].startswith("reigen") else ROOT) / words[1].replace(".", "/")
        if not (place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()):
            yield f"no such module: {words[1]}"
    elif "/" in "".join(words[:1]) and not (ROOT / words[0]).is_file():
        yield f"no such file: {words[0]}"


def _faults_of_reigen(words: list[str]) -> Iterator[str]:
    if not words or words[0] not in COMMANDS:
        yield f"no such command: reigen {' '.join(words[:1])}"
        return
    try:
        chosen = parse(words[0], words[1:])
    except ValueError as error:
        yield str(error)
        return
    if words[0] in {"run", "launch"} and "--check-build" not in words:
        if not chosen.command:
            yield f"reigen {' '.join(words)}: no command"
        yield from _faults_of_python(chosen.command[1:]) if chosen.command[:1] == ["python"] else ()


def parse(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Return what a command makes of its arguments, as it parses them itself; it ends there.

    Raises:
        ValueError: what it says to the user instead.
    """
    parse_args, parse_known_args = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    depth = 0  # parse_args calls parse_known_args, and that of a subcommand's parser

    def stopping(method: Callable[..., Any], chosen: Callable[[Any], argparse.Namespace]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = method(*arguments, **options)
            finally:
                depth -= 1
            if depth == 0:
                raise _ParsedError(chosen(result))
            return result

        return run

    module, said = import_module(f"reigen.cli.{command}"), io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stopping(parse_args, lambda result: result)),
        mock.patch.object(
            argparse.ArgumentParser, "parse_known_args", stopping(parse_known_args, lambda result: result[0])
        ),
        mock.patch.object(sys, "path", [*sys.path]),
        contextlib.redirect_stderr(said),
    ):
        try:
            module.main(list(words))
        except _ParsedError as parsed:
            return parsed.chosen
        except SystemExit:
            raise ValueError(said.getvalue().strip().rpartition("\n")[2]) from None
    raise ValueError(f"reigen {command} has parsed nothing")


@cache
def make_targets() -> frozenset[str]:
    """Return the targets of the Makefile that a user calls."""
    [names] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return frozenset(names.split())


def _faults_of_make(words: list[str]) -> Iterator[str]:
    yield from (f"no such target: {word}" for word in words if "=" not in word and word not in make_targets())


def _faults_of_pip(words: list[str]) -> Iterator[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for match in re.finditer(r"(?:^|\s)(?:\.|reigen)\[([\w,-]+)\]", " ".join(words)):
        yield from (f"no such extra: {name}" for name in match[1].split(",") if name not in extras)


_CHECKS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "reigen": _faults_of_reigen,
    "horovodrun": lambda words: _faults_of_reigen(["run", "--as-horovod", *words]),
    "make": _faults_of_make,
    "pip": _faults_of_pip,
}
