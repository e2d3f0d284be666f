"""Files that keep what each process prints, as it printed it: ``DIRECTORY/rank.N/stdout`` and ``stderr``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from reigen.errors import LaunchError

#: Names of a process's files, by stream.
_NAMES = ("stdout", "stderr")


def folder_of(number: int, num_ranks: int, name: str) -> str:
    """Where the files of a process are.

    Args:
        number: its number in the job; a rank's has as many digits as the largest rank, so that folders sort.
        num_ranks: of the job.
        name: what it is called if it is no rank.

    Example:
        >>> folder_of(3, 16, ""), folder_of(17, 16, "server 1")
        ('rank.03', 'server.1')
    """
    return name.replace(" ", ".") or f"rank.{number:0{len(str(num_ranks - 1))}}"


class Record:
    """One stream of one process, in a file. What stood there before is replaced.

    Args:
        directory: of the process.
        stream: 0 for stdout, 1 for stderr.
        complain: told once when the file cannot be written any more. The job goes on without it.

    Raises:
        LaunchError: the file cannot be made.
    """

    def __init__(self, directory: Path, stream: int, complain: Callable[[str], None]) -> None:
        self._path = directory / _NAMES[stream]
        self._complain = complain
        self._is_broken = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] | None = self._path.open("wb", buffering=0)
        except OSError as error:
            raise LaunchError(f"cannot keep output in {self._path}: {error.strerror}") from None

    def write(self, data: bytes) -> None:
        """Append what was printed, also after `close`: a server that is started again goes on in the same file."""
        view = memoryview(data)
        try:
            while view and not self._is_broken:
                if self._file is None:
                    self._file = self._path.open("ab", buffering=0)
                view = view[self._file.write(view) :]
        except OSError as error:
            self._complain(f"{self._path} is not complete: {error.strerror}")
            self._is_broken = True
            self.close()

    def close(self) -> None:
        """Nothing more will be printed for now. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
