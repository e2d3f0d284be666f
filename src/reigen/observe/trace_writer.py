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
import errno
import fcntl
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from reigen.files import open_replacement

_PAGE_BYTES = 4096
_END = b"\n]\n"
#: As much of a file as is looked through for its last record, and for its first.
_TAIL_BYTES, _HEAD_BYTES = 1 << 20, 4096
_LOCK_POLL_SECONDS = 0.02


class TraceFile:
    """File of a timeline, which replaces an older one at once and begins with a JSON value. For one thread.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, first: bytes) -> None:
        with contextlib.ExitStack() as on_failure:
            with open_replacement(path) as self._fd:
                on_failure.callback(os.close, self._fd)
                _lock(self._fd, 0.0)
                #: offset of the closing bracket's line
                self._end = 0
                self._put(b"[\n" + first)
            on_failure.pop_all()

    @classmethod
    def resume(cls, path: Path, seconds: float) -> tuple[Self, dict[str, Any]]:
        """Continue a file that another process has written, once that has ended or closed it.

        What a death in the middle of a write has left behind the last whole record is cut off.

        Args:
            path: of the file.
            seconds: how long to wait for who writes it.

        Returns:
            The file, and its first record; {} if that cannot be read.

        Raises:
            OSError: it is not there, cannot be written, or is still written by another (TimeoutError).
        """
        with contextlib.ExitStack() as on_failure:
            file = cls.__new__(cls)
            file._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            on_failure.callback(os.close, file._fd)
            if not _lock(file._fd, seconds):
                raise TimeoutError(errno.ETIMEDOUT, "another process still writes it", str(path))
            size = os.fstat(file._fd).st_size
            begin = max(0, size - _TAIL_BYTES)
            file._end = begin + _end_of_records(os.pread(file._fd, size - begin, begin))
            os.pwrite(file._fd, _END, file._end)
            os.ftruncate(file._fd, file._end + len(_END))
            head = os.pread(file._fd, _HEAD_BYTES, 0).split(b"\n", 2)
            on_failure.pop_all()
        return file, _parse_record(head[1] if len(head) > 1 else b"") or {}

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


def _lock(fd: int, seconds: float) -> bool:
    """Lock a file against other writers, until it is closed; return False if another one has it for so long."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:  # a file system without locks
            return True
        else:
            return True


def _end_of_records(tail: bytes) -> int:
    """Return where the last record that can be read ends; each has a line of its own."""
    end = len(tail)
    while end > 0:
        begin = tail.rfind(b"\n", 0, end) + 1
        if _parse_record(tail[begin:end]) is not None:
            return begin + len(tail[begin:end].rstrip(b", "))
        end = begin - 1
    return 0


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.strip().rstrip(b","))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
