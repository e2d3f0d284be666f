"""File in which an engine looks for the reason when a job has failed. Its beginning is what users are shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from reigen.files import write_atomically
from reigen.launch.options import complain

_MAX_CHARS = 1 << 14


class FailureFile:
    """File for the messages of a job, which is there afterwards only where the job has failed.

    Args:
        path: of the file; empty: there is none.
        complain: gets what concerns the user.
    """

    def __init__(self, path: str, complain: Callable[[str], None] = complain) -> None:
        self._path = Path(path) if path else None
        self._complain = complain
        self._text = ""

    def complain(self, message: str) -> None:
        """Write a message of the launcher's, for the user and into the file."""
        self._complain(message)
        self._write(f"{self._text}reigen run: {message}\n")

    def begin_with(self, message: str) -> None:
        """Put the message about the first failure before all others."""
        self._write(f"{message}{self._text}")

    def close(self, exit_code: int) -> None:
        """Remove the file of a job that has succeeded."""
        if exit_code == 0 and self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        self._text = text[:_MAX_CHARS]
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, [self._text.encode()])
            except OSError as error:
                self._complain(f"{self._path} cannot be written: {error.strerror}")
                self._path = None
