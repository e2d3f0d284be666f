"""Commands that are written as lists of words, in YAML, JSON and Dockerfiles: an item is a word of the command."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from reigen.migrate.text_files import Lines

#: Where a list of one or several lines begins: behind a key, an instruction of Dockerfiles, or with a quoted word.
_FLOW = re.compile(r"(?:^(?P<indent>[ \t-]*)(?P<key>[\w.-]+):[ \t]*|\b(?:CMD|ENTRYPOINT|RUN)[ \t]+)?\[", re.MULTILINE)
_FLOW_WORD = re.compile(
    r"\s*(?:\\\s*)?(?:\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|(?P<plain>[^\s,\]\[\"'#][^,\]\[#]*))"
)
_BETWEEN = re.compile(r"(?:\s|\\|#[^\n]*)*")
_ITEM = re.compile(r"(?P<indent>\s*)-\s+(?P<word>\"[^\"]*\"|'[^']*'|[^\s#\"'][^#\r\n]*?)[ \t]*(?:#.*)?$")
_KEY = re.compile(
    r"(?P<indent>[ \t]*(?:-[ \t]+)?)(?P<key>[\w.-]+):[ \t]*(?P<value>[^\s\[{|>&#][^#\r\n]*?)?[ \t]*(?:#.*)?$"
)
#: Keys whose lists belong together: the program's words, and the rest of them.
_PROGRAM, _REST = ("entrypoint", "command"), ("command", "args")
_LAUNCHERS = re.compile(
    r"torchrun|torch\.distributed\.(?:launch|run)|mpirun|mpiexec|mpiexec\.hydra|srun|accelerate|deepspeed"
)
#: Lines of one folded command.
_MAX_FOLDED = 100
_FOLDED = re.compile(r"[:-][ \t]+>[-+]?\d?[ \t]*(?:#.*)?$")


@dataclass(frozen=True, slots=True)
class Word:
    """Word of a list.

    Attributes:
        text: without its quotes.
        line: from 1.
        start, end: offsets in the text, with its quotes.
        before: what a word that comes behind it begins with: the end of a line, an indentation and a dash; or a comma.
        quote: its quotes; empty: it has none.
    """

    text: str
    line: int
    start: int
    end: int
    before: str
    quote: str

    @property
    def is_single(self) -> bool:
        """True if it is one word of a command, and not a whole one for a shell."""
        return not re.search(r"\s", self.text)

    def replacement(self, *words: str) -> str:
        """Return words in its place, as items of the same list."""
        return self.before.join(f"{self.quote}{word}{self.quote}" for word in words)


@dataclass(frozen=True, slots=True)
class _List:
    """List of words: the key whose value it is, empty if there is none; that key's column and line."""

    key: str
    column: int
    line: int
    words: tuple[Word, ...]


class WordLists:
    """Lists of words in a text."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._line_end = lines, lines.line_end
        self._lists = sorted([*self._flow_lists(), *self._block_lists()], key=lambda each: each.line)
        self._commands = list(self._joined([*self._lists, *self._scalars()]))
        #: single words of lists by their lines, and launchers with what follows them in their commands
        self._words: dict[int, list[Word]] = {}
        self._launchers: dict[int, list[tuple[Word, list[str]]]] = {}
        for word in (word for each in self._lists for word in each.words if word.is_single):
            self._words.setdefault(word.line, []).append(word)
        for command in self._commands:
            for place, word in enumerate(command):
                if word.is_single and _LAUNCHERS.fullmatch(PurePosixPath(word.text).name):
                    rest = [each.text for each in command[place + 1 :]]
                    self._launchers.setdefault(word.line, []).append((word, rest))

    def at(self, offset: int) -> Word | None:
        """Return the single word that is written at an offset; None: no list has one there."""
        words = self._words.get(self._lines.number(offset), ())
        return next((word for word in words if word.start <= offset < word.end), None)

    def launchers(self, line: int) -> list[tuple[Word, list[str]]]:
        """Return the words of a line that are programs which start processes, each with the rest of its command."""
        return self._launchers.get(line, [])

    def _flow_lists(self) -> Iterator[_List]:
        text, position = self._lines.text, 0
        while match := _FLOW.search(text, position):
            position = match.end()
            words = list(self._flow_words(position))
            line = self._lines.number(match.start())
            is_list = match[0] != "[" or (bool(words) and bool(words[0].quote))
            if words and is_list and not self._lines.line(line).lstrip().startswith("#"):
                yield _List(match["key"] or "", len(match["indent"] or ""), line, tuple(words))
                position = words[-1].end

    def _flow_words(self, position: int) -> Iterator[Word]:
        """Yield words up to the closing bracket; none: it is no list of words."""
        text, found = self._lines.text, []
        while match := _FLOW_WORD.match(text, _skip(text, position)):
            kind = str(match.lastgroup)
            start, end = match.span(kind)
            value = match[kind].rstrip()
            quote = {"double": '"', "single": "'"}.get(kind, "")
            place = start - len(quote)
            stop = start + len(value) + len(quote) if kind == "plain" else end + len(quote)
            found.append(Word(value, self._lines.number(start), place, stop, ", ", quote))
            position = _skip(text, match.end())
            if text[position : position + 1] == "]":
                yield from found
                return
            if text[position : position + 1] != ",":
                return
            position = _skip(text, position + 1)
            if text[position : position + 1] == "]":
                yield from found
                return

    def _block_lists(self) -> Iterator[_List]:
        number, key, column, key_line = 1, "", 0, 0
        while number <= len(self._lines.starts):
            line = self._lines.line(number).rstrip("\r\n")
            if match := _KEY.match(line):
                key, column, key_line = ("", 0, 0) if match["value"] else (match["key"], len(match["indent"]), number)
            first = _ITEM.match(line)
            if first is None or (match is not None and _is_mapping(first["word"])):
                number += 1
                continue
            words, end = [], number
            while (item := self._item(end)) is not None and item["indent"] == first["indent"]:
                words.append(self._block_word(item, end))
                end += 1
            if words:
                yield _List(key, column, key_line or number, tuple(words))
            key, column, key_line, number = "", 0, 0, max(end, number + 1)

    def _item(self, number: int) -> re.Match[str] | None:
        """Return an item that is a word, on a line; None: there is none."""
        if number > len(self._lines.starts):
            return None
        item = _ITEM.match(self._lines.line(number).rstrip("\r\n"))
        return None if item is None or _is_mapping(item["word"]) or item["word"][0] in "|>[{&" else item

    def _block_word(self, item: re.Match[str], number: int) -> Word:
        written = item["word"]
        quote = written[0] if written[0] in "\"'" else ""
        start = self._lines.starts[number - 1] + item.start("word")
        before = f"{self._line_end}{item.string[: item.start('word')]}"
        return Word(written.strip(quote) if quote else written, number, start, start + len(written), before, quote)

    def _scalars(self) -> Iterator[_List]:
        """Yield programs that are one word behind their key."""
        for number in range(1, len(self._lines.starts) + 1):
            match = _KEY.match(self._lines.line(number).rstrip("\r\n"))
            if match and match["value"] and match["key"] in {*_PROGRAM, *_REST}:
                start = self._lines.starts[number - 1] + match.start("value")
                words = [Word(each, number, start, start, ", ", "") for each in match["value"].strip("\"'").split()]
                yield _List(match["key"], len(match["indent"]), number, tuple(words))

    def _joined(self, lists: list[_List]) -> Iterator[tuple[Word, ...]]:
        """Yield commands: lists, and those of a program and its arguments in one mapping as one."""
        taken: set[int] = set()
        rests: dict[int, list[_List]] = {}
        for each in sorted(lists, key=lambda each: each.line):
            if each.key in _REST:
                rests.setdefault(each.column, []).append(each)
        for first in lists if rests else ():
            if first.key not in _PROGRAM:
                continue
            of_column = rests.get(first.column, [])
            at = bisect_left(of_column, first.line, key=lambda each: each.line)
            near = of_column[max(0, at - len(_REST)) : at + len(_REST) + 1]  # a mapping has each key once
            other = next((each for each in near if self._belongs(first, each)), None)
            if other is not None:
                taken |= {id(first), id(other)}
                yield (*first.words, *other.words)
        yield from (each.words for each in self._lists if id(each) not in taken)

    def _belongs(self, first: _List, other: _List) -> bool:
        """Return whether two lists are one command: values of two keys of one mapping."""
        if (
            first.key not in _PROGRAM
            or other.key not in _REST
            or first.key == other.key
            or first.column != other.column
        ):
            return False
        if "entrypoint" in (first.key, other.key) and "args" in (first.key, other.key):
            return False
        begin, end = sorted((first.line, other.line))
        return begin < end and all(self._column(number) >= first.column for number in range(begin + 1, end + 1))

    def _column(self, number: int) -> int:
        line = self._lines.line(number)
        is_empty = not line.strip() or line.lstrip().startswith("#")
        return 1 << 20 if is_empty else len(line) - len(line.lstrip())


def folded_end(lines: Lines, number: int) -> int:
    """Return the last line of a folded text of YAML (``>``) that a line is in, as far as lines are joined there."""
    indentation = lines.indentation(number)
    above = number - 1
    while above > max(number - _MAX_FOLDED, 0) and (
        lines.indentation(above) == indentation or not lines.line(above).strip()
    ):
        above -= 1
    if above < 1 or not _FOLDED.search(lines.line(above).rstrip()) or len(lines.indentation(above)) >= len(indentation):
        return number
    while (
        number < len(lines.starts) and lines.line(number + 1).strip() and lines.indentation(number + 1) == indentation
    ):
        number += 1
    return number


def _skip(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return match.end() if match else position


def _is_mapping(word: str) -> bool:
    return word[0] not in "\"'" and re.match(r"[\w.-]+:(\s|$)", word) is not None
