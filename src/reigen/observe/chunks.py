"""Chunks of slices that are small enough for a note."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from reigen.observe.messages import TraceSlice

#: Limit of a chunk's content, estimated from above, in bytes; one addition more fits into a note.
CHUNK_BYTES = 24 << 10
_SLICE_BYTES = 34
_ENTRY_BYTES = 12

Arguments = dict[str, Any]


@dataclass(slots=True)
class ChunkContent:
    """Content of a chunk; see `reigen.observe.messages.TraceChunk`."""

    rows: list[tuple[int, str]] = field(default_factory=list)
    labels: list[tuple[str, str]] = field(default_factory=list)
    arguments: list[bytes] = field(default_factory=list)
    slices: list[TraceSlice] = field(default_factory=list)


class ChunkBuilder:
    """Builder of chunks; names and arguments stand once in each."""

    def __init__(self) -> None:
        self._done: list[ChunkContent] = []
        self._start_chunk()

    def _start_chunk(self) -> None:
        self._page = ChunkContent()
        self._done.append(self._page)
        self._labels: dict[tuple[str, str], int] = {}
        self._arguments: dict[bytes, int] = {}
        self._nbytes = 0

    def add_rows(self, rows: list[tuple[int, str]]) -> None:
        """Add new rows, before the slices in them."""
        for row in rows:
            self._page.rows.append(row)
            self._nbytes += len(row[1].encode()) + _ENTRY_BYTES
            if self._nbytes > CHUNK_BYTES:
                self._start_chunk()

    def add(self, form: int, label: tuple[str, str], row: int, begin: int, nanoseconds: int, arguments: bytes) -> None:
        """Add a slice; ``arguments`` is a JSON object, or empty."""
        page = self._page
        place = self._labels.get(label)
        if place is None:
            place = self._labels[label] = len(page.labels)
            page.labels.append(label)
            self._nbytes += len(label[0]) + len(label[1]) + _ENTRY_BYTES
        detail = self._arguments.get(arguments) if arguments else -1
        if detail is None:
            detail = self._arguments[arguments] = len(page.arguments)
            page.arguments.append(arguments)
            self._nbytes += len(arguments) + _ENTRY_BYTES
        page.slices.append((form, place, row, begin, nanoseconds, detail))
        self._nbytes += _SLICE_BYTES
        if self._nbytes > CHUNK_BYTES:
            self._start_chunk()

    def take(self) -> list[ChunkContent]:
        """Return the chunks so far; the next slice begins a new one."""
        done = [page for page in self._done if page.slices or page.rows]
        self._done = []
        self._start_chunk()
        return done


#: Encode arguments of a slice.
encode_arguments: Callable[[Arguments], bytes] = msgspec.json.Encoder().encode
