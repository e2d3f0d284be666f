"""Files that keep what each rank prints, as it printed it: ``DIRECTORY/rank.N/stdout`` and ``stderr``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from reigen.errors import LaunchError

#: Names of a rank's files, by stream.
_NAMES = ("stdout", "stderr")


class Record:
    """One stream of one rank, in a file. What stood there before is replaced.

    Args:
        directory: of the whole job.
        rank: whose stream; its number has as many digits as the largest one, so that names sort.
        num_ranks: of the job.
        stream: 0 for stdout, 1 for stderr.
        complain: told once when the file cannot be written any more. The job goes on without it.

    Raises:
        LaunchError: the file cannot be made.
    """

    def __init__(
        self, directory: Path, rank: int, num_ranks: int, stream: int, complain: Callable[[str], None]
    ) -> None:
        digits = len(str(num_ranks - 1))
        self._path = directory / f"rank.{rank:0{digits}}" / _NAMES[stream]
        self._complain = complain
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] | None = self._path.open("wb", buffering=0)
        except OSError as error:
            raise LaunchError(f"cannot keep output in {self._path}: {error.strerror}") from None

    def write(self, data: bytes) -> None:
        """Append what was printed."""
        view = memoryview(data)
        while self._file is not None and view:
            try:
                view = view[self._file.write(view) :]
            except OSError as error:
                self._complain(f"{self._path} is not complete: {error.strerror}")
                self.close()

    def close(self) -> None:
        """Nothing more will be printed. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
