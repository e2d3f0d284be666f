"""Files that keep what each process prints, as it printed it: ``DIRECTORY/rank.N/stdout`` and ``stderr``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from reigen.errors import LaunchError
from reigen.files import open_directory, open_replacement
from reigen.resources.limits import explain_limit

#: Names of a process's files, by stream.
_NAMES = ("stdout", "stderr")


def process_directory(number: int, num_ranks: int, name: str) -> str:
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


class OutputFile:
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
        self._fd = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # The user has named what is above; this name can be foreseen, and lead elsewhere at any moment.
            with open_directory(directory) as dir_fd, open_replacement(self._path.name, dir_fd=dir_fd) as self._fd:
                self._identity = _file_identity(self._fd)
        except OSError as error:
            self.close()
            raise LaunchError(f"cannot keep output in {self._path}: {explain_limit(error).strerror}") from None

    def write(self, data: bytes) -> None:
        """Append what was printed, also after `close`: a server that is started again goes on in the same file."""
        view = memoryview(data)
        try:
            while view and not self._is_broken:
                if self._fd < 0:
                    self._open_again()
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._complain(f"{self._path} is not complete: {error.strerror}")
            self._is_broken = True
            self.close()

    def close(self) -> None:
        """Nothing more will be printed for now. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open_again(self) -> None:
        """Go on behind what stands in the file; nothing else that is there now is opened instead."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open_directory(self._path.parent) as dir_fd:
            self._fd = os.open(self._path.name, flags, dir_fd=dir_fd)
        if _file_identity(self._fd) != self._identity:
            raise OSError(errno.ESTALE, "another file is there now")


def _file_identity(descriptor: int) -> tuple[int, int]:
    """What tells a file from all others."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
