"""Callbacks of the driver, for what ranks log: called in a thread of their own while a function runs in the ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Notes that wait for slow callbacks; the oldest of more are dropped.
_MAX_NOTES = 10_000


class NoteCallbacks:
    """Queue between the job's thread, which must not wait, and callbacks."""

    def __init__(self) -> None:
        self._notes: queue.Queue[tuple[Any] | None] = queue.Queue()
        self._is_used = False

    def put(self, note: Any) -> None:
        """Take a note; it is dropped while there are no callbacks, or where too many wait."""
        if self._is_used and self._notes.qsize() < _MAX_NOTES:
            self._notes.put((note,))

    @contextmanager
    def called(self, callbacks: Sequence[Callable[[Any], object]]) -> Iterator[None]:
        """Call these while the body runs, and for all notes of that time; then raise the first exception of theirs."""
        if not callbacks:
            yield
            return
        errors: list[Exception] = []
        thread = threading.Thread(target=self._call, args=(callbacks, errors), name="reigen-callbacks", daemon=True)
        self._is_used = True
        thread.start()
        try:
            yield
        finally:
            self._is_used = False
            self._notes.put(None)
            thread.join()
        if errors:
            raise errors[0]

    def _call(self, callbacks: Sequence[Callable[[Any], object]], errors: list[Exception]) -> None:
        while (item := self._notes.get()) is not None:
            for callback in callbacks:
                try:
                    callback(*item)
                except Exception as error:  # noqa: BLE001  the caller of run() gets it
                    errors.append(error)
