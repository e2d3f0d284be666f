"""Writer of a JSON array in a file that is valid after every write.

Records are written over the closing bracket, with a new one behind them, by one call: whenever the process is killed,
between two instructions, the file is a JSON array. The kernel itself can be cut short by SIGKILL between two pages of
one call, and may keep its caller waiting there for room in its cache or on the disk, while others read. So records
that fit into the file's last page go first, and one record at a time crosses the border of a page, once there are
spaces at its place, which JSON allows behind the bracket: nothing is left to wait for then, and between the two pages
there is a fraction of a microsecond. `reigen.observe.trace_reader` copes with that, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from reigen.files import open_replacement

_PAGE_BYTES = 4096
_END = b"\n]\n"


class TraceFile:
    """File of a timeline, which replaces an older one at once and begins with a JSON value. For one thread.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, first: bytes) -> None:
        with contextlib.ExitStack() as on_failure:
            with open_replacement(path) as self._fd:
                on_failure.callback(os.close, self._fd)
                #: offset of the closing bracket's line
                self._end = 0
                self._put(b"[\n" + first)
            on_failure.pop_all()

    def append(self, records: Sequence[bytes]) -> None:
        """Add JSON values to the array. After an OSError the file holds those before, and is valid."""
        begin = 0
        while begin < len(records):
            free_bytes = -(self._end + len(_END)) % _PAGE_BYTES
            end = begin + 1
            nbytes = len(records[begin]) + 2
            while end < len(records) and nbytes + len(records[end]) + 2 <= free_bytes:
                nbytes += len(records[end]) + 2
                end += 1
            self._put(b"".join(b",\n" + record for record in records[begin:end]), makes_space=nbytes > free_bytes)
            begin = end

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _put(self, text: bytes, *, makes_space: bool = False) -> None:
        data = text + _END
        try:
            if makes_space:
                self._write(b" " * len(text), self._end + len(_END))
            self._write(data, self._end)
        except OSError:
            os.pwrite(self._fd, _END, self._end)
            os.ftruncate(self._fd, self._end + len(_END))
            raise
        self._end += len(text)

    def _write(self, data: bytes, offset: int) -> None:
        num_written = 0
        while num_written < len(data):  # less than all: the next attempt raises the reason
            num_written += os.pwrite(self._fd, data[num_written:], offset + num_written)
