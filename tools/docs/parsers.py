"""The parser of each `reigen` command, as the command itself makes it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from unittest import mock

from reigen.cli.main import COMMANDS


class _MadeParser(BaseException):
    """Carries a parser out of the command that has made it, before it parses anything."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@cache
def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command, and of commands of commands: ``{"run": ..., "bench allreduce": ...}``.

    No command runs: each ends where it would parse its arguments.
    """
    found = {}
    for command in COMMANDS:
        parser = _make_parser(command)
        found[command] = parser
        for name, inner in _subparsers(parser):
            found[f"{command} {name}"] = inner
    return found


def actions_of(parser: argparse.ArgumentParser) -> list[tuple[str, list[argparse.Action]]]:
    """Return the arguments that `--help` shows, by the titles of their groups."""
    groups = []
    for group in parser._action_groups:
        shown = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
        shown = [each for each in shown if "--help" not in each.option_strings]
        if shown:
            groups.append((group.title or "options", shown))
    return groups


def _make_parser(command: str) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _MadeParser(self)

    module = import_module(f"reigen.cli.{command}")
    parsing = mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop)  # parse_args calls it, too
    with parsing, mock.patch.object(sys, "path", [*sys.path]):
        try:
            module.main([])
        except _MadeParser as made:
            return made.parser
    raise RuntimeError(f"reigen {command} has made no parser")


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
