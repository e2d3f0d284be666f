"""Text files of a project: which there are, how they are encoded, and their replacement as a whole.

A file is read in its encoding, and what is written has the same one, the same byte-order mark, and the same ends of
lines. It takes the old one's place by a rename, with its permissions, and only if that is still as it was read.
"""

from __future__ import annotations

import bisect
import difflib
import io
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reigen.errors import ConfigError
from reigen.files import open_replacement

#: Larger files are no source that somebody has written.
MAX_BYTES = 4 << 20
_BOM = b"\xef\xbb\xbf"
#: Files that say which packages a project needs.
PACKAGE_LISTS = re.compile(
    r"(requirements|constraints).*\.txt|environment.*\.ya?ml|pyproject\.toml|setup\.(cfg|py)|Pipfile"
)
_COMMAND_NAMES = re.compile(r"(Dockerfile|Makefile|Containerfile|Jenkinsfile|Procfile)(\..*)?")
_COMMAND_SUFFIXES = {".sh", ".bash", ".zsh", ".yaml", ".yml", ".slurm", ".sbatch", ".pbs", ".lsf", ".sge", ".mk"}
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replacement of a range of a text.

    Attributes:
        start, end: offsets of the text, in characters; equal: an insertion.
        new: what comes there.
    """

    start: int
    end: int
    new: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with edits; equal ones count once, and insertions keep their order.

    Raises:
        ConfigError: two of them overlap.
    """
    parts, position = [], 0
    for edit in sorted(dict.fromkeys(edits), key=lambda each: (each.start, each.end)):
        if edit.start < position:
            raise ConfigError(f"two edits of one place, the second to {edit.new!r}")
        parts += [text[position : edit.start], edit.new]
        position = edit.end
    return "".join([*parts, text[position:]])


class Lines:
    """Positions in a text: of lines as Python counts them, with columns in characters or in bytes of UTF-8."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in _LINE_END.finditer(text))]

    def offset(self, line: int, byte_column: int) -> int:
        """Return the offset of a position of `ast`: a line from 1, and a column in bytes of UTF-8."""
        start = self.starts[line - 1]
        content = self.line(line)
        return start + (byte_column if content.isascii() else len(content.encode()[:byte_column].decode()))

    def line(self, number: int) -> str:
        """Return a line, from 1, with its end."""
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end]

    def all(self) -> list[str]:
        """Return all lines, with their ends; `git` and `patch` count those of LF alone."""
        return re.findall(r"[^\n]*\n|[^\n]+", self.text)

    def number(self, offset: int) -> int:
        """Return the line, from 1, in which an offset is."""
        return bisect.bisect_right(self.starts, offset)

    def indentation(self, line: int) -> str:
        """Return the white space with which a line begins."""
        content = self.line(line)
        return content[: len(content) - len(content.lstrip(" \t"))]

    @property
    def line_end(self) -> str:
        """End of the first line."""
        match = _LINE_END.search(self.text)
        return match[0] if match else "\n"


@dataclass(frozen=True, slots=True)
class TextFile:
    """File as it was read.

    Attributes:
        path: as the user would name it.
        data: its bytes.
        text: without a byte-order mark; ends of lines as they are.
        encoding: in which the text is stored.
    """

    path: Path
    data: bytes
    text: str
    encoding: str

    def encode(self, text: str) -> bytes:
        """Return bytes of another text in the file's place."""
        return (_BOM if self.data.startswith(_BOM) else b"") + text.encode(self.encoding)


def read_text(path: Path) -> TextFile:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, is too large, or is no text in the encoding that it declares.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{size / 2**20:.0f} MiB, more than the {MAX_BYTES >> 20} that are read")
        data = path.read_bytes()
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if path.suffix == ".py" else "utf-8"
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        return TextFile(path, data, data.removeprefix(_BOM).decode(encoding), encoding)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except (SyntaxError, LookupError) as error:
        raise ConfigError(f"not UTF-8, and in no encoding that it declares: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not {error.encoding}: byte {error.start} is {data[error.start]:#04x}") from None


def replace_text(file: TextFile, text: str) -> None:
    """Write another text in a file's place, which keeps its permissions. A link stays: its target is replaced.

    Raises:
        ConfigError: it may not be written, has changed since it was read, or cannot be replaced; it is as it was.
    """
    target = file.path.resolve()
    try:
        mode = stat.S_IMODE(target.stat().st_mode)
        if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(target, os.W_OK):
            raise ConfigError("is read-only, and was left as it is")
        if target.read_bytes() != file.data:
            raise ConfigError("has changed since it was read, and was left as it is")
        with open_replacement(target) as descriptor, os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, mode)
            stream.write(file.encode(text))
            stream.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise ConfigError(f"cannot be replaced, and is as it was: {error.strerror}") from None


def find_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of a project, each once: those named, and in directories those that may start or be training.

    Links to directories are not followed, so there are no loops; hidden directories and environments are left out.

    Raises:
        ConfigError: a path does not exist.
    """
    found: set[tuple[int, int]] = set()
    for path in paths:
        try:
            is_directory = stat.S_ISDIR(path.stat().st_mode)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        for file in _walk(path) if is_directory else [path]:
            try:
                status = file.stat()
            except OSError:
                continue  # a link to nowhere, or to itself
            if stat.S_ISREG(status.st_mode) and (key := (status.st_dev, status.st_ino)) not in found:
                found.add(key)
                yield file


def _walk(directory: Path) -> Iterator[Path]:
    for where, directories, files in os.walk(directory):
        here = Path(where)
        directories[:] = sorted(
            name
            for name in directories
            if not (name.startswith(".") or name in _SKIPPED or (here / name / "pyvenv.cfg").exists())
        )
        yield from (here / name for name in sorted(files) if file_kind(Path(name)) is not None)


def file_kind(path: Path) -> str | None:
    """Return the kind of a file by its name: python, notebook, or commands; None: of no interest."""
    if path.suffix == ".py":
        return "python"
    if path.suffix == ".ipynb":
        return "notebook"
    is_known = path.suffix in _COMMAND_SUFFIXES or _COMMAND_NAMES.fullmatch(path.name)
    return "commands" if is_known or PACKAGE_LISTS.fullmatch(path.name) else None


def unified_diff(path: Path, old: str, new: str) -> str:
    """Return the difference of two texts as `git apply` and `patch -p1` take it; empty: there is none."""
    name = path.as_posix().removeprefix("./").lstrip("/")
    before, after = (Lines(text).all() for text in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
