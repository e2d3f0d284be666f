"""Interface of an engine to the timeline of its rank: notes between ranks, and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from reigen.engine.messages import Topic
from reigen.engine.observer import EngineObserver


class NoteChannel(Protocol):
    """Notes between ranks, and events of an engine. `reigen.engine.engine.Engine` is one."""

    @property
    def is_operational(self) -> bool:
        """Return whether notes are still delivered."""

    @property
    def unsent(self) -> int:
        """Number of notes that have not left yet."""

    def post(self, topic: Topic, data: bytes) -> None:
        """Send a note: rank 0's go to all others, theirs to rank 0."""

    def listen(self, topic: Topic, listener: Callable[[int, bytes], None]) -> None:
        """Have ``listener(sender, data)`` called for each note, on the thread that drives the engine."""

    def observe(self, observer: EngineObserver | None) -> None:
        """Report the engine's events to ``observer``."""
