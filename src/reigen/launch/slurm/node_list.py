"""Slurm's compressed lists: names of nodes (``n[08-11],m2``) and numbers for each of them (``4,1(x2)``). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from reigen.errors import ConfigError

#: Slurm's own limit of a list.
MAX_NODES = 65_536
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_node_list(text: str, name: str = "node list") -> list[str]:
    """Expand a list of nodes, in its order; where a name has several brackets, the right one counts fastest.

    Args:
        text: the list; numbers in brackets have at least the width of the first of their range.
        name: of the list, for messages.

    Raises:
        ConfigError: the list has another form (the message has it, and the position), or more than MAX_NODES names.

    Example:
        >>> expand_node_list("r[1-2]n[08-09],login")
        ['r1n08', 'r1n09', 'r2n08', 'r2n09', 'login']
    """
    names: list[str] = []
    for parts in _NodeListParser(text, name).items():
        num_names = 1
        for part in parts:
            num_names *= len(part)
        if len(names) + num_names > MAX_NODES:
            raise ConfigError(f"{name} {text!r} has more than {MAX_NODES} names")
        names += map("".join, product(*parts))
    return names


def expand_counts(text: str, name: str = "list of numbers") -> list[int]:
    """Expand a list of numbers, one for each node; raises ConfigError, with the position, where it has another form.

    Example:
        >>> expand_counts("4,1(x2)")
        [4, 1, 1]
    """
    counts: list[int] = []
    position = 0
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"{name} {text!r}: {part!r} at position {position} is not like 4 or 1(x2)")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > MAX_NODES:
            raise ConfigError(f"{name} {text!r} has more than {MAX_NODES} numbers")
        counts += [int(match[1])] * repeats
        position += len(part) + 1
    return counts


class _NodeListParser:
    """Parser of a list into items; each is a sequence of parts, and a part a list of alternatives."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._position = 0

    def items(self) -> Iterator[list[list[str]]]:
        """Yield the items of the list; raises ConfigError."""
        while True:
            yield self._item()
            if self._position == len(self._text):
                return
            self._position += 1  # the comma

    def _item(self) -> list[list[str]]:
        begin, parts = self._position, []
        while self._position < len(self._text) and self._text[self._position] != ",":
            if self._text[self._position] == "[":
                parts.append(self._bracket())
            else:
                parts.append([self._literal()])
        if not parts:
            raise self._error(begin, "there is no name")
        return parts

    def _literal(self) -> str:
        match = re.compile(r"[^\[\],\s]*").match(self._text, self._position)
        assert match is not None, "it matches the empty text, too"
        if not match[0]:
            letter = self._text[self._position]
            raise self._error(
                self._position, "no bracket is open" if letter == "]" else f"no name has {letter!r} in it"
            )
        self._position = match.end()
        return match[0]

    def _bracket(self) -> list[str]:
        opened = self._position
        end = self._text.find("]", opened)
        if end < 0:
            raise self._error(opened, "the bracket is not closed")
        numbers: list[str] = []
        position = opened + 1
        for part in self._text[opened + 1 : end].split(","):
            numbers += self._range(part, position)
            position += len(part) + 1
        self._position = end + 1
        return numbers

    def _range(self, part: str, position: int) -> list[str]:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise self._error(position, f"{part!r} is neither a number nor a range like 08-11")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise self._error(position, f"the range {part} descends")
        if last - first >= MAX_NODES:
            raise ConfigError(f"{self._name} {self._text!r} has more than {MAX_NODES} names")
        return [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]

    def _error(self, position: int, what: str) -> ConfigError:
        return ConfigError(f"{self._name} {self._text!r}: at position {position}, {what}")
