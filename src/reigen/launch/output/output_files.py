"""Files that keep each process's output unchanged: ``DIRECTORY/rank.N/stdout`` and ``stderr``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from reigen.errors import LaunchError
from reigen.files import open_directory, open_replacement, open_to_append
from reigen.resources.limits import explain_limit

#: Names of a process's files, by stream.
OUTPUT_NAMES = ("stdout", "stderr")
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def process_directory(number: int, num_ranks: int, name: str) -> str:
    """Return the directory of a process's files: ``rank.03``, or ``server.1`` for one with a name.

    A rank's number has as many digits as the largest rank, so that folders sort.
    """
    return name.replace(" ", ".") or f"rank.{number:0{len(str(num_ranks - 1))}}"


class OutputFile:
    """File of one stream of a process (0: stdout, 1: stderr), which replaces an older one, unless it ``appends``.

    ``complain`` is called once when the file cannot be written any more. The job goes on without it.

    Raises:
        LaunchError: the file cannot be made.
    """

    def __init__(self, directory: Path, stream: int, complain: Callable[[str], None], *, appends: bool = False) -> None:
        self._path = directory / OUTPUT_NAMES[stream]
        self._complain = complain
        self._is_broken = False
        self._fd = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # The user has named what is above; this name can be foreseen, and lead elsewhere at any moment.
            with open_directory(directory) as dir_fd:
                if appends:
                    self._fd = open_to_append(self._path.name, dir_fd=dir_fd)
                    self._identity = _file_identity(self._fd)
                else:
                    with open_replacement(self._path.name, dir_fd=dir_fd) as self._fd:
                        self._identity = _file_identity(self._fd)
        except OSError as error:
            self.close()
            raise LaunchError(f"cannot keep output in {self._path}: {explain_limit(error).strerror}") from None

    def write(self, data: bytes) -> None:
        """Append output, also after `close`: a server that is started again goes on in the same file."""
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
        """Close the file for now. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open_again(self) -> None:
        """Open the same file again; raises OSError if another one is there now."""
        with open_directory(self._path.parent) as dir_fd:
            self._fd = os.open(self._path.name, _APPENDING, dir_fd=dir_fd)
        if _file_identity(self._fd) != self._identity:
            raise OSError(errno.ESTALE, "another file is there now")


def _file_identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
